"""The inputs of a build: documents, the search for files, and the file that stays open between two reads.

A document is a sequence of bytes that can be read in pieces. It is a file of the input (``FileDocument``), a record of
a file (``RecordDocument``), a part of one of these (``DocumentPart``), or an excerpt of a published dataset
(``datasets/dataset.py``).
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.labels import LABEL_EXTENSION, MOST_TEXT_BYTES, parse_label
from longstride.data_pipelines.modalities import MODALITIES, Modality, Properties
from longstride.data_pipelines.plain_files import open_plain, plain_status
from longstride.data_pipelines.records import SUFFIXES as RECORD_SUFFIXES
from longstride.data_pipelines.records import Records, find_records, record_reader

T = TypeVar("T")
FOLDERS, NOTHING = "folders", "nothing"  # targets of links
_TAIL_BYTES = 16  # more than any modality's ``cut_reach``


class OpenInput:
    """The open input of one process: the one that was read last, so that a sequential read does not reopen it."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._opened: Any = None
        self._stack = ExitStack()
        self._tail: tuple[Any, int, bytes] = None, 0, b""  # last document, byte offset, and bytes from there on

    def __enter__(self) -> "OpenInput":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, key: Hashable, open_it: Callable[[ExitStack], T]) -> T:
        """Return what ``open_it`` returned for the key, and call it only if the last key was another.

        ``open_it`` registers everything to be closed with the stack.
        """
        if key != self._key:
            self.close()
            self._opened = open_it(self._stack)
            self._key = key
        return self._opened

    def read_on(self, document: "Document", modality: Modality, properties: Properties, start: int, stop: int) -> bytes:
        """Return content bytes ``[start, stop)`` of a document; the last bytes of the previous read are buffered.

        Going back by a few bytes would restart a decompressor or a decoder.
        """
        last, place, tail = self._tail
        tail = tail[start - place : stop - place] if last == document and place <= start <= place + len(tail) else b""
        content = tail + document.read(self, modality, properties, start + len(tail), stop - start - len(tail))
        self._tail = document, max(start, stop - _TAIL_BYTES), content[-_TAIL_BYTES:]
        return content

    def close(self) -> None:
        self._key, self._opened = None, None
        self._stack.close()


