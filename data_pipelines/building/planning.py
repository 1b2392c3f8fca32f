"""The plan of a build, before a byte is written: splits, order of documents, and the pieces of every shard.

The split of a file is a hash of (seed, path under the input), so it stays the same when other files are added. Another
such hash is its position in the split, so each shard is a mixture of all folders. If records are documents, the split
of a record is a hash of (seed, path, number), and records stay in the order of their file, because compressed files are
read in sequence. The end of the data is held out for a single document, or if requested. Where it begins only depends
on the documents' sizes and the share of the bytes. A text is divided before a character, a sound before a frame;
pictures are not divided.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path, PurePath
from typing import Any, cast

import numpy as np

from longstride.data_pipelines.building.shard_writer import SAMPLE_BYTES, Piece, pack
from longstride.data_pipelines.datasets import Dataset
from longstride.data_pipelines.documents import (
    Document,
    DocumentPart,
    FileDocument,
    Labelled,
    LeftOut,
    OpenInput,
    RecordDocument,
    RecordDocuments,
    WholeDocument,
    find_documents,
    find_record_files,
    mix,
)
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.labels import LABEL_EXTENSION, LABELS_NAME, labels_to_bytes
from longstride.data_pipelines.modalities import Modality, Properties, modality_named
from longstride.data_pipelines.palette import Palette, check_count
from longstride.data_pipelines.shards import DataManifest, ShardRecord, SplitRecord
from longstride.data_pipelines.stores import StoredFile

_COMPRESSED = (".bz2", ".gz", ".xz", ".zst")  # may follow another suffix
_OTHERWISE = "add files, or set it to 0 to train without evaluations"
MOST_SHARD_BYTES = 2**63 - 1
MOST_SEED = 2**63 - 1


class BuildSettings(ABC):
    """The settings that decide the bytes of a build, together with the input."""

    modality: Modality
    shard_bytes: int  # most content bytes of a shard
    palette: int | Palette | None  # number of colours of a new palette, or an existing one
    labels: bool  # whether to keep the class of each document

    def check(self) -> None:
        """Raise DataError for a value that is not allowed."""
        if isinstance(self.palette, int):
            check_count(self.palette)
        if self.palette is not None and not self.modality.has_palettes:
            size = self.palette if isinstance(self.palette, int) else len(self.palette)
            rule = f"only applies to pictures, and this is {self.modality.name}; leave it out, or take modality image"
            raise DataError(f"palette={size}: {rule}")
        if not 1 <= self.shard_bytes <= MOST_SHARD_BYTES:  # the limit of numbers in the manifest
            rule = "at least 1" if self.shard_bytes < 1 else f"at most {MOST_SHARD_BYTES}"
            raise DataError(f"shard_bytes={self.shard_bytes}: must be {rule}, such as 16777216")

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the settings for the manifest."""

    @property
    def _later_json(self) -> dict[str, Any]:
        """Settings that older manifests lack: the number of colours or the palette's hash, and ``labels``."""
        labels = {"labels": True} if self.labels else {}
        if self.palette is None:
            return labels
        colours = self.palette if isinstance(self.palette, int) else hashlib.sha256(self.palette.to_ppm()).hexdigest()
        return {"palette": colours, **labels}

    @abstractmethod
    def plan(self, inputs: Sequence[Path]) -> "BuildPlan":
        """Find and measure the documents. Raises DataError for unusable inputs and documents."""


