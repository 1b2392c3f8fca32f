"""Published datasets that a build reads as they are distributed: one file and one line of ``DATASETS`` each.

Installed packages can register further classes as entry points of the group ``longstride.datasets``.
"""

from longstride.data_pipelines.datasets.byte_corpus import ENWIK8, TEXT8
from longstride.data_pipelines.datasets.cifar10 import CIFAR10
from longstride.data_pipelines.datasets.dataset import Dataset, default_input, fetch_input
from longstride.data_pipelines.datasets.imagenet64 import IMAGENET64
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import registered

_REGISTERED: tuple[Dataset, ...] = (CIFAR10, IMAGENET64, ENWIK8, TEXT8)
DATASETS = {dataset.name: dataset for dataset in (*registered("longstride.datasets", Dataset), *_REGISTERED)}


def dataset_named(name: str) -> Dataset:
    """Return the registered dataset of a name. Raises DataError for a name that is not registered."""
    if name not in DATASETS:
        raise DataError(f"dataset={name}: is not a known dataset; take one of {', '.join(sorted(DATASETS))}")
    return DATASETS[name]
