"""The metadata of a data folder: ``manifest.json``, and an index per shard.

    manifest.json           the content, checksums, settings of the build, and a fingerprint
    train-00000.tar         plain tar (ustar), one member per sample: train-00000-0000000.txt, ...
    train-00000.index.npy   offset, length and CRC-32 of each sample: 25 bytes per sample
    validation-00000.tar    ...
    palette.ppm             the colours, if pictures are read by a palette
    pieces.jsonl            if texts are several samples: a line per piece, with its key and source
    labels.npy              if documents have classes: one of each, see ``labels``
    sources.jsonl           a line per sample, with its key and the file's path under the input

    {"format": "longstride-shards", "format_version": 2, "modality": "text", "properties": {},
     "made": settings of the build, "splits": {"train": {"documents": 12, "shards": [a line per shard, ...]}, ...},
     "fingerprint": SHA-256 of everything else}

A sample is a document of the input, or a piece of a long one. Its key contains split, shard and number, so it is never
confused with a member of another shard. A member is a file that other programs can open (.txt, .ppm, .wav). Its
*payload* is the header that such a file needs, and then the *content*: the bytes of contexts.

A text that is not UTF-8 has the extension .bin. "made" records ``pieces.jsonl``, which is never read here, and
``labels.npy``. The manifest does not mention ``sources.jsonl``, so that fingerprints stay the same as before there was
one. `data show` reads it.

format_version is
- 2 for a folder with its shards;
- 3 for a folder that ``longstride data index`` wrote: it holds the indexes of foreign tars. ``"tars"`` is the place of
  the tars: a path relative to the manifest, an absolute path, or a URL. A shard's name is the tar's path below it. The
  place is not part of the fingerprint, so tars may be moved. A row of such an index is a member, or 64 KiB of a long
  one; bytes between the rows are ignored;
- 4 for a folder with a palette: ``"palette"`` has the file's name, size and SHA-256;
- 5, for own and foreign tars, if a member stores several bytes per byte of content (``Modality.stored_bytes``). Older
  versions would expect members of another length.

Sets may have a hundred thousand shards, so nothing here copies all records or checks their files.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from io import BytesIO
from itertools import zip_longest
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import PurePosixPath
from tarfile import RECORDSIZE
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, ValidationError

from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.labels import LABELS_NAME, labels_bytes
from longstride.data_pipelines.modalities import MODALITIES, modality_named
from longstride.data_pipelines.palette import Palette
from longstride.data_pipelines.plain_files import JSONError, parse_json, read_plain
from longstride.data_pipelines.settings import REBUILD
from longstride.data_pipelines.stores import Count, Sha256, Store, StoredFile

BLOCK_BYTES = 512  # of a tar: the size of a header, and the multiple that payloads are padded to
INDEX_DTYPE = np.dtype(
    [
        ("member", "<u8"),  # offset of the member's header in the shard
        ("content", "<u8"),  # offset of its first content byte
        ("length", "<u4"),  # content bytes
        ("crc32", "<u4"),  # of the member: header, payload and padding
        ("ends", "u1"),  # 1 if a document ends with this sample, 0 if the next sample continues it
    ]
)
IndexRow = tuple[int, int, int, int, int]  # the fields of INDEX_DTYPE
MOST_SAMPLES = 2**23  # of a shard: its index is held in memory
_MOST_MEMBER_BYTES = 2**28  # a member is read at once; the largest picture has 200 MB
_MOST_TAIL_BYTES = 2 * RECORDSIZE  # after the last member of an own shard
_MOST_PALETTE_BYTES = 2**18
_LARGEST = 2**63  # above the size of any file
_BUILT_NAME = re.compile(r"[a-z]+-\d{5,}\.tar")
_PLACE = re.compile(rb'^  "tars": .*$', re.MULTILINE)  # the only line that may be edited


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """The manifest's record of a shard."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    samples: Annotated[int, Field(strict=True, ge=1, le=MOST_SAMPLES)]
    documents: Count  # documents that end in this shard
    content_bytes: Count  # payloads without their headers
    file_bytes: Count
    sha256: Sha256
    index_sha256: Sha256

    @classmethod
    def of(cls, name: str, rows: Sequence[IndexRow], file_bytes: int, sha256: str) -> "tuple[ShardRecord, bytes]":
        """Create the record of a shard from the rows of its index, with the content of the index file."""
        index = np.array(rows, dtype=INDEX_DTYPE)
        content = index_to_bytes(index)
        record = cls(
            name=name,
            samples=len(index),
            documents=int(index["ends"].sum(dtype=np.int64)),
            content_bytes=int(index["length"].sum(dtype=np.int64)),
            file_bytes=file_bytes,
            sha256=sha256,
            index_sha256=hashlib.sha256(content).hexdigest(),
        )
        return record, content

    @property
    def file(self) -> StoredFile:
        return StoredFile(self.name, self.file_bytes, self.sha256)

    @property
    def index_file(self) -> StoredFile:
        return StoredFile(self.index_name, index_bytes(self.samples), self.index_sha256)

    @property
    def index_name(self) -> str:
        return self.name.removesuffix(".tar") + ".index.npy"

    def key(self, number: int) -> str:
        """Return the key of a sample of a built shard: its member's name without the extension."""
        return self.key_in(self.name, number)

    @staticmethod
    def key_in(shard_name: str, number: int) -> str:
        """Return the key of a sample of a built shard with that name."""
        return f"{shard_name.removesuffix('.tar')}-{number:07d}"

    @classmethod
    def parse(cls, content: Any) -> "ShardRecord":
        """Parse a shard's line. Raises ValueError for a missing field, a wrong type, or an impossible value."""
        return _SHARD_RECORD.validate_python(content)

    def load_index(self, store: Store) -> np.ndarray:
        """Load the index, (samples,) INDEX_DTYPE. Raises DataError if it is missing or damaged.

        ``check_places`` checks its offsets.
        """
        file = self.index_file
        content, path = read_checked(store, file, "the index"), store.path_for_messages(file.name)
        index = np.frombuffer(content, dtype=INDEX_DTYPE, offset=len(content) - self.samples * INDEX_DTYPE.itemsize)
        totals = int(index["length"].sum(dtype=np.int64)), int(index["ends"].sum(dtype=np.int64))
        if totals != (self.content_bytes, self.documents):
            raise DataError(f"{path}: does not hold the {self.samples} samples that the manifest declares; {REBUILD}")
        return index

    def line(self) -> str:
        """Return the shard's JSON in the manifest, three times as fast as ``json.dumps``."""
        return (
            f'{{"name": {_quoted(self.name)}, "samples": {self.samples}, "documents": {self.documents}, '
            f'"content_bytes": {self.content_bytes}, "file_bytes": {self.file_bytes}, '
            f'"sha256": {_quoted(self.sha256)}, "index_sha256": {_quoted(self.index_sha256)}}}'
        )

    def hashed_line(self) -> str:
        """Return the shard's JSON for the fingerprint: without spaces, names in alphabetical order."""
        return (
            f'{{"content_bytes":{self.content_bytes},"documents":{self.documents},"file_bytes":{self.file_bytes},'
            f'"index_sha256":{_quoted(self.index_sha256)},"name":{_quoted(self.name)},"samples":{self.samples},'
            f'"sha256":{_quoted(self.sha256)}}}'
        )