@dataclass(frozen=True)
class FileSettings(BuildSettings):
    """Settings of a build from files."""

    modality: Modality
    requested: Properties  # to convert documents to
    suffixes: tuple[str, ...]
    exclude: tuple[str, ...]
    validation_fraction: float
    shard_bytes: int
    seed: int
    palette: int | Palette | None = None
    field: str | None = None  # of records that are documents; None: files are documents
    hold_out_end: bool = False  # whether validation is the end of the data, also if there are several documents
    labels: bool = False

    def check(self) -> None:
        if self.labels and self.field is not None:
            raise DataError(f"field={self.field}: records have no .cls files; leave out --labels, or build from files")
        if self.labels and (not self.suffixes or f".{LABEL_EXTENSION}" in self.suffixes):
            rule = f"would take the .{LABEL_EXTENSION} files of --labels as documents; name the documents' suffixes"
            raise DataError(f"suffixes={' '.join(self.suffixes) or 'any'}: {rule}")
        if self.field is not None:
            if self.modality.name != "text":
                rule = f"only applies to text, and this is {self.modality.name}; take modality text"
                raise DataError(f"field={self.field}: {rule}")
            if self.requested.get("raw"):
                raise DataError(f"field={self.field}: reads the records of a file, and raw its bytes; leave one out")
            if not self.field:
                raise DataError("field='': must be the name of the field that holds the text, such as text")
        names = (*self.modality.asks, *self.modality.may_ask)
        for name in self.requested:
            if name not in names:
                good = ", ".join(names) or "none"
                raise DataError(f"{name}: is not a property of {self.modality.name}; its properties: {good}")
        if not 0 <= self.validation_fraction < 1:
            rule = "must be at least 0 and less than 1, such as 0.05"
            raise DataError(f"validation_fraction={self.validation_fraction}: {rule}")
        if self.hold_out_end and not self.validation_fraction:
            rule = "must be more than 0 when the end is held out, such as 0.05"
            raise DataError(f"validation_fraction={self.validation_fraction}: {rule}")
        if not 0 <= self.seed <= MOST_SEED:
            raise DataError(f"seed={self.seed}: must be from 0 to 2**63 - 1, such as 0")
        super().check()
        for name in self.exclude:  # a pattern would silently exclude nothing
            if not name or set(name) & set("/*?"):
                good = PurePath(name).name.strip("*?.") or "vendor"
                raise DataError(f"exclude={name}: must be a plain name, such as {good}")
        for suffix in self.suffixes:
            packed = next((ending for ending in _COMPRESSED if suffix.endswith(ending) and suffix != ending), "")
            end = suffix.removesuffix(packed).rpartition(".")[2].strip("*/") or "txt"
            if not suffix.startswith("."):
                raise DataError(f"suffixes={suffix}: must begin with a dot, such as .{end}{packed}")
            if suffix != f".{end}{packed}":
                rule = "must be the ending of a file name, from its last dot (or the one before .gz, .bz2, .xz, .zst)"
                raise DataError(f"suffixes={suffix}: {rule}, such as .{end}{packed}")

    def to_json(self) -> dict[str, Any]:
        return {
            "asked": dict(self.requested),
            "suffixes": list(self.suffixes),
            "exclude": list(self.exclude),
            "validation_fraction": self.validation_fraction,
            "shard_bytes": self.shard_bytes,
            "sample_bytes": SAMPLE_BYTES,
            "seed": self.seed,
            **({} if self.field is None else {"field": self.field}),
            **({"hold_out_end": True} if self.hold_out_end else {}),
            **self._later_json,
        }

    def plan(self, inputs: Sequence[Path]) -> "BuildPlan":
        if self.field is not None:
            return self._plan_of_records(inputs, self.field)
        documents, properties, left_out = find_documents(
            inputs, self.suffixes, self.exclude, self.modality, self.requested
        )
        fraction = self.validation_fraction
        if fraction and (self.hold_out_end or len({document.relative for document in documents}) == 1):
            mix(documents, self.seed)
            return BuildPlan(self, properties, hold_out_end(documents, fraction, self.modality, properties), left_out)
        hashes = np.array([document.hash64(self.seed, "split") for document in documents], dtype=np.uint64)
        (is_held_out,) = _held_out([hashes], fraction)
        splits: dict[str, list[FileDocument]] = {"train": [], "validation": []}
        for document, held_out in zip(documents, is_held_out.tolist(), strict=True):
            splits["validation" if held_out else "train"].append(document)
        for members in splits.values():
            mix(members, self.seed)
        return BuildPlan(self, properties, {name: members for name, members in splits.items() if members}, left_out)

    def _plan_of_records(self, inputs: Sequence[Path], field: str) -> "BuildPlan":
        files, left_out = find_record_files(inputs, self.suffixes, self.exclude, field)
        fraction = self.validation_fraction
        records_of = dict(files)
        order = [file for file, _ in files]
        mix(order, self.seed)
        files = [(file, records_of[file]) for file in order]
        if fraction and (self.hold_out_end or sum(len(records) for _, records in files) == 1):
            members = RecordDocuments(field, files)
            return BuildPlan(self, {}, hold_out_end(members, fraction, self.modality, {}), left_out)
        words = []
        for file, records in files:
            key = np.array([file.hash64(self.seed, "split"), 0], dtype=np.uint64)
            last = int(records.numbers[-1]) if len(records) else 0
            words.append(np.random.Philox(key=key).random_raw(last)[records.numbers - 1])  # one per record
        masks = _held_out(words, fraction)
        splits = {}
        for name, split_masks in (("train", [~mask for mask in masks]), ("validation", masks)):
            parts = [(file, records.of(mask)) for (file, records), mask in zip(files, split_masks, strict=True)]
            splits[name] = RecordDocuments(field, parts)
        return BuildPlan(self, {}, {name: members for name, members in splits.items() if len(members)}, left_out)


