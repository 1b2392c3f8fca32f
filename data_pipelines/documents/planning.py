"""What a build will write, known before a byte is written: splits, order of documents, and every shard's pieces.

Which split a file goes to is a hash of (seed, its path under the input), so that it stays there when other files are
added; its place among the documents of the split is another such hash, so that each shard is a mixture of all folders.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Protocol

from longstride.data_pipelines.documents.documents import Document, FileDocument
from longstride.data_pipelines.documents.shard_writer import SAMPLE_BYTES, Piece, pack
from longstride.data_pipelines.documents.walk import WalkCounts, find_documents
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Modality, Properties
from longstride.data_pipelines.shards import DataManifest, ShardRecord, SplitRecord


class Settings(Protocol):
    """What decides the bytes of a build, beside the input."""

    @property
    def modality(self) -> Modality:
        """What kind of data it is."""

    @property
    def shard_bytes(self) -> int:
        """Content bytes of a shard at most."""

    def check(self) -> None:
        """Raises DataError for a value that cannot be."""

    def to_json(self) -> dict[str, Any]:
        """As the manifest records it."""


@dataclass(frozen=True, slots=True)
class FileSettings:
    """Those of a build from files: see ``Settings``."""

    modality: Modality
    asked: Properties  # of the documents
    suffixes: tuple[str, ...]
    exclude: tuple[str, ...]
    validation_fraction: float
    shard_bytes: int
    seed: int

    def check(self) -> None:
        """Raises DataError for a value that cannot be."""
        for name in self.asked:
            if name not in self.modality.asks:
                good = ", ".join(self.modality.asks) or "none"
                raise DataError(f"{name}: no property of {self.modality.name}; it asks for {good}")
        if not 0 <= self.validation_fraction < 1:
            raise DataError(
                f"validation_fraction={self.validation_fraction}: must be at least 0 and less than 1, such as 0.05"
            )
        check_shard_bytes(self.shard_bytes)
        for name in self.exclude:  # what could match no name would be passed over in silence
            if not name or set(name) & set("/*?"):
                good = PurePath(name).name.strip("*?.") or "vendor"
                raise DataError(f"exclude={name}: must be a plain name, such as {good}")
        for suffix in self.suffixes:
            end = suffix.rpartition(".")[2].strip("*/") or "txt"
            if not suffix.startswith("."):
                raise DataError(f"suffixes={suffix}: must begin with a dot, such as .{end}")
            if suffix != f".{end}":
                raise DataError(f"suffixes={suffix}: must be what a name ends in from its last dot, such as .{end}")

    def to_json(self) -> dict[str, Any]:
        """As the manifest records it."""
        return {
            "asked": dict(self.asked),
            "suffixes": list(self.suffixes),
            "exclude": list(self.exclude),
            "validation_fraction": self.validation_fraction,
            "shard_bytes": self.shard_bytes,
            "sample_bytes": SAMPLE_BYTES,
            "seed": self.seed,
        }


def check_shard_bytes(shard_bytes: int) -> None:
    """Raises DataError for a size that no shard can have."""
    if shard_bytes < 1:
        raise DataError(f"shard_bytes={shard_bytes}: must be at least 1, such as 16777216")


@dataclass(frozen=True)
class Plan:
    """All that a build will write, but for the contents."""

    settings: Settings
    properties: Properties  # of every document
    splits: Mapping[str, Sequence[Document]]  # in the order in which they are written
    counts: WalkCounts

    @property
    def content_bytes(self) -> int:
        """Content bytes over all splits."""
        return sum(document.size for members in self.splits.values() for document in members)

    def shards(self) -> Iterator[tuple[str, list[Piece]]]:
        """The name of each shard, in canonical order, and what it holds. Made anew each time, a shard at a time."""
        for split, members in self.splits.items():
            for number, pieces in enumerate(pack(members, self.settings.shard_bytes, self.settings.modality)):
                yield f"{split}-{number:05d}.tar", pieces

    @cached_property
    def identity(self) -> dict[str, str]:
        """SHA-256 (hexadecimal) over what decides the shards: of the settings, and of the documents as they are now.

        Where the input lies does not count.
        """
        settings = [
            DataManifest.FORMAT_VERSION,
            self.settings.modality.name,
            self.settings.to_json(),
            dict(self.properties),
        ]
        documents = hashlib.sha256()
        for split, members in self.splits.items():
            for one in members:
                documents.update(json.dumps((split, *one.identity)).encode())
        whole = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        return {"settings": whole.hexdigest(), "files": documents.hexdigest()}

    def manifest(self, records: Mapping[str, ShardRecord]) -> DataManifest:
        """The manifest of the whole, from every shard's record by its name."""
        shards: dict[str, list[ShardRecord]] = {split: [] for split in self.splits}
        for name, record in records.items():
            shards[name.partition("-")[0]].append(record)
        splits = {
            split: SplitRecord(len(members), tuple(sorted(shards[split], key=_number_of)))
            for split, members in self.splits.items()
        }
        return DataManifest(self.settings.modality.name, self.properties, splits, self.made)

    @property
    def made(self) -> dict[str, Any]:
        """What the manifest says about how the set was made: nothing of the machine or the moment."""
        left_out = {"empty_files": self.counts.empty, "symlinks": self.counts.symlinks}
        return {"settings": self.settings.to_json(), "left_out": left_out}


def make_plan(inputs: Sequence[Path], settings: FileSettings) -> Plan:
    """Find and measure the documents. Raises DataError for inputs and documents that cannot be taken."""
    documents, properties, counts = find_documents(
        inputs, settings.suffixes, settings.exclude, settings.modality, settings.asked
    )
    return Plan(settings, properties, _split(documents, settings), counts)


def _number_of(record: ShardRecord) -> int:
    return int(record.name.removesuffix(".tar").partition("-")[2])


def _split(documents: list[FileDocument], settings: FileSettings) -> dict[str, list[FileDocument]]:
    """Train and validation documents, each in the order in which they are written."""

    def place(document: FileDocument) -> int:
        return _hash(settings.seed, "split", document.relative)

    fraction = settings.validation_fraction
    splits: dict[str, list[FileDocument]] = {"train": [], "validation": []}
    for document in documents:
        splits["validation" if place(document) < fraction * 2**64 else "train"].append(document)
    if fraction and all(document.relative == documents[0].relative for document in documents):
        raise DataError(
            f"validation_fraction={fraction}: the only file, {documents[0].path}, cannot be in both splits; "
            "add files or set it to 0"
        )
    for empty, full, nearest in (("validation", "train", min), ("train", "validation", max)):
        if fraction and not splits[empty]:  # too few files for the fraction: the nearest one to it
            chosen = nearest(splits[full], key=place).relative
            splits[empty] = [document for document in documents if document.relative == chosen]
            splits[full] = [document for document in documents if document.relative != chosen]
    for members in splits.values():
        mix(members, settings.seed)
    return {name: members for name, members in splits.items() if members}


def mix(documents: list[FileDocument], seed: int) -> None:
    """Bring documents into the order of a hash of (seed, path): each shard is a mixture of all folders."""
    documents.sort(key=lambda document: _hash(seed, f"order {document.occurrence}", document.relative))


def _hash(seed: int, use: str, relative: bytes) -> int:
    """64 bits of SHA-256 over the seed, what the number is for, and a document's path."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{use}\0".encode() + relative).digest()[:8], "big")
