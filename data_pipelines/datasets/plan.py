"""A published dataset as a build sees it: settings, and the plan of its shards."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstride.data_pipelines.datasets.dataset import Dataset
from longstride.data_pipelines.documents import SAMPLE_BYTES, Plan, check_shard_bytes
from longstride.data_pipelines.modalities import Modality, modality_named


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """What decides the bytes of a dataset's shards, beside its content: see ``planning.Settings``."""

    dataset: Dataset
    unpublished: bool  # whether other content than the published one is taken
    shard_bytes: int

    @property
    def modality(self) -> Modality:
        """The dataset's."""
        return modality_named(self.dataset.modality)

    def check(self) -> None:
        """Raises DataError for a value that cannot be."""
        check_shard_bytes(self.shard_bytes)

    def to_json(self) -> dict[str, Any]:
        """As the manifest records it: not in which of its forms the dataset was read."""
        return {
            "dataset": self.dataset.name,
            "unpublished": self.unpublished,
            "shard_bytes": self.shard_bytes,
            "sample_bytes": SAMPLE_BYTES,
        }


def make_dataset_plan(settings: DatasetSettings, given: Path) -> Plan:
    """Find and check the documents. Raises DataError for what cannot be taken."""
    found = settings.dataset.find(given, settings.unpublished)
    return Plan(settings, dict(found.properties), found.splits, found.counts)