def _held_out(hashes: Sequence[np.ndarray], fraction: float) -> list[np.ndarray]:
    """Select the validation documents by their hashes, (n,) uint64 of each file; neither none nor all of them.

    Too few for the fraction: the document nearest to the border moves, with those of the same hash.
    """
    masks = [row < np.uint64(int(fraction * 2**64)) for row in hashes]
    num_held_out = sum(int(mask.sum()) for mask in masks)
    if fraction and num_held_out in (0, sum(map(len, hashes))):
        ends = [row.max() if num_held_out else row.min() for row in hashes if len(row)]
        border = max(ends) if num_held_out else min(ends)
        for row, mask in zip(hashes, masks, strict=True):
            mask[row == border] = not num_held_out
    return masks


@dataclass(frozen=True)
class DatasetSettings(BuildSettings):
    """Settings of a build from a published dataset."""

    dataset: Dataset
    unpublished: bool  # whether content may differ from the published one
    shard_bytes: int
    palette: int | Palette | None = None
    labels: bool = False

    def check(self) -> None:
        if self.labels and not self.dataset.has_labels:
            raise DataError(f"dataset={self.dataset.name}: has no classes of documents; leave out --labels")
        super().check()

    @property
    def modality(self) -> Modality:  # type: ignore[override]  # the dataset's
        return modality_named(self.dataset.modality)

    def to_json(self) -> dict[str, Any]:
        """Return the settings for the manifest, without the form in which the dataset was read."""
        return {
            "dataset": self.dataset.name,
            "unpublished": self.unpublished,
            "shard_bytes": self.shard_bytes,
            "sample_bytes": SAMPLE_BYTES,
            **self._later_json,
        }

    def plan(self, inputs: Sequence[Path]) -> "BuildPlan":
        (path,) = inputs
        content = self.dataset.find(path, self.unpublished)
        return BuildPlan(self, dict(content.properties), content.splits, content.left_out)


@dataclass(frozen=True)
class BuildPlan:
    """Everything that a build will write, except for the contents."""

    settings: BuildSettings
    properties: Properties  # of every document
    splits: Mapping[str, Sequence[Document]]  # in the order in which they are written
    left_out: LeftOut

    @property
    def content_bytes(self) -> int:
        return sum(document.size for members in self.splits.values() for document in members)

    def shards(self) -> Iterator[tuple[str, list[Piece]]]:
        """Yield the name and the pieces of each shard, in canonical order. They are not stored."""
        for split, members in self.splits.items():
            for number, pieces in enumerate(pack(members, self.settings.shard_bytes, self.settings.modality)):
                yield f"{split}-{number:05d}.tar", pieces

    def _samples(self) -> Iterator[tuple[str, str, Piece]]:
        """Yield the key, the split and the piece of each sample."""
        for name, pieces in self.shards():
            for number, piece in enumerate(pieces):
                yield ShardRecord.key_in(name, number), name.partition("-")[0], piece

    def piece_lines(self) -> Iterator[bytes]:
        """Yield the lines of ``pieces.jsonl``: the samples that are pieces of longer texts.

        Other modalities have no such file, so that their data folders stay the same as before it was introduced. A
        published dataset has the same sources in any form and name of its archive.
        """
        for key, split, piece in self._samples() if self.settings.modality.cut_reach else ():
            if piece.size < piece.document.size:
                number, count = piece.numbering
                document, source = piece.document, f"{self.settings.to_json().get('dataset')}/{split}"
                if isinstance(document, FileDocument | RecordDocument | DocumentPart):
                    source = document.source
                yield json.dumps({"key": key, "source": source, "piece": number, "of": count}).encode() + b"\n"

    def source_lines(self) -> Iterator[bytes]:
        """Yield the lines of ``sources.jsonl``: the file of each sample; none for records and published datasets."""
        for key, _, piece in self._samples() if isinstance(self.settings, FileSettings) else ():
            document = piece.document.document if isinstance(piece.document, DocumentPart) else piece.document
            if isinstance(document, FileDocument):
                yield json.dumps({"key": key, "source": document.source}).encode() + b"\n"

    @cached_property
    def pieces_file(self) -> StoredFile | None:
        """The file of ``piece_lines``; None if there are none."""
        size, digest = 0, hashlib.sha256()
        for line in self.piece_lines():
            size += len(line)
            digest.update(line)
        return StoredFile(DataManifest.PIECES_NAME, size, digest.hexdigest()) if size else None

    @cached_property
    def labels(self) -> bytes | None:
        """The content of ``labels.npy``; None without classes. Raises DataError for a missing or wrong class."""
        if not self.settings.labels:
            return None
        with OpenInput() as open_input:
            return labels_to_bytes(
                {
                    split: np.array([cast("Labelled", document).label(open_input) for document in members])
                    for split, members in self.splits.items()
                }
            )

    @cached_property
    def identity(self) -> dict[str, str]:
        """SHA-256 (hexadecimal) of the settings and of the documents, which together decide the shards.

        The place of the input does not count.
        """
        settings = [
            DataManifest.FORMAT_VERSION,
            self.settings.modality.name,
            self.settings.to_json(),
            dict(self.properties),
            *(["cut at characters"] if self.settings.modality.cut_reach else []),  # older builds cut anywhere
        ]
        documents = hashlib.sha256()
        for split, members in self.splits.items():
            for document in members:
                documents.update(json.dumps((split, *document.identity)).encode())
        documents.update(self.labels or b"")
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        return {"settings": digest.hexdigest(), "files": documents.hexdigest()}

    def manifest(self, records: Mapping[str, ShardRecord], palette: Palette | None = None) -> DataManifest:
        """Create the manifest from the records of all shards by name."""
        shards: dict[str, list[ShardRecord]] = {split: [] for split in self.splits}
        for name, record in records.items():
            shards[name.partition("-")[0]].append(record)
        splits = {
            split: SplitRecord(
                len(members), tuple(sorted(shards[split], key=lambda record: (len(record.name), record.name)))
            )
            for split, members in self.splits.items()
        }
        file = None if palette is None else StoredFile.of(Palette.FILE_NAME, palette.to_ppm())
        return DataManifest(self.settings.modality.name, self.properties, splits, self.made, palette=file)

    @property
    def made(self) -> dict[str, Any]:
        """How the set was built, for the manifest, without anything about the machine or the time."""
        left_out = {"empty_files": self.left_out.empty, "symlinks": self.left_out.links.total()}
        if self.left_out.no_files:  # absent in older manifests
            left_out["pipes_sockets_and_devices"] = self.left_out.no_files
        made = {"settings": self.settings.to_json(), "left_out": left_out | (self.left_out.records or {})}
        if self.pieces_file is not None:
            made["pieces"] = asdict(self.pieces_file)
        if self.labels is not None:
            made["labels"] = asdict(StoredFile.of(LABELS_NAME, self.labels))
        first = next(iter(self.splits.get("validation", ())), None)
        if isinstance(first, DocumentPart):
            made["validation_begins"] = {"source": first.source, "byte": first.offset}
        return made


