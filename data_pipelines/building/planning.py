"""What a build will write, known before a byte is written: splits, order of documents, and every shard's pieces.

The split of a file is a hash of (seed, its path under the input), so that it stays there when other files are added.
Another such hash is its place in the split, so that each shard is a mixture of all folders. Where the records of files
are documents, the split of a record is a hash of (seed, path, its number), and records stand in the order of their
file, as compressed files are read forwards alone. Of one document, or where it is asked for, the end is held out.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from longstride.data_pipelines.building.held_out import hold_out_end
from longstride.data_pipelines.building.shard_writer import SAMPLE_BYTES, Piece, pack
from longstride.data_pipelines.datasets import Dataset
from longstride.data_pipelines.documents import (
    Document,
    DocumentPart,
    FileDocument,
    LeftOut,
    RecordDocument,
    RecordDocuments,
    find_documents,
    find_record_files,
    mix,
)
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Modality, Properties, modality_named
from longstride.data_pipelines.palette import Palette, check_count
from longstride.data_pipelines.shards import DataManifest, ShardRecord, SplitRecord
from longstride.data_pipelines.stores import StoredFile

_COMPRESSED = (".bz2", ".gz", ".xz", ".zst")  # what may stand behind another suffix
MOST_SHARD_BYTES = 2**63 - 1
MOST_SEED = 2**63 - 1


class BuildSettings(ABC):
    """What decides the bytes of a build, beside the content of the input."""

    modality: Modality
    shard_bytes: int  # content bytes of a shard at most
    palette: int | Palette | None  # colours of one to be made, or one that is there

    def check(self) -> None:
        """Raises DataError for a value that is not allowed."""
        if isinstance(self.palette, int):
            check_count(self.palette)
        if self.palette is not None and not self.modality.has_palettes:
            size = self.palette if isinstance(self.palette, int) else len(self.palette)
            raise DataError(f"palette={size}: is of pictures, and this is {self.modality.name}; take modality image")
        if self.shard_bytes < 1:
            raise DataError(f"shard_bytes={self.shard_bytes}: must be at least 1, such as 16777216")
        if self.shard_bytes > MOST_SHARD_BYTES:  # the manifest records it, whose numbers have an end
            raise DataError(f"shard_bytes={self.shard_bytes}: must be at most {MOST_SHARD_BYTES}, such as 16777216")

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """As the manifest records it."""

    @abstractmethod
    def source_of(self, split: str, document: Document) -> str:
        """What a person calls the source of a document."""

    @property
    def _palette_json(self) -> dict[str, Any]:
        """How many colours were asked for, or which palette; nothing without one, as it always was."""
        if self.palette is None:
            return {}
        return {"palette": self.palette if isinstance(self.palette, int) else palette_file(self.palette).sha256}

    @abstractmethod
    def plan(self, inputs: Sequence[Path]) -> "BuildPlan":
        """Finds and measures the documents. Raises DataError for inputs and documents that cannot be taken."""


@dataclass(frozen=True)
class FileSettings(BuildSettings):
    """Settings of a build from files."""

    modality: Modality
    wanted: Properties  # that documents are converted to
    suffixes: tuple[str, ...]
    exclude: tuple[str, ...]
    validation_fraction: float
    shard_bytes: int
    seed: int
    palette: int | Palette | None = None
    field: str | None = None  # of records that are documents; None: files are
    hold_out_end: bool = False  # whether validation is the end of the data; else whole documents, where there are two

    def check(self) -> None:
        if self.field is not None:
            if self.modality.name != "text":
                raise DataError(
                    f"field={self.field}: names texts, and this is {self.modality.name}; take modality text"
                )
            if self.wanted.get("raw"):
                raise DataError(f"field={self.field}: reads what a file holds, and raw takes its bytes; leave one out")
            if not self.field:
                raise DataError("field='': must be the name that the texts have, such as text")
        known = (*self.modality.asks, *self.modality.may_ask)
        for name in self.wanted:
            if name not in known:
                good = ", ".join(known) or "none"
                raise DataError(f"{name}: no property of {self.modality.name}; it asks for {good}")
        if not 0 <= self.validation_fraction < 1:
            raise DataError(
                f"validation_fraction={self.validation_fraction}: must be at least 0 and less than 1, such as 0.05"
            )
        if self.hold_out_end and not self.validation_fraction:
            rule = "must be more than 0 where the end is held out, such as 0.05"
            raise DataError(f"validation_fraction={self.validation_fraction}: {rule}")
        if not 0 <= self.seed <= MOST_SEED:
            raise DataError(f"seed={self.seed}: must be from 0 to 2**63 - 1, such as 0")
        super().check()
        for name in self.exclude:  # a pattern would match no name, and silently exclude nothing
            if not name or set(name) & set("/*?"):
                good = PurePath(name).name.strip("*?.") or "vendor"
                raise DataError(f"exclude={name}: must be a plain name, such as {good}")
        for suffix in self.suffixes:
            packed = next((each for each in _COMPRESSED if suffix.endswith(each) and suffix != each), "")
            end = suffix.removesuffix(packed).rpartition(".")[2].strip("*/") or "txt"
            if not suffix.startswith("."):
                raise DataError(f"suffixes={suffix}: must begin with a dot, such as .{end}{packed}")
            if suffix != f".{end}{packed}":
                rule = "must be what a name ends in from its last dot (or the one before .gz, .bz2, .xz, .zst)"
                raise DataError(f"suffixes={suffix}: {rule}, such as .{end}{packed}")

    def to_json(self) -> dict[str, Any]:
        return {
            "asked": dict(self.wanted),
            "suffixes": list(self.suffixes),
            "exclude": list(self.exclude),
            "validation_fraction": self.validation_fraction,
            "shard_bytes": self.shard_bytes,
            "sample_bytes": SAMPLE_BYTES,
            "seed": self.seed,
            **({} if self.field is None else {"field": self.field}),
            **({"hold_out_end": True} if self.hold_out_end else {}),
            **self._palette_json,
        }

    def plan(self, inputs: Sequence[Path]) -> "BuildPlan":
        if self.field is not None:
            return self._plan_of_records(inputs, self.field)
        documents, properties, left_out = find_documents(
            inputs, self.suffixes, self.exclude, self.modality, self.wanted
        )
        fraction = self.validation_fraction
        if fraction and (self.hold_out_end or all(each.relative == documents[0].relative for each in documents)):
            mix(documents, self.seed)
            return BuildPlan(self, properties, hold_out_end(documents, fraction, self.modality, properties), left_out)
        splits: dict[str, list[FileDocument]] = {"train": [], "validation": []}
        for document in documents:
            place = document.hashed(self.seed, "split")
            splits["validation" if place < fraction * 2**64 else "train"].append(document)
        for empty, full, nearest in (("validation", "train", min), ("train", "validation", max)):
            if fraction and not splits[empty]:  # too few files for the fraction: take the file nearest to the border
                chosen = nearest(splits[full], key=lambda document: document.hashed(self.seed, "split")).relative
                splits[empty] = [document for document in documents if document.relative == chosen]
                splits[full] = [document for document in documents if document.relative != chosen]
        for members in splits.values():
            mix(members, self.seed)
        return BuildPlan(self, properties, {name: members for name, members in splits.items() if members}, left_out)

    def source_of(self, split: str, document: Document) -> str:
        """Its path under the input, and of a record its line or row."""
        assert isinstance(document, FileDocument | RecordDocument | DocumentPart)
        return document.source

    def _plan_of_records(self, inputs: Sequence[Path], field: str) -> "BuildPlan":
        found, left_out = find_record_files(inputs, self.suffixes, self.exclude, field)
        fraction = self.validation_fraction
        place_of = {file: place for place, (file, _) in enumerate(found)}
        order = [file for file, _ in found]
        mix(order, self.seed)
        found = [found[place_of[file]] for file in order]
        if fraction and (self.hold_out_end or sum(len(records) for _, records in found) == 1):
            members = RecordDocuments(field, found)
            return BuildPlan(self, {}, hold_out_end(members, fraction, self.modality, {}), left_out)
        words, chosen = [], []
        for file, records in found:
            key = np.array([file.hashed(self.seed, "split"), 0], dtype=np.uint64)
            last = int(records.numbers[-1]) if len(records) else 0
            words.append(np.random.Philox(key=key).random_raw(last)[records.numbers - 1])  # a word a number
            chosen.append(words[-1] < np.uint64(int(fraction * 2**64)))
        count, held_out = sum(map(len, words)), sum(int(each.sum()) for each in chosen)
        if fraction and held_out in (0, count):  # too few for the fraction: take the one nearest to the border
            full = [(each.max() if held_out else each.min(), number) for number, each in enumerate(words) if len(each)]
            border, number = max(full) if held_out else min(full)
            chosen[number][words[number] == border] = not held_out
        splits = {}
        for name, is_in in (("train", [~each for each in chosen]), ("validation", chosen)):
            parts = [(file, records.of(each)) for (file, records), each in zip(found, is_in, strict=True)]
            splits[name] = RecordDocuments(field, parts)
        return BuildPlan(self, {}, {name: members for name, members in splits.items() if len(members)}, left_out)


@dataclass(frozen=True)
class DatasetSettings(BuildSettings):
    """Settings of a build from a published dataset."""

    dataset: Dataset
    unpublished: bool  # whether content that differs from the published one is taken
    shard_bytes: int
    palette: int | Palette | None = None

    @property
    def modality(self) -> Modality:  # type: ignore[override]  # the dataset's
        return modality_named(self.dataset.modality)

    def to_json(self) -> dict[str, Any]:
        """As the manifest records it. It does not say in which of its forms the dataset was read."""
        return {
            "dataset": self.dataset.name,
            "unpublished": self.unpublished,
            "shard_bytes": self.shard_bytes,
            "sample_bytes": SAMPLE_BYTES,
            **self._palette_json,
        }

    def source_of(self, split: str, document: Document) -> str:
        """The dataset and the split, as an archive and what it holds under any name give the same data folder."""
        return f"{self.dataset.name}/{split}"

    def plan(self, inputs: Sequence[Path]) -> "BuildPlan":
        (given,) = inputs  # a dataset has one
        content = self.dataset.find(given, self.unpublished)
        return BuildPlan(self, dict(content.properties), content.splits, content.left_out)


@dataclass(frozen=True)
class BuildPlan:
    """All that a build will write, but for the contents."""

    settings: BuildSettings
    properties: Properties  # of every document
    splits: Mapping[str, Sequence[Document]]  # in the order in which they are written
    left_out: LeftOut

    @property
    def content_bytes(self) -> int:
        """Content bytes over all splits."""
        return sum(document.size for members in self.splits.values() for document in members)

    def spread(self, split: str, count: int) -> list[Document]:
        """Documents of a split, evenly spread over it: all, or so many."""
        members = self.splits[split]
        count = min(count, len(members))
        return [members[place * len(members) // count] for place in range(count)]

    def shards(self) -> Iterator[tuple[str, list[Piece]]]:
        """The name of each shard, in canonical order, and its pieces. Computed anew each time, a shard at a time."""
        for split, members in self.splits.items():
            for number, pieces in enumerate(pack(members, self.settings.shard_bytes, self.settings.modality)):
                yield f"{split}-{number:05d}.tar", pieces

    def piece_lines(self) -> Iterator[bytes]:
        """The lines of ``pieces.jsonl``: of each text that is several samples, which sample is which piece of it.

        Other modalities have no such file: their data folders stay what they were before there was one.
        """
        if not self.settings.modality.cut_reach:
            return
        for name, pieces in self.shards():
            for number, piece in enumerate(pieces):
                if piece.size < piece.document.size:
                    line = {
                        "key": ShardRecord.key_in(name, number),
                        "source": self.settings.source_of(name.partition("-")[0], piece.document),
                        "piece": piece.numbering[0],
                        "of": piece.numbering[1],
                    }
                    yield json.dumps(line).encode() + b"\n"

    def source_lines(self) -> Iterator[bytes]:
        """The lines of ``sources.jsonl``: which sample is of which file. None of records and of published datasets."""
        for name, pieces in self.shards() if isinstance(self.settings, FileSettings) else ():
            for number, piece in enumerate(pieces):
                document = piece.document
                whole = document.document if isinstance(document, DocumentPart) else document
                if isinstance(whole, FileDocument):
                    line = {"key": ShardRecord.key_in(name, number), "source": whole.source}
                    yield json.dumps(line).encode() + b"\n"

    @cached_property
    def pieces_file(self) -> StoredFile | None:
        """What ``piece_lines`` make; None where there are none."""
        size, digest = 0, hashlib.sha256()
        for line in self.piece_lines():
            size += len(line)
            digest.update(line)
        return StoredFile(DataManifest.PIECES_NAME, size, digest.hexdigest()) if size else None

    @cached_property
    def identity(self) -> dict[str, str]:
        """Two SHA-256 (hexadecimal) that decide the shards: of the settings, and of the documents as they are now.

        Where the input lies does not count.
        """
        settings = [
            DataManifest.FORMAT_VERSION,
            self.settings.modality.name,
            self.settings.to_json(),
            dict(self.properties),
            *(["cut at characters"] if self.settings.modality.cut_reach else []),  # before, anywhere
        ]
        documents = hashlib.sha256()
        for split, members in self.splits.items():
            for document in members:
                documents.update(json.dumps((split, *document.identity)).encode())
        whole = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        return {"settings": whole.hexdigest(), "files": documents.hexdigest()}

    def manifest(self, records: Mapping[str, ShardRecord], palette: Palette | None = None) -> DataManifest:
        """The manifest of the whole, from the records of all shards by name."""
        shards: dict[str, list[ShardRecord]] = {split: [] for split in self.splits}
        for name, record in records.items():
            shards[name.partition("-")[0]].append(record)
        splits = {
            split: SplitRecord(
                len(members), tuple(sorted(shards[split], key=lambda record: (len(record.name), record.name)))
            )
            for split, members in self.splits.items()
        }
        file = None if palette is None else palette_file(palette)
        return DataManifest(self.settings.modality.name, self.properties, splits, self.made, palette=file)

    @property
    def made(self) -> dict[str, Any]:
        """How the set was made, for the manifest: nothing of the machine or the moment."""
        left_out = {"empty_files": self.left_out.empty, "symlinks": self.left_out.links.total()}
        if self.left_out.no_files:  # else as it always was
            left_out["pipes_sockets_and_devices"] = self.left_out.no_files
        pieces = {} if self.pieces_file is None else {"pieces": asdict(self.pieces_file)}
        first = next(iter(self.splits.get("validation", ())), None)
        begins = {}
        if isinstance(first, DocumentPart):
            begins = {"validation_begins": {"source": first.source, "byte": first.offset}}
        return {
            "settings": self.settings.to_json(),
            "left_out": {**left_out, **(self.left_out.records or {})},
            **pieces,
            **begins,
        }


def palette_file(palette: Palette) -> StoredFile:
    """A palette as the manifest has it."""
    content = palette.to_ppm()
    return StoredFile(Palette.FILE_NAME, len(content), hashlib.sha256(content).hexdigest())
