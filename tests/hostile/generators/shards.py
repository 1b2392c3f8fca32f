"""Data folders that lie: manifests of other types, and sealed ones whose counts and places are not the files'."""

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from longstride.data_pipelines.shards.manifest import (
    INDEX_DTYPE,
    DataManifest,
    ShardRecord,
    SplitRecord,
    index_bytes,
    index_to_bytes,
)
from longstride.data_pipelines.stores import open_store
from tests.hostile.generators.files import sparse

# What takes the place of a field of the manifest, as JSON.
VALUES = {
    "null": "null",
    "true": "true",
    "below zero": "-1",
    "a fraction": "1.5",
    "a text": '"x"',
    "a list": "[]",
    "an object": "{}",
    "of 38 digits": "9" * 38,
    "of 5,000 digits": "9" * 5000,
    "a long text": json.dumps("y" * 200_000),
}
FIELDS = (
    ("format",), ("format_version",), ("modality",), ("properties",), ("made",), ("documents",), ("splits",),
    ("fingerprint",), ("splits", "train"), ("splits", "train", "documents"), ("splits", "train", "shards"),
    ("splits", "train", "shards", 0),
    *(("splits", "train", "shards", 0, name) for name in ShardRecord.__slots__),
)  # fmt: skip


def set_field(folder: Path, field: tuple[Any, ...], value: str) -> None:
    """Puts a value, as JSON, in the place of a field of the manifest."""
    path = folder / DataManifest.FILE_NAME
    manifest = json.loads(path.read_text())
    section = manifest
    for name in field[:-1]:
        section = section[name]
    section[field[-1]] = "the value's place"
    path.write_text(json.dumps(manifest).replace('"the value\'s place"', value))


def reseal(folder: Path, change: Callable[[ShardRecord], ShardRecord]) -> None:
    """Changes the record of the first shard to train on, and makes the manifest that a build would have made of it."""
    manifest = DataManifest.load(open_store(folder))
    train = manifest.splits["train"]
    shards = (change(train.shards[0]), *train.shards[1:])
    splits = {**manifest.splits, "train": SplitRecord(train.documents, shards)}
    sealed = replace(manifest, splits=splits)
    (folder / DataManifest.FILE_NAME).write_text(sealed.to_json())


def reindex(folder: Path, change: Callable[[np.ndarray], None]) -> None:
    """Changes the rows of the first shard's index, (samples,) INDEX_DTYPE, under a manifest that agrees."""

    def changed(record: ShardRecord) -> ShardRecord:
        path = folder / record.index_name
        index = np.load(path).astype(INDEX_DTYPE)
        change(index)
        path.write_bytes(index_to_bytes(index))
        return replace(
            record,
            content_bytes=int(index["length"].sum(dtype=np.int64)),
            documents=int(index["ends"].sum(dtype=np.int64)),
            index_sha256=sha256(path.read_bytes()).hexdigest(),
        )

    reseal(folder, changed)


def _endless(folder: Path) -> None:
    """Build a shard with a terabyte of zeros after its samples."""

    def changed(record: ShardRecord) -> ShardRecord:
        sparse(folder / record.name, 2**40)
        return replace(record, file_bytes=2**40)

    reseal(folder, changed)


def _endless_index(folder: Path, samples: int) -> None:
    def changed(record: ShardRecord) -> ShardRecord:
        sparse(folder / record.index_name, index_bytes(samples))
        return replace(record, samples=samples)

    reseal(folder, changed)


def _rows(name: str, row: int, value: int) -> Callable[[Path], None]:
    def change(index: np.ndarray) -> None:
        index[name][row] = value

    return lambda folder: reindex(folder, change)


def _text(change: Callable[[str], str]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        path = folder / DataManifest.FILE_NAME
        path.write_bytes(change(path.read_text()).encode())

    return write


# Each is refused by every verb that reads the first shard to train on.
LIES: dict[str, Callable[[Path], object]] = {
    "a terabyte behind the samples": _endless,
    "an index of a terabyte": lambda folder: _endless_index(folder, 2**35),
    "an index of as many samples as there may be": lambda folder: _endless_index(folder, 2**23),
    "no sample": lambda folder: reseal(folder, lambda record: replace(record, samples=0)),
    "a document more": lambda folder: reseal(folder, lambda record: replace(record, documents=record.documents + 1)),
    "a byte more": lambda folder: reseal(folder, lambda record: replace(record, content_bytes=2**62)),
    "a shorter shard": lambda folder: reseal(folder, lambda record: replace(record, file_bytes=512)),
    "a longer shard": lambda folder: reseal(folder, lambda record: replace(record, file_bytes=2**62)),
    "a name above": lambda folder: reseal(folder, lambda record: replace(record, name="../train-00000.tar")),
    **{
        f"{name} of row {row} at {value}": _rows(name, row, value)
        for name in ("member", "content")
        for row in (0, 1, -1)
        for value in (3, 2**20, 2**36, 2**63 - 1, 2**63, 2**64 - 1)
    },
    **{
        f"length of row {row} {value}": _rows("length", row, value)
        for row in (0, -1)
        for value in (0, 2**31, 2**32 - 1)
    },
    "other line ends": _text(lambda text: text.replace("\n", "\r\n")),
    "an end of line more": _text(lambda text: text + "\n"),
    "no end of line": _text(lambda text: text.rstrip("\n")),
    "other spaces": _text(lambda text: json.dumps(json.loads(text))),
    "a key twice": _text(lambda text: text.replace('  "modality"', '  "modality": "audio",\n  "modality"', 1)),
}  # fmt: skip
