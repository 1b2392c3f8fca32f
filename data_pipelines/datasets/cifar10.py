"""CIFAR-10: 60,000 pictures of 32 x 32 pixels, in its binary and in its Python version.

The last 25th of the training pictures, in the published order, is the validation split: 2,000 of 50,000. Both versions
have the same pictures in the same order, so both give the same shards.

The Python version is pickled. A pickle is a program, which is only listed here and never run: numpy writes an array as
its bytes and a few numbers, by which they are recognised.
"""

import pickletools
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longstride.data_pipelines.datasets.dataset import (
    WAY_OUT,
    Archive,
    Dataset,
    DatasetContent,
    Excerpt,
    PlaneRows,
    PublishedFile,
    excerpts,
    find_members,
    picture_properties,
)
from longstride.data_pipelines.datasets.members import Member
from longstride.data_pipelines.documents import OpenInput
from longstride.data_pipelines.errors import DataError, as_data_error

_EDGE = 32
_CLASSES = 10
_PICTURE_BYTES = 3 * _EDGE**2
_ROW_BYTES = 1 + _PICTURE_BYTES
_VALIDATION_SHARE = 25
_TRAIN, _TEST = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"
_BINARY, _PYTHON = ".bin", ""  # suffixes of names in the two versions
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

_MOST_BYTES = 2**27  # of a pickled batch, which is held in memory: the published ones have 31 MB
_MOST_STEPS = 2**20  # of its program: they have a tenth of them
_OTHER_OPERATIONS = {  # their arguments are no constants of the pickle
    *("PROTO", "FRAME", "GLOBAL", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"),
}


@dataclass(frozen=True, kw_only=True)
class Cifar10(Dataset):
    """The dataset, in both versions."""

    batches: Mapping[str, PublishedFile] = field(default_factory=lambda: _KNOWN)
    name: str = "cifar10"
    modality: str = "image"
    has_labels: bool = True

    @property
    def file_names(self) -> set[str]:
        return {*_NAMES, *_ARCHIVE_NAMES}

    def find(self, path: Path, unpublished: bool) -> DatasetContent:
        """Find the splits in an archive, its folder, or a folder above."""

        def is_complete(members: Mapping[str, Member]) -> bool:
            names, batches = _version(members)
            return len(batches) == len(names)

        names, batches = _version(find_members(path, _NAMES, _ARCHIVE_NAMES, is_complete))
        if not batches:
            rule = "(data_batch_1.bin … test_batch.bin, or data_batch_1 … test_batch of the Python version)"
            raise DataError(f"{path}: holds no batch of CIFAR-10 {rule}; {self.where}")
        missing = [name for name in names if name not in batches]
        if missing and not unpublished:
            raise DataError(f"{path}: lacks {', '.join(missing)}; {WAY_OUT}")
        with OpenInput() as open_input:
            if not unpublished:
                for name, member in batches.items():
                    self.batches[name].check(member, open_input)
            contents = {name.partition(".")[0]: _pictures_of(member, open_input) for name, member in batches.items()}
        pictures = [picture for name in _TRAIN for picture in contents.get(name, ())]
        held_out = len(pictures) // _VALIDATION_SHARE
        splits = {
            "train": pictures[: len(pictures) - held_out],
            "validation": pictures[len(pictures) - held_out :],
            "test": contents.get(_TEST, []),
        }
        if not splits["train"]:
            raise DataError(f"{path}: holds no picture to train on; {self.where}")
        splits = {name: members for name, members in splits.items() if members}
        return DatasetContent(splits, picture_properties(_EDGE))


def _version(members: Mapping[str, Member]) -> tuple[list[str], dict[str, Member]]:
    """Choose the version with more batches, else the binary one. Return all its names, and the batches."""
    versions = [[f"{name}{version}" for name in (*_TRAIN, _TEST)] for version in (_BINARY, _PYTHON)]
    batches = [(names, {name: members[name] for name in names if name in members}) for names in versions]
    return max(batches, key=lambda version: len(version[1]))


def _pictures_of(member: Member, open_input: OpenInput) -> list[Excerpt]:
    """Return the pictures of a batch. Raises DataError for a file that is not a batch."""
    if not member.base_name.endswith(_BINARY):
        batch = PickledBatch(member, _EDGE)
        return excerpts(batch, len(batch.load(open_input)[0]), _PICTURE_BYTES)
    if not member.size or member.size % _ROW_BYTES:
        rule = f"{member.size:,} bytes are not a multiple of {_ROW_BYTES:,} (a label and 32 x 32 x 3 bytes)"
        raise DataError(f"{member.shown}: {rule}; fetch it again")
    return excerpts(PlaneRows(member, _EDGE, labels=_CLASSES), member.size // _ROW_BYTES, _PICTURE_BYTES)


class PickledBatch(PlaneRows):
    """The pictures of a pickled batch. About 30 MB are held in memory while it is read."""

    def load(self, open_input: OpenInput) -> tuple[np.ndarray, list[int]]:
        """Return all rows and labels, see ``read_batch``. Raises DataError for a file that is not a batch."""

        def load(_: ExitStack) -> tuple[np.ndarray, list[int]]:
            if self.member.size > _MOST_BYTES:
                rule = f"{self.member.size:,} bytes; a batch has at most {_MOST_BYTES:,}"
                raise DataError(f"{self.member.shown}: {rule}; fetch it again")
            with OpenInput() as open_file:  # the caller's holds the result
                return read_batch(self.member.shown, self.member.read(open_file, 0, self.member.size), _PICTURE_BYTES)

        return open_input.get(self, load)

    def rows(self, open_input: OpenInput, first: int, stop: int) -> np.ndarray:
        return self.load(open_input)[0][first:stop]

    def label(self, open_input: OpenInput, offset: int) -> int:
        labels, number = self.load(open_input)[1], offset // _PICTURE_BYTES
        if number >= len(labels) or not 0 <= labels[number] < _CLASSES:
            rule = f"has no label from 0 to {_CLASSES - 1} for picture {number}"
            raise DataError(f"{self.member.shown}: {rule}; fetch it again")
        return labels[number]


def read_batch(where: str, content: bytes, row_bytes: int) -> tuple[np.ndarray, list[int]]:
    """Return the array of a pickled batch, (n, row_bytes) uint8, and its labels. Raises DataError, naming ``where``.

    The bytes of the array are the longest text of the pickle. Before them numpy writes the state of the array and of
    its type: version, shape, type, byte order, and whether by columns. Labels are the numbers after the text
    ``labels``.
    """
    numbers: deque[int] = deque(maxlen=10)
    texts: deque[str | bytes] = deque(maxlen=2)
    longest: tuple[list[int], list[str | bytes], str | bytes] = [], [], b""  # with the constants before it
    labels: list[int] = []
    is_label = False
    with as_data_error(where, damage=(Exception,), damaged="cannot be read as a pickle"):
        for step, (operation, argument, _) in enumerate(pickletools.genops(content)):
            if step > _MOST_STEPS:
                raise ValueError(f"it has more than {_MOST_STEPS:,} operations, more than any batch")
            value: Any = {"NEWTRUE": True, "NEWFALSE": False}.get(operation.name, argument)
            if operation.name in _OTHER_OPERATIONS:
                continue
            if isinstance(value, int):
                numbers.append(value)
                labels += [value] if is_label else []
            elif isinstance(value, str | bytes):
                if len(value) > len(longest[2]):
                    longest = list(numbers), list(texts), value
                texts.append(value)
                # Python 3 writes "latin1" after each text of bytes in protocol 2.
                is_label = value in ("labels", b"labels") or (is_label and value == "latin1")
        raw = longest[2] if isinstance(longest[2], bytes) else longest[2].encode("latin1")
    match longest[:2]:
        case [1, int(count), int(width), 0, 1, 3, -1, -1, 0, 0], ["u1" | b"u1", "|" | b"|"]:
            if width == row_bytes and len(raw) == count * width:
                return np.frombuffer(raw, dtype=np.uint8).reshape(count, width), labels
    raise DataError(f"{where}: is not a batch, whose array of bytes has rows of {row_bytes}; fetch it again")


CIFAR10 = Cifar10(
    archive=Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        size=170_052_171,
        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    )
)
