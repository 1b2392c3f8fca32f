"""The kinds of data a shard can hold: one file and one line of ``MODALITIES`` each."""

from data_pipelines.errors import DataError
from data_pipelines.modalities.modality import Modality
from data_pipelines.modalities.text import TEXT

MODALITIES: dict[str, Modality] = {modality.name: modality for modality in (TEXT,)}


def modality_named(name: str) -> Modality:
    """The registered modality of that name. Raises DataError for a name that is not registered."""
    if name not in MODALITIES:
        raise DataError(f"modality={name!r}: not a registered modality; take one of {', '.join(sorted(MODALITIES))}")
    return MODALITIES[name]


__all__ = ["MODALITIES", "Modality", "modality_named"]
