"""The kinds of data a shard can hold: one file and one line of ``MODALITIES`` each."""

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.audio import Audio, mulaw_decode
from longstride.data_pipelines.modalities.image import CHANNELS, MAX_PIXELS, Image
from longstride.data_pipelines.modalities.modality import Content, Modality, Properties
from longstride.data_pipelines.modalities.text import Text

_REGISTERED: tuple[Modality, ...] = (Text(), Image(), Audio())
MODALITIES = {modality.name: modality for modality in _REGISTERED}


def modality_named(name: str) -> Modality:
    """The registered modality of that name. Raises DataError for a name that is not registered."""
    if name not in MODALITIES:
        raise DataError(f"modality={name!r}: not a registered modality; take one of {', '.join(sorted(MODALITIES))}")
    return MODALITIES[name]


__all__ = [
    "CHANNELS",
    "MAX_PIXELS",
    "MODALITIES",
    "Audio",
    "Content",
    "Modality",
    "Properties",
    "modality_named",
    "mulaw_decode",
]
