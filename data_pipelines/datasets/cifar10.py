"""CIFAR-10: 60,000 pictures of 32 x 32 pixels, in its binary and in its Python version.

The last 25th of the training pictures, in the published order, is the validation split: 2,000 of 50,000. Both versions
hold the same pictures in the same order, so that both give the same shards.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from longstride.data_pipelines.datasets.batch_pickle import PickledBatch
from longstride.data_pipelines.datasets.dataset import (
    WAY_OUT,
    Archive,
    Archives,
    Dataset,
    DatasetContent,
    PublishedFile,
    files_in,
)
from longstride.data_pipelines.datasets.excerpts import Excerpts, PlaneRows, Stretch, picture_properties
from longstride.data_pipelines.datasets.members import Member, whole_file
from longstride.data_pipelines.documents import OpenInput
from longstride.data_pipelines.errors import DataError

_EDGE = 32
_CLASSES = 10
_PICTURE_BYTES = 3 * _EDGE**2
_ROW_BYTES = 1 + _PICTURE_BYTES
_VALIDATION_SHARE = 25
_TRAIN, _TEST = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"
_BINARY, _PYTHON = ".bin", ""  # suffixes of the names in the two versions
_NAMES = {f"{name}{version}" for name in (*_TRAIN, _TEST) for version in (_BINARY, _PYTHON)}
_ARCHIVE_NAMES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")

_BINARY_BYTES = 10_000 * _ROW_BYTES
_KNOWN = {
    "data_batch_1.bin": PublishedFile(_BINARY_BYTES, "sha1", "aadd24acce27caa71bf4b10992e9e7b2d74c2540"),
    "data_batch_2.bin": PublishedFile(_BINARY_BYTES, "sha1", "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795"),
    "data_batch_3.bin": PublishedFile(_BINARY_BYTES, "sha1", "1dd00a74ab1d17a6e7d73e185b69dbf31242f295"),
    "data_batch_4.bin": PublishedFile(_BINARY_BYTES, "sha1", "aab85764eb3584312d3c7f65fd2fd016e36a258e"),
    "data_batch_5.bin": PublishedFile(_BINARY_BYTES, "sha1", "26e2849e66a845b7f1e4614ae70f4889ae604628"),
    "test_batch.bin": PublishedFile(_BINARY_BYTES, "sha1", "67eb016db431130d61cd03c7ad570b013799c88c"),
    "data_batch_1": PublishedFile(31_035_704, "md5", "c99cafc152244af753f735de768cd75f"),
    "data_batch_2": PublishedFile(31_035_320, "md5", "d4bba439e000b95fd0a9bffe97cbabec"),
    "data_batch_3": PublishedFile(31_035_999, "md5", "54ebc095f3ab1f0389bbae665268c751"),
    "data_batch_4": PublishedFile(31_035_696, "md5", "634d18415352ddfa80567beed471001a"),
    "data_batch_5": PublishedFile(31_035_623, "md5", "482c414d41f54cd18b22e5b47cb7c3cb"),
    "test_batch": PublishedFile(31_035_526, "md5", "40351d587109b95175f43aff81a1287e"),
}


@dataclass(frozen=True, kw_only=True)
class Cifar10(Dataset):
    """The dataset, in both versions."""

    batches: Mapping[str, PublishedFile] = field(default_factory=lambda: _KNOWN)
    name: str = "cifar10"
    modality: str = "image"

    @property
    def file_names(self) -> set[str]:
        return {*_NAMES, *_ARCHIVE_NAMES}

    def find(self, given: Path, unpublished: bool) -> DatasetContent:
        """The splits of an archive, its folder, or one above."""
        names, batches = _version(_batches_in(given))
        if not batches:
            raise DataError(
                f"{given}: holds no batch of CIFAR-10 (data_batch_1.bin … test_batch.bin, or data_batch_1 … "
                f"test_batch of the Python version); {self.where}"
            )
        missing = [name for name in names if name not in batches]
        if missing and not unpublished:
            raise DataError(f"{given}: lacks {', '.join(missing)}; {WAY_OUT}")
        with OpenInput() as open_input:
            if not unpublished:
                for name, member in batches.items():
                    self.batches[name].check(member, open_input)
            stretches = {name.partition(".")[0]: _stretch_of(member, open_input) for name, member in batches.items()}
        pictures = Excerpts([stretches[name] for name in _TRAIN if name in stretches])
        held_out = len(pictures) // _VALIDATION_SHARE
        splits = {
            "train": pictures[: len(pictures) - held_out],
            "validation": pictures[len(pictures) - held_out :],
            "test": Excerpts([stretches[_TEST]] if _TEST in stretches else []),
        }
        if not splits["train"]:
            raise DataError(f"{given}: holds no picture to train on; {self.where}")
        splits = {name: excerpts for name, excerpts in splits.items() if excerpts}
        return DatasetContent(splits, picture_properties(_EDGE))


def _version(members: Mapping[str, Member]) -> tuple[list[str], dict[str, Member]]:
    """The version with more batches (the binary one where both are whole): all its names, and its batches."""
    versions = [[f"{name}{version}" for name in (*_TRAIN, _TEST)] for version in (_BINARY, _PYTHON)]
    batches = [(names, {name: members[name] for name in names if name in members}) for names in versions]
    return max(batches, key=lambda version: len(version[1]))


def _batches_in(given: Path) -> dict[str, Member]:
    """The batches, by name, of the nearest place that has any. Unpacked batches come before those in archives."""
    for files in files_in(given):
        unpacked = {path.name: whole_file(path) for path in files if path.name in _NAMES}
        if unpacked:
            return unpacked
    archives = Archives(_ARCHIVE_NAMES, given)
    for files in files_in(given):
        members: dict[str, Member] = {}
        for path in archives.in_order(files):
            for member in archives.members(path):
                if member.base_name in _NAMES:
                    members.setdefault(member.base_name, member)
            names, batches = _version(members)
            if len(batches) == len(names):  # no other archive need be opened
                break
        if members:
            return members
    archives.check_nothing_passed_over()
    return {}


def _stretch_of(member: Member, open_input: OpenInput) -> Stretch:
    """The pictures of a batch. Raises DataError for a file that is no batch."""
    if not member.base_name.endswith(_BINARY):
        batch = PickledBatch(member, _EDGE)
        return Stretch(batch, 0, len(batch.rows(open_input, 0, None)), _PICTURE_BYTES)
    if not member.size or member.size % _ROW_BYTES:
        raise DataError(
            f"{member.shown}: {member.size:,} bytes are no rows of {_ROW_BYTES:,} (a label and 32 x 32 x 3 bytes); "
            "fetch it again"
        )
    return Stretch(PlaneRows(member, _EDGE, 0, labels=_CLASSES), 0, member.size // _ROW_BYTES, _PICTURE_BYTES)


CIFAR10 = Cifar10(
    archive=Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        size=170_052_171,
        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    )
)
