"""The kinds of data that a shard can hold: one file each, and one line of the registry here.

Importing it costs numpy alone: Pillow, soundfile and soxr are imported where a file needs them. Classes that installed
packages register as entry points of the group ``longstride.modalities`` are imported, too: they bring options of verbs.
"""

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.audio import Audio
from longstride.data_pipelines.modalities.image import CHANNELS, Image
from longstride.data_pipelines.modalities.modality import Content, Modality, Properties, registered
from longstride.data_pipelines.modalities.text import Text

MODALITIES: dict[str, Modality] = {
    each.name: each for each in (*registered("longstride.modalities", Modality), Text(), Image(), Audio())
}


def modality_named(name: str) -> Modality:
    """The registered modality of that name. Raises DataError for a name that is not registered."""
    if name not in MODALITIES:
        raise DataError(f"modality={name!r}: not a registered modality; take one of {', '.join(sorted(MODALITIES))}")
    return MODALITIES[name]
