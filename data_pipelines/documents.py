"""What a build reads: documents, how files are found, and the file that stays open between two reads.

A document is a row of bytes that can be read in pieces: a file of the input (``FileDocument``), a record of one
(``RecordDocument``), a part of one of these (``DocumentPart``), or an excerpt of a published dataset
(``datasets/excerpts.py``).
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Protocol, TypeVar, overload

from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.modalities import MODALITIES, Content, Modality, Properties
from longstride.data_pipelines.plain_files import open_plain, plain_status
from longstride.data_pipelines.records import SUFFIXES as RECORD_SUFFIXES
from longstride.data_pipelines.records import RecordReader, Records, find_records, record_reader

T = TypeVar("T")
FOLDERS, NOTHING = "folders", "nothing"  # that links lead to
_TAIL_BYTES = 16  # more than any modality's ``cut_reach``


class OpenInput:
    """What one process has open: the input that it read last, so that reading on does not open it again."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._opened: Any = None
        self._stack = ExitStack()
        self._tail: tuple[Any, int, bytes] = None, 0, b""  # of the document that was read last: where it was left

    def __enter__(self) -> "OpenInput":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, key: Hashable, open_it: Callable[[ExitStack], T]) -> T:
        """What ``open_it`` returned for this key if that was the last key; else ``open_it`` is called now.

        ``open_it`` gives the stack whatever has to be closed.
        """
        if key != self._key:
            self.close()
            self._opened = open_it(self._stack)
            self._key = key
        return self._opened

    def read_on(self, document: "Document", modality: Modality, properties: Properties, start: int, stop: int) -> bytes:
        """Content bytes ``[start, stop)`` of a document. A few that were read last are not read again.

        What is unpacked or decoded would begin anew for them.
        """
        last, place, held = self._tail
        held = held[start - place : stop - place] if last == document and place <= start <= place + len(held) else b""
        content = held + document.read(self, modality, properties, start + len(held), stop - start - len(held))
        kept = min(len(content), _TAIL_BYTES)
        self._tail = document, stop - kept, content[len(content) - kept :]
        return content

    def close(self) -> None:
        """Closes what is open."""
        self._key, self._opened = None, None
        self._stack.close()