_SHARD_RECORD = TypeAdapter(ShardRecord)


@dataclass(frozen=True, slots=True)
class SplitRecord:
    """The manifest's record of a split; shards are in canonical order."""

    documents: Count
    shards: Annotated[tuple[ShardRecord, ...], Field(min_length=1), FailFast()]

    @property
    def samples(self) -> int:
        """Samples over all shards; at least one per document."""
        return sum(shard.samples for shard in self.shards)

    @property
    def content_bytes(self) -> int:
        return sum(shard.content_bytes for shard in self.shards)


class _Made(BaseModel):
    """The settings of a build, as far as their types matter here."""

    settings: dict[str, Any] = {}
    left_out: dict[str, Count] = {}
    pieces: StoredFile | None = None
    labels: StoredFile | None = None


class _Fields(BaseModel):
    """The types of a manifest's fields."""

    modality: str
    properties: dict[str, Count]
    splits: dict[str, SplitRecord]
    made: _Made
    tars: Any = None
    palette: StoredFile | None = None


@dataclass(frozen=True)
class DataManifest:
    """The content of a data folder's ``manifest.json``."""

    FILE_NAME: ClassVar[str] = "manifest.json"
    PIECES_NAME: ClassVar[str] = "pieces.jsonl"
    SOURCES_NAME: ClassVar[str] = "sources.jsonl"
    FORMAT: ClassVar[str] = "longstride-shards"
    FORMAT_VERSION: ClassVar[int] = 2  # these are explained above
    INDEXED_VERSION: ClassVar[int] = 3
    PALETTE_VERSION: ClassVar[int] = 4
    WIDE_VERSION: ClassVar[int] = 5

    modality: str
    properties: Mapping[str, int]  # common to all documents: height, width, rate ...
    splits: Mapping[str, SplitRecord]
    made: Mapping[str, Any]  # settings of the build and counts of what it left out; no times, no local paths
    tars: str | None = None  # place of foreign tars; None: the shards are in the folder
    palette: StoredFile | None = None  # None: content is read byte by byte

    @classmethod
    def load(cls, store: Store) -> "DataManifest":
        """Load the manifest of a data folder.

        Raises DataError, naming the file, for a folder that is missing or empty, and for a manifest that is damaged, of
        another version, or edited.
        """
        return cls.parse(store.path_for_messages(cls.FILE_NAME), store.read(cls.FILE_NAME))

    @classmethod
    def parse(cls, path: str, content: bytes) -> "DataManifest":
        """Parse a manifest; ``path`` is for messages. Raises DataError like ``load``."""
        try:
            fields = parse_json(content)
        except JSONError as error:
            place = "" if error.line is None else f", line {error.line} column {error.column}"
            raise DataError(f"{path}: cannot be read as JSON ({error}{place}); {REBUILD}") from error
        if not isinstance(fields, dict) or fields.get("format") != cls.FORMAT:
            raise DataError(f'{path}: not a manifest of this kind (it must say "format": "{cls.FORMAT}"); {REBUILD}')
        version = fields.get("format_version")
        if type(version) is not int or not cls.FORMAT_VERSION <= version <= cls.WIDE_VERSION:
            raise DataError(
                f"{path}: format_version={version!r:.99}, but this version reads {cls.FORMAT_VERSION} to "
                f"{cls.WIDE_VERSION}; update Longstride or rebuild"
            )
        try:
            checked = _Fields.model_validate(fields)
            manifest = cls(
                checked.modality,
                checked.properties,
                checked.splits,
                fields["made"],
                checked.tars if version in (cls.INDEXED_VERSION, cls.WIDE_VERSION) else None,
                checked.palette if version == cls.PALETTE_VERSION else None,
            )
            documents = sum(shard.documents for shard in manifest.shards())
            for file, name, most_bytes in (  # the first and the last are held in memory
                (checked.palette, Palette.FILE_NAME, _MOST_PALETTE_BYTES),
                (checked.made.pieces, cls.PIECES_NAME, _LARGEST),
                (checked.made.labels, LABELS_NAME, labels_bytes(documents)),
            ):
                if file is not None and (file.name != name or file.size > most_bytes):
                    raise ValueError(f"{name}: is {file.name!r:.99} of {file.size} bytes")
            if checked.modality in MODALITIES:
                MODALITIES[checked.modality].check_properties(checked.properties)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise DataError(f"{path}: incomplete or misspelt ({place}: {first['msg']}); {REBUILD}") from None
        except ValueError as error:
            raise DataError(f"{path}: incomplete or misspelt ({error}); {REBUILD}") from error
        if manifest.fingerprint != fields.get("fingerprint"):
            raise DataError(f"{path}: edited since it was built (its content does not give its fingerprint); {REBUILD}")
        if manifest.tars is not None and (not isinstance(manifest.tars, str) or not manifest.tars):
            rule = "must be the location of the tars, a path or a URL, such as ../shards"
            raise DataError(f"{path}: tars={manifest.tars!r:.99}: {rule}")
        modality_named(manifest.modality)
        for shard in manifest.shards():
            if not (_BUILT_NAME.fullmatch(shard.name) if manifest.tars is None else is_tar_name(shard.name)):
                raise DataError(f"{path}: {shard.name!r} is not a shard name; {REBUILD}")
        manifest._check_bytes(path, content)
        return manifest

    def _check_bytes(self, path: str, content: bytes) -> None:
        """Raise DataError for a text with the same values that differs from the written one in its bytes."""
        written = self.to_json().encode()
        if content != written and (self.tars is None or _PLACE.sub(b"", content, 1) != _PLACE.sub(b"", written, 1)):
            pairs = enumerate(zip_longest(content.splitlines(True), written.splitlines(True)), 1)
            line = next(number for number, (present, expected) in pairs if present != expected)
            raise DataError(
                f"{path}: edited since it was built (line {line} has the same values but other bytes, such as line "
                f"ends); {REBUILD}"
            )

    @property
    def pieces(self) -> StoredFile | None:
        """The list of the samples that are pieces of a text; None if there are none."""
        pieces = self.made.get("pieces")
        return None if pieces is None else StoredFile(**pieces)

    @property
    def labels(self) -> StoredFile | None:
        """The file with the class of each document; None if documents have no classes."""
        labels = self.made.get("labels")
        return None if labels is None else StoredFile(**labels)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) over the manifest's head without ``tars``, and then the line of each shard."""
        digest = hashlib.sha256(json.dumps(self._head(), sort_keys=True, separators=(",", ":")).encode())
        for name in sorted(self.splits):
            digest.update(f"\n{name}".encode())
            for shard in self.splits[name].shards:
                digest.update(f"\n{shard.hashed_line()}".encode())
        return digest.hexdigest()

    @cached_property
    def stored_bytes(self) -> int:
        return modality_named(self.modality).stored_bytes(self.properties)

    def shards(self) -> Iterator[ShardRecord]:
        for split in self.splits.values():
            yield from split.shards

    def to_json(self) -> str:
        """Return the text of ``manifest.json``: a line per shard, so that people can read and compare it."""
        place = {} if self.tars is None else {"tars": self.tars}
        lines = json.dumps({**self._head(), **place, "fingerprint": self.fingerprint}, indent=2).splitlines()[:-1]
        lines[-1] += ","
        lines.append('  "splits": {')
        for name, split in self.splits.items():
            lines += [f"    {json.dumps(name)}: {{", f'      "documents": {split.documents},', '      "shards": [']
            lines += [f"        {shard.line()}," for shard in split.shards]
            lines[-1] = lines[-1].rstrip(",")
            lines += ["      ]", "    },"]
        lines[-1] = lines[-1].rstrip(",")
        return "\n".join([*lines, "  }", "}"]) + "\n"

    def _head(self) -> dict[str, Any]:
        version = self.FORMAT_VERSION if self.tars is None else self.INDEXED_VERSION
        version = version if self.palette is None else self.PALETTE_VERSION
        is_wide = self.modality in MODALITIES and self.stored_bytes > 1  # ``parse`` rejects unknown ones
        return {
            "format": self.FORMAT,
            "format_version": self.WIDE_VERSION if is_wide else version,
            "modality": self.modality,
            "properties": dict(self.properties),
            **({} if self.palette is None else {"palette": asdict(self.palette)}),
            "made": dict(self.made),
            "documents": {name: split.documents for name, split in self.splits.items()},
        }