@dataclass(frozen=True)
class Stretch(Sequence[WholeDocument | DocumentPart]):
    """Consecutive documents of a sequence, some of them in part, created one at a time as there may be many."""

    documents: Sequence[WholeDocument]
    start: int
    stop: int
    parts: Mapping[int, DocumentPart]  # by the positions of their documents

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[WholeDocument | DocumentPart]:
        for place, document in islice(enumerate(self.documents), self.start, self.stop):
            yield self.parts.get(place, document)

    def __getitem__(self, place: Any) -> Any:
        index = range(self.start, self.stop)[place]
        return list(self)[place] if isinstance(index, range) else self.parts.get(index) or self.documents[index]


def hold_out_end(
    documents: Sequence[WholeDocument], fraction: float, modality: Modality, properties: Properties
) -> dict[str, Stretch]:
    """Divide documents in order: the validation split has the last ``fraction`` of the bytes.

    Documents that are not divided have one size; the split then has this share of them, but at least one.

    Raises DataError if a split would be empty, and for a document that cannot be read.
    """
    count = len(documents)
    if not modality.divisible:
        if count == 1:
            rule = f"the only file, {documents[0].source}, cannot be in both splits, and {modality.words} are not cut"
            raise DataError(f"validation_fraction={fraction}: {rule}; {_OTHERWISE}")
        number = count - min(max(1, round(count * fraction)), count - 1)
        return {"train": Stretch(documents, 0, number, {}), "validation": Stretch(documents, number, count, {})}
    total = sum(document.size for document in documents)
    first = total - round(total * fraction)  # first validation byte of the concatenated documents
    if first == total:
        raise _holds_out(fraction, "none", total)
    ends = accumulate(document.size for document in documents)
    number, document, end = next(
        (number, *pair) for number, pair in enumerate(zip(documents, ends, strict=True)) if pair[1] > first
    )
    place = first - (end - document.size)
    if place and modality.cut_reach:
        with OpenInput() as open_input:
            start = place - min(place, modality.cut_reach)
            content = document.read(open_input, modality, properties, start, place + 1 - start)
        place = start + modality.cut(content, place - start)
    if number == place == 0:
        raise _holds_out(fraction, "all", total)
    sides = DocumentPart(document, 0, place), DocumentPart(document, place, document.size - place)
    train, validation = ({number: side} if place else {} for side in sides)
    return {
        "train": Stretch(documents, 0, number + bool(place), train),
        "validation": Stretch(documents, number, count, validation),
    }


def _holds_out(fraction: float, what: str, total: int) -> DataError:
    rule = f"holds out {what} of {total:,} byte{'' if total == 1 else 's'}"
    return DataError(f"validation_fraction={fraction}: {rule}; {_OTHERWISE}")