class Document(Protocol):
    """Bytes of one split. Their number is known before they are read. It can be pickled."""

    @property
    def size(self) -> int:
        """The number of content bytes."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """Strings and integers that differ between documents and change with the content, wherever the input lies."""

    def read(self, open_input: OpenInput, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        """Return content bytes ``[offset, offset + size)``. Raises DataError if the input has changed."""


class Labelled(Protocol):
    """A document with a class."""

    def label(self, open_input: OpenInput) -> int:
        """Return the class. Raises DataError if it is missing or wrong."""


@dataclass(frozen=True, slots=True)
class FileDocument:
    """A file of the input. There may be millions, so all documents of a folder share one string."""

    folder: str  # the input, or its parent folder if the input is a file
    relative: bytes  # path under the input, with slashes: the identity, wherever the input lies
    occurrence: int  # how many earlier inputs hold the same relative path
    size: int  # content bytes
    file_bytes: int
    modified_ns: int  # shows with file_bytes whether the file has changed

    @property
    def path(self) -> Path:
        return Path(self.folder, os.fsdecode(self.relative))

    @property
    def source(self) -> str:
        """The path under the input, for messages and lists."""
        return self.relative.decode("utf-8", "backslashreplace")

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.relative.hex(), self.occurrence, self.size, self.file_bytes, self.modified_ns

    @contextmanager
    def opened(self, open_input: OpenInput, key: Hashable, begin: Callable[[Path, BinaryIO], T]) -> Iterator[T]:
        """Provide what ``begin`` makes of the open file. Raises DataError if it has changed since the search."""
        path = self.path  # once: creating a Path costs more than reading a small file

        def open_file(stack: ExitStack) -> tuple[BinaryIO, T]:
            file = stack.enter_context(open_plain(path))
            check_unchanged(path, file, self.file_bytes, self.modified_ns)
            return file, begin(path, file)

        with as_data_error(path):
            file, content = open_input.get(key, open_file)
            yield content
            check_unchanged(path, file, self.file_bytes, self.modified_ns)

    def read(self, open_input: OpenInput, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        """Read a part of the content. Raises DataError if the file has changed since the search."""
        with self.opened(open_input, self, lambda path, file: modality.open(path, file, properties)) as content:
            piece = content.read(offset, size)
        if len(piece) != size:
            raise changed_error(self.path)
        return piece

    def label(self, open_input: OpenInput) -> int:
        """Read the class from the ``.cls`` file named alike up to the first dot. Raises DataError without one."""
        path = self.path
        beside = path.with_name(f"{path.name.partition('.')[0]}.{LABEL_EXTENSION}")
        if not beside.exists():
            raise DataError(f"{path}: has no {beside.name} with its class; add it, or leave out --labels")
        with as_data_error(beside), open_plain(beside) as file:
            return parse_label(str(beside), file.read(MOST_TEXT_BYTES + 1))

    def hash64(self, seed: int, use: str) -> int:
        """Hash the seed, the purpose of the hash and the path under the input to 64 bits of SHA-256."""
        return int.from_bytes(hashlib.sha256(f"{seed}\0{use}\0".encode() + self.relative).digest()[:8], "big")


@dataclass(frozen=True, slots=True)
class RecordDocument:
    """A record of an input file: a line of JSON Lines, or a row of a Parquet file."""

    file: FileDocument  # with size 0, as the file itself is no document
    field: str  # the field with the content
    number: int  # line or row, counted from 1
    start: int  # see ``Records``
    length: int
    size: int

    @property
    def source(self) -> str:
        """The file's path under the input, and the line or row."""
        return f"{self.file.source}:{self.number}"

    @property
    def identity(self) -> tuple[Any, ...]:
        return *self.file.identity, self.number, self.size

    def read(self, open_input: OpenInput, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        """Read a part of the content. Raises DataError if the file has changed since the search."""
        key = self.file, self.field
        with self.file.opened(open_input, key, lambda path, file: record_reader(path, file, self.field)) as reader:
            content = reader.content(self.start, self.length)
        if len(content) != self.size:
            raise changed_error(self.file.path)
        return content[offset : offset + size]


WholeDocument = FileDocument | RecordDocument


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """The beginning or the end of a document that is divided between two splits."""

    document: WholeDocument
    offset: int  # content bytes of the document before the part
    size: int

    @property
    def source(self) -> str:
        return self.document.source

    @property
    def identity(self) -> tuple[Any, ...]:
        return *self.document.identity, self.offset, self.size

    def label(self, open_input: OpenInput) -> int:
        return cast("Labelled", self.document).label(open_input)

    def read(self, open_input: OpenInput, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        """Read a piece of the part. Raises DataError if the file has changed since the search."""
        return self.document.read(open_input, modality, properties, self.offset + offset, size)


@dataclass(frozen=True)
class RecordDocuments(Sequence[RecordDocument]):
    """Records of files, in order. There may be millions, so documents are created one at a time."""

    field: str
    files: Sequence[tuple[FileDocument, Records]]

    def __len__(self) -> int:
        return sum(map(len, (records for _, records in self.files)))

    def __iter__(self) -> Iterator[RecordDocument]:
        for file, records in self.files:
            columns = (records.numbers, records.starts, records.lengths, records.sizes)
            for place in range(0, len(records), 2**12):
                for row in zip(*(column[place : place + 2**12].tolist() for column in columns), strict=True):
                    yield RecordDocument(file, self.field, *row)

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]


def mix(documents: list[FileDocument], seed: int) -> None:
    """Sort documents by a hash of (seed, path), so that each shard becomes a mixture of all folders."""
    documents.sort(key=lambda document: document.hash64(seed, f"order {document.occurrence}"))


def check_unchanged(path: Path | str, file: BinaryIO, file_bytes: int, modified_ns: int) -> None:
    """Raise DataError if an open file has changed since the search."""
    status = os.fstat(file.fileno())
    if (status.st_size, status.st_mtime_ns) != (file_bytes, modified_ns):
        raise changed_error(path)


def changed_error(path: Path | str) -> DataError:
    """Return the error for a file that has changed since the search."""
    return DataError(f"{path}: changed since the build began")


@dataclass(slots=True)
class LeftOut:
    """Counts of what a search left out."""

    empty: int = 0  # empty files
    links: Counter[str] = field(default_factory=Counter)  # by the kind of their targets
    no_files: int = 0  # pipes, sockets and devices
    records: dict[str, int] | None = None  # null and empty records; None if documents are not records
    # These are for messages only: files of other kinds must not change the data folder.
    endings: Counter[str] = field(default_factory=Counter)  # files with other suffixes, by suffix
    looked_at: int = 0  # all files of folders
    followed: Counter[str] = field(default_factory=Counter)  # followed links to files, by the targets' folders


def find_documents(
    inputs: Sequence[Path], suffixes: tuple[str, ...], exclude: tuple[str, ...], modality: Modality, target: Properties
) -> tuple[list[FileDocument], dict[str, int], LeftOut]:
    """Find the documents of the inputs that are not empty, with their common properties and what was left out.

    Documents are sorted by relative path within each input, whatever the order of the file system. ``requested`` are
    properties to convert the documents to. Raises DataError for an input that is missing or unreadable, for a document
    that does not fit the others, and if there are no documents.
    """
    left_out = LeftOut()
    documents: list[FileDocument] = []
    properties: dict[str, int] | None = None
    occurrences: Counter[bytes] = Counter()
    for file in _files(inputs, suffixes, exclude, left_out):
        if properties is None:
            with as_data_error(file.path), open_plain(file.path) as opened:
                properties = modality.settle(file.path, opened, target)
        with as_data_error(file.path):
            size = modality.measure(file.path, properties)
        if size == 0:
            left_out.empty += 1
            continue
        documents.append(replace(file, occurrence=occurrences[file.relative], size=size))
        occurrences[file.relative] += 1
    if not documents or properties is None:
        raise _nothing_found(inputs, suffixes, modality.name, left_out)
    return documents, properties, left_out


def find_record_files(
    inputs: Sequence[Path], suffixes: tuple[str, ...], exclude: tuple[str, ...], field: str
) -> tuple[list[tuple[FileDocument, Records]], LeftOut]:
    """Find the files whose records are documents, with the records that are not empty and what was left out.

    Raises DataError like ``find_documents``, and for records without the field (see ``find_records``).
    """
    left_out = LeftOut(records={"null_records": 0, "empty_records": 0})
    counts = left_out.records
    assert counts is not None
    files: list[tuple[FileDocument, Records]] = []
    occurrences: Counter[bytes] = Counter()
    for file in _files(inputs, suffixes, exclude, left_out):
        with as_data_error(file.path), open_plain(file.path) as opened:
            records = find_records(file.path, opened, field)
        counts["null_records"] += records.null
        counts["empty_records"] += records.empty
        files.append((replace(file, occurrence=occurrences[file.relative]), records))
        occurrences[file.relative] += 1
    if not any(len(records) for _, records in files):
        raise _nothing_found(inputs, suffixes, "text", left_out)
    return files, left_out


def _nothing_found(inputs: Sequence[Path], suffixes: tuple[str, ...], modality: str, left_out: LeftOut) -> DataError:
    present = {ending or "names without a suffix" for ending in left_out.endings}
    counts = {"empty": left_out.empty, "pipes, sockets or devices": left_out.no_files}
    counts |= {f"links to {what}": count for what, count in left_out.links.items()}
    counts |= {name.replace("_", " "): count for name, count in (left_out.records or {}).items()}
    is_empty = left_out.empty or any((left_out.records or {}).values())
    rule = "name files that are not empty" if is_empty else "name other suffixes or folders"
    if NOTHING in left_out.links:
        rule = "fetch or copy again the files that the links point to"
    elif FOLDERS in left_out.links:
        rule = "name the folders that the links point to"
    if present:
        rule = "select files with --suffix" if present != {"names without a suffix"} else "take all with --all-files"
        for name, kind in MODALITIES.items():
            if name != modality and present & set(kind.suffixes):
                rule = f"take {kind.words} with --modality {name}, or select files with --suffix"
        if left_out.records is None and present & set(RECORD_SUFFIXES):
            rule = "name the field that holds the text with --field, or take files as they are with --suffix"
        rule = f"there are {', '.join(sorted(present)[:9])}: {rule}"
    counted = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return DataError(
        f"{', '.join(map(str, inputs))}: no matching file (suffixes: {' '.join(suffixes) or 'any'}"
        f"{'; left out: ' if counted else ''}{counted}); {rule}"
    )


def _files(
    inputs: Sequence[Path], suffixes: tuple[str, ...], exclude: tuple[str, ...], left_out: LeftOut
) -> Iterator[FileDocument]:
    """Yield the files with any bytes, not yet measured. Raises DataError for an input that is missing or unreadable."""
    if not inputs:
        raise DataError("inputs: none given; name at least one folder or file")
    searches = [_files_of(root, suffixes, exclude, left_out) for root in inputs]
    taken: set[str] = set()  # real paths: a file is read once, preferably by its own name rather than by a link
    if any(links for _, _, links in searches):
        for folder, names, links in searches:
            place = os.path.realpath(folder)
            taken.update(str(Path(place, os.fsdecode(name))) for name in names if name not in links)
    for folder, names, links in searches:
        for relative in names:
            path = Path(folder, os.fsdecode(relative))
            if relative in links:
                place = os.path.realpath(path)
                if place in taken:
                    left_out.links["files that are taken already"] += 1
                    continue
                taken.add(place)
                left_out.followed[os.path.dirname(place)] += 1  # noqa: PTH120
            if not os.access(path, os.R_OK):
                raise DataError(f"{path}: the file cannot be read; allow reading or exclude it")
            status = path.stat()
            if status.st_size == 0:
                left_out.empty += 1
                continue
            yield FileDocument(folder, relative, 0, 0, status.st_size, status.st_mtime_ns)


def _files_of(
    root: Path, suffixes: tuple[str, ...], exclude: tuple[str, ...], left_out: LeftOut
) -> tuple[str, list[bytes], set[bytes]]:
    """Return the folder of an input, the sorted paths of its files under that folder, and those that are links."""
    with as_data_error(root, "cannot be accessed", "allow access to the folders above it"):
        is_file, is_folder = root.is_file(), root.is_dir()
    if is_file:
        names = [os.fsencode(root.name)]
        return str(root.parent), names, set(names) if root.is_symlink() else set()
    if not is_folder:
        with as_data_error(root), suppress(FileNotFoundError):
            plain_status(root)  # raises for a pipe or a device
        what = "a link to nothing" if root.is_symlink() else "no such file or folder"
        raise DataError(f"{root}: {what}; name an input that exists")

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror}); allow reading or exclude it")

    excluded = {"__pycache__", *exclude}
    paths, links = [], set()
    for folder, folders, files in os.walk(root, onerror=refuse):
        visible = [name for name in folders if not name.startswith(".") and name not in excluded]
        folders[:] = [name for name in visible if not Path(folder, name).is_symlink()]
        if len(visible) > len(folders):
            left_out.links[FOLDERS] += len(visible) - len(folders)
        under = PurePath(folder).relative_to(root)
        for name in files:
            if name.startswith(".") or name in excluded:
                continue
            path = Path(folder, name)
            left_out.looked_at += 1
            if suffixes and not name.endswith(suffixes):
                left_out.endings[PurePath(name).suffix] += 1
                continue
            is_link = path.is_symlink()
            with as_data_error(path):
                if path.is_file():
                    paths.append(os.fsencode((under / name).as_posix()))
                    if is_link:
                        links.add(paths[-1])
                elif is_link:
                    left_out.links["pipes, sockets or devices" if path.exists() else NOTHING] += 1
                else:
                    left_out.no_files += 1
    return str(root), sorted(paths), links