def is_tar_name(name: str) -> bool:
    """Whether ``name`` is the path of a tar below a folder, without leaving it."""
    parts = name.split("/")
    return name.endswith(".tar") and PurePosixPath(name).name != ".tar" and not {"", ".", ".."} & set(parts)


def member_ends(index: np.ndarray, stored_bytes: int) -> np.ndarray:
    """Return the offset after each member's padding, (samples,) int64, from an index, (samples,) INDEX_DTYPE."""
    payload_ends = index["content"].astype(np.int64) + stored_bytes * index["length"].astype(np.int64)
    return -(-payload_ends // BLOCK_BYTES) * BLOCK_BYTES


def check_places(path: str, record: ShardRecord, index: np.ndarray, manifest: DataManifest) -> None:
    """Check that an index has members in order, without overlap, within the shard, and of a readable size.

    In an own shard, members also follow one another without gaps. ``index``: (samples,) INDEX_DTYPE. ``path``, of the
    shard, is for messages. Raises DataError.
    """
    start, place = index["member"], index["content"]
    modality = modality_named(manifest.modality)
    rule = "overlap, or are not in order"
    # Offsets are unsigned; those beyond any file become negative or very large.
    ends = member_ends(index, manifest.stored_bytes)
    begins = start.astype(np.int64)
    sound = (start <= place) & (place < _LARGEST) & (ends > begins) & (ends - begins <= _MOST_MEMBER_BYTES)
    is_good = bool(sound.all()) and bool((begins[1:] >= ends[:-1]).all()) and int(ends[-1]) <= record.file_bytes
    if is_good and manifest.tars is None:
        header = BLOCK_BYTES + len(modality.header(0, manifest.properties))
        is_good = begins[0] == 0 and bool((begins[1:] == ends[:-1]).all()) and bool((place - start == header).all())
        if is_good and record.file_bytes - int(ends[-1]) > _MOST_TAIL_BYTES:
            is_good, rule = False, f"end {record.file_bytes - int(ends[-1]):,} bytes before the shard does"
    fixed = modality.document_bytes(manifest.properties)
    if is_good and fixed is not None and bool((index["length"] != fixed).any()):
        is_good, rule = False, f"are not of {fixed} bytes each"
    if not is_good:
        raise DataError(f"{path}: the samples {rule} in its index; {REBUILD}")


def index_to_bytes(index: np.ndarray) -> bytes:
    """Return the content of an index file from an index, (samples,) INDEX_DTYPE."""
    buffer = BytesIO()
    np.save(buffer, index.astype(INDEX_DTYPE, copy=False), allow_pickle=False)
    return buffer.getvalue()


_EMPTY_INDEX_BYTES = len(index_to_bytes(np.empty(0, dtype=INDEX_DTYPE)))  # numpy leaves room for any length


def index_bytes(samples: int) -> int:
    """Return the size of the index file of so many samples."""
    return _EMPTY_INDEX_BYTES + samples * INDEX_DTYPE.itemsize


def read_checked(store: Store, file: StoredFile, what: str) -> bytes:
    """Read a small file. Raises DataError if it is missing or does not match the manifest."""
    path = store.path_for_messages(file.name)
    for last in (False, True):
        with as_data_error(path, mend=REBUILD):
            content = read_plain(store.local(file), file.size)
        if hashlib.sha256(content).hexdigest() == file.sha256:
            return content
        if last or not store.discard(file):
            break
    raise DataError(f"{path}: {what} is damaged (its SHA-256 is not the manifest's); {REBUILD}")


def load_palette(store: Store, file: StoredFile) -> Palette:
    """Load the palette of a data folder. Raises DataError if it is missing, damaged or not a palette."""
    content = read_checked(store, file, "the palette")
    try:
        return Palette.from_ppm(content)
    except DataError as error:
        raise DataError(f"{store.path_for_messages(file.name)}: {error}; {REBUILD}") from None
