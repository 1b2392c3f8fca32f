"""The kinds of data of a shard: one file each, and one line of the registry here.

Importing this package only imports numpy; Pillow, soundfile and soxr are imported for files that need them. It also
imports the classes that installed packages register as entry points of the group ``longstride.modalities``, because
they add command-line options.
"""

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.audio import Audio
from longstride.data_pipelines.modalities.image import CHANNELS, Image
from longstride.data_pipelines.modalities.modality import Content, Modality, Properties, registered
from longstride.data_pipelines.modalities.text import Text

MODALITIES: dict[str, Modality] = {
    modality.name: modality for modality in (*registered("longstride.modalities", Modality), Text(), Image(), Audio())
}


def modality_named(name: str) -> Modality:
    """Return the registered modality of a name. Raises DataError for a name that is not registered."""
    if name not in MODALITIES:
        raise DataError(f"modality={name!r}: not a registered modality; take one of {', '.join(sorted(MODALITIES))}")
    return MODALITIES[name]