class Document(Protocol):
    """Bytes of one split, of a size that is known before they are read. It can be pickled."""

    @property
    def size(self) -> int:
        """Content bytes."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """Strings and integers that differ for another document, and after a change; the same wherever it lies."""

    def read(self, open_input: OpenInput, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        """Content bytes ``[offset, offset + size)``. Raises DataError where the input has changed."""


@dataclass(frozen=True, slots=True)
class FileDocument:
    """A file of the input. There may be millions: a folder is one string that all its documents share."""

    folder: str  # the input, or the folder that holds it where the input is a file
    relative: bytes  # path under its input, with slashes: its identity, wherever the input lies
    occurrence: int  # how many earlier inputs hold the same relative path
    size: int  # content bytes
    file_bytes: int
    modified_ns: int  # with file_bytes: tells whether the file has changed

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return Path(self.folder, os.fsdecode(self.relative))

    @property
    def source(self) -> str:
        """What a person calls it: its path under the input."""
        return self.relative.decode("utf-8", "backslashreplace")

    @property
    def identity(self) -> tuple[Any, ...]:
        """Path under the input, sizes and time of change."""
        return self.relative.hex(), self.occurrence, self.size, self.file_bytes, self.modified_ns

    def read(self, open_input: OpenInput, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        """A piece of the content. Raises DataError where the file has changed since it was found."""

        path = self.path  # once: a Path is dearer to make than a small file is to read

        def open_file(stack: ExitStack) -> tuple[BinaryIO, Content]:
            file = stack.enter_context(open_plain(path))
            check_unchanged(path, file, self.file_bytes, self.modified_ns)
            return file, modality.open(path, file, properties)

        with as_data_error(path):
            file, content = open_input.get(self, open_file)
            piece = content.read(offset, size)
            check_unchanged(path, file, self.file_bytes, self.modified_ns)
        if len(piece) != size:
            raise changed(path)
        return piece

    def hashed(self, seed: int, use: str) -> int:
        """64 bits of SHA-256 over the seed, what the number is for, and the path under the input."""
        return int.from_bytes(hashlib.sha256(f"{seed}\0{use}\0".encode() + self.relative).digest()[:8], "big")


@dataclass(frozen=True, slots=True)
class RecordDocument:
    """A record of a file of the input: a line of JSON Lines, or a row of a Parquet file."""

    file: FileDocument  # of size 0, as the file is no document
    field: str  # that holds the content
    number: int  # of the line or row, from 1 on
    start: int  # see ``Records``
    length: int
    size: int

    @property
    def source(self) -> str:
        """The file's path under the input, and the line or row."""
        return f"{self.file.source}:{self.number}"

    @property
    def identity(self) -> tuple[Any, ...]:
        """The file's, the record's number and its size."""
        return *self.file.identity, self.number, self.size

    def read(self, open_input: OpenInput, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        """A piece of the content. Raises DataError where the file has changed since it was found."""
        found = self.file

        def open_file(stack: ExitStack) -> tuple[Path, BinaryIO, RecordReader]:
            path = found.path
            with as_data_error(path):
                file = stack.enter_context(open_plain(path))
                check_unchanged(path, file, found.file_bytes, found.modified_ns)
                return path, file, record_reader(path, file, self.field)

        path, file, reader = open_input.get((found, self.field), open_file)
        with as_data_error(path):
            content = reader.content(self.start, self.length)
            check_unchanged(path, file, found.file_bytes, found.modified_ns)
        if len(content) != self.size:
            raise changed(path)
        return content[offset : offset + size]


WholeDocument = FileDocument | RecordDocument


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """The beginning or the end of a document that is cut between two splits."""

    document: WholeDocument
    offset: int  # content bytes of the document before the part
    size: int

    @property
    def source(self) -> str:
        """What a person calls the document."""
        return self.document.source

    @property
    def identity(self) -> tuple[Any, ...]:
        """The document's, and which part this is."""
        return *self.document.identity, self.offset, self.size

    def read(self, open_input: OpenInput, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        """A piece of the part. Raises DataError where the file has changed since it was found."""
        return self.document.read(open_input, modality, properties, self.offset + offset, size)


@dataclass(frozen=True)
class RecordDocuments(Sequence[RecordDocument]):
    """Records of files, in order: made one at a time, as there may be millions."""

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

    @overload
    def __getitem__(self, place: int) -> RecordDocument: ...

    @overload
    def __getitem__(self, place: slice) -> list[RecordDocument]: ...

    def __getitem__(self, place: "int | slice") -> "RecordDocument | list[RecordDocument]":
        return list(self)[place]


def mix(documents: list[FileDocument], seed: int) -> None:
    """Sorts documents by a hash of (seed, path): each shard becomes a mixture of all folders."""
    documents.sort(key=lambda document: document.hashed(seed, f"order {document.occurrence}"))


def check_unchanged(path: Path | str, file: BinaryIO, file_bytes: int, modified_ns: int) -> None:
    """Raises DataError for an open file that has changed since it was found."""
    status = os.fstat(file.fileno())
    if (status.st_size, status.st_mtime_ns) != (file_bytes, modified_ns):
        raise changed(path)


def changed(path: Path | str) -> DataError:
    """The error for a file that has changed since it was found."""
    return DataError(f"{path}: changed since the build began")


@dataclass(slots=True)
class LeftOut:
    """How much a search left out."""

    empty: int = 0  # files
    links: Counter[str] = field(default_factory=Counter)  # by what they lead to
    no_files: int = 0  # pipes, sockets and devices
    records: dict[str, int] | None = None  # that are null or empty; None: the documents are no records
    # For messages alone: the data folder stays what it is where files of other kinds lie beside those it is made of.
    endings: Counter[str] = field(default_factory=Counter)  # files whose names were not asked for, by suffix
    looked_at: int = 0  # files of folders, those among them
    followed: Counter[str] = field(default_factory=Counter)  # links to files that were taken, by the files' folders


def find_documents(
    inputs: Sequence[Path], suffixes: tuple[str, ...], exclude: tuple[str, ...], modality: Modality, wanted: Properties
) -> tuple[list[FileDocument], dict[str, int], LeftOut]:
    """The documents of the inputs that are not empty, their common properties, and what was left out.

    Documents are sorted by relative path within each input: the file system's own order does not count. ``wanted``
    are properties that the documents are converted to. Raises DataError for an input that is missing or unreadable,
    for a document that does not fit the others, and where none is found.
    """
    left_out = LeftOut()
    documents: list[FileDocument] = []
    properties: dict[str, int] | None = None
    occurrences: dict[bytes, int] = {}
    for file in _files(inputs, suffixes, exclude, left_out):
        if properties is None:
            with as_data_error(file.path), open_plain(file.path) as opened:
                properties = modality.settle(file.path, opened, wanted)
        with as_data_error(file.path):
            size = modality.measure(file.path, properties)
        if size == 0:
            left_out.empty += 1
            continue
        occurrence = occurrences.get(file.relative, 0)
        documents.append(replace(file, occurrence=occurrence, size=size))
        occurrences[file.relative] = occurrence + 1
    if not documents or properties is None:
        raise _nothing_found(inputs, suffixes, modality.name, left_out)
    return documents, properties, left_out


def find_record_files(
    inputs: Sequence[Path], suffixes: tuple[str, ...], exclude: tuple[str, ...], field: str
) -> tuple[list[tuple[FileDocument, Records]], LeftOut]:
    """The files of the inputs whose records are documents, the records that hold anything, and what was left out.

    Raises DataError as ``find_documents`` does, and for records without the field (see ``find_records``).
    """
    left_out = LeftOut(records={"null_records": 0, "empty_records": 0})
    counts = left_out.records
    assert counts is not None
    found: list[tuple[FileDocument, Records]] = []
    occurrences: dict[bytes, int] = {}
    for file in _files(inputs, suffixes, exclude, left_out):
        with as_data_error(file.path), open_plain(file.path) as opened:
            records = find_records(file.path, opened, field)
        counts["null_records"] += records.null
        counts["empty_records"] += records.empty
        occurrence = occurrences.get(file.relative, 0)
        found.append((replace(file, occurrence=occurrence), records))
        occurrences[file.relative] = occurrence + 1
    if not any(len(records) for _, records in found):
        raise _nothing_found(inputs, suffixes, "text", left_out)
    return found, left_out


def _nothing_found(inputs: Sequence[Path], suffixes: tuple[str, ...], modality: str, left_out: LeftOut) -> DataError:
    endings = {ending or "names without a suffix" for ending in left_out.endings}
    counts = {"empty": left_out.empty, "pipes, sockets or devices": left_out.no_files}
    counts |= {f"links to {what}": count for what, count in left_out.links.items()}
    counts |= {name.replace("_", " "): count for name, count in (left_out.records or {}).items()}
    is_empty = left_out.empty or any((left_out.records or {}).values())
    rule = "name files that hold something" if is_empty else "name other suffixes or folders"
    if NOTHING in left_out.links:
        rule = "fetch or copy again the files that links name"
    elif FOLDERS in left_out.links:
        rule = "name the folders that links lead to"
    if endings:
        rule = "name those to take by --suffix" if endings != {"names without a suffix"} else "take all by --all-files"
        for name, kind in MODALITIES.items():
            if name != modality and endings & set(kind.suffixes):
                rule = f"take {kind.words} by --modality {name}, or name those to take by --suffix"
        if left_out.records is None and endings & set(RECORD_SUFFIXES):
            rule = "name what holds the text of their records by --field, or those to take as they are by --suffix"
        rule = f"there are {', '.join(sorted(endings)[:9])}: {rule}"
    left = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return DataError(
        f"{', '.join(map(str, inputs))}: no file to take (suffixes: {' '.join(suffixes) or 'any'}"
        f"{'; left out: ' if left else ''}{left}); {rule}"
    )


def _files(
    inputs: Sequence[Path], suffixes: tuple[str, ...], exclude: tuple[str, ...], left_out: LeftOut
) -> Iterator[FileDocument]:
    """Files with any bytes, not yet measured. Raises DataError for an input that is missing or unreadable."""
    if not inputs:
        raise DataError("inputs: none given; name at least one folder or file")
    found = [_files_of(given, suffixes, exclude, left_out) for given in inputs]
    taken: set[str] = set()  # where files lie that links could lead to: a file is taken once, by its own name first
    if any(links for _, _, links in found):
        for folder, names, links in found:
            place = os.path.realpath(folder)
            taken.update(str(Path(place, os.fsdecode(name))) for name in names if name not in links)
    for folder, names, links in found:
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
    given: Path, suffixes: tuple[str, ...], exclude: tuple[str, ...], left_out: LeftOut
) -> tuple[str, list[bytes], set[bytes]]:
    """The folder of an input, the sorted paths of its files under that folder, and those that are links."""
    try:
        is_file, is_folder = given.is_file(), given.is_dir()
    except OSError as error:
        raise DataError(f"{given}: cannot be looked at ({error.strerror}); allow reading the folders above") from error
    if is_file:
        names = [os.fsencode(given.name)]
        return str(given.parent), names, set(names) if given.is_symlink() else set()
    if not is_folder:
        with as_data_error(given), suppress(FileNotFoundError):
            plain_status(given)  # a pipe or a device is told by its name
        what = "a link to nothing" if given.is_symlink() else "no such file or folder"
        raise DataError(f"{given}: {what}; name an input that exists")

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror}); allow reading or exclude it")

    passed_over = {"__pycache__", *exclude}
    paths, links = [], set()
    for folder, folders, files in os.walk(given, onerror=refuse):
        visible = [name for name in folders if not name.startswith(".") and name not in passed_over]
        folders[:] = [name for name in visible if not Path(folder, name).is_symlink()]
        if len(visible) > len(folders):
            left_out.links[FOLDERS] += len(visible) - len(folders)
        under = PurePath(folder).relative_to(given)
        for name in files:
            if name.startswith(".") or name in passed_over:
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
    return str(given), sorted(paths), links
