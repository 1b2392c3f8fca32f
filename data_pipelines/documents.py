"""What a build reads: documents, how files are found, and the file that stays open between two reads.

A document is a row of bytes that can be read in pieces: a file of the input (``FileDocument``), or an excerpt of a
published dataset (``datasets/excerpts.py``).
"""

import hashlib
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Protocol, TypeVar

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Content, Modality, Properties

T = TypeVar("T")


class OpenInput:
    """What one process has open: the input that it read last, so that reading on does not open it again."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._opened: Any = None
        self._stack = ExitStack()

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
    def identity(self) -> tuple[Any, ...]:
        """Path under the input, sizes and time of change."""
        return self.relative.hex(), self.occurrence, self.size, self.file_bytes, self.modified_ns

    def read(self, open_input: OpenInput, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        """A piece of the content. Raises DataError where the file has changed since it was found."""

        def open_file(stack: ExitStack) -> tuple[BinaryIO, Content]:
            file = stack.enter_context(self.path.open("rb"))
            check_unchanged(self.path, file, self.file_bytes, self.modified_ns)
            return file, modality.open(self.path, file, properties)

        with reading(self.path):
            file, content = open_input.get(self, open_file)
            piece = content.read(offset, size)
            check_unchanged(self.path, file, self.file_bytes, self.modified_ns)
        if len(piece) != size:
            raise changed(self.path)
        return piece

    def hashed(self, seed: int, use: str) -> int:
        """64 bits of SHA-256 over the seed, what the number is for, and the path under the input."""
        return int.from_bytes(hashlib.sha256(f"{seed}\0{use}\0".encode() + self.relative).digest()[:8], "big")


def mix(documents: list[FileDocument], seed: int) -> None:
    """Sorts documents by a hash of (seed, path): each shard becomes a mixture of all folders."""
    documents.sort(key=lambda document: document.hashed(seed, f"order {document.occurrence}"))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises DataError for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


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
    """How many files a search left out."""

    empty: int = 0
    symlinks: int = 0


def find_documents(
    inputs: Sequence[Path], suffixes: tuple[str, ...], exclude: tuple[str, ...], modality: Modality, wanted: Properties
) -> tuple[list[FileDocument], dict[str, int], LeftOut]:
    """The documents of the inputs that are not empty, their common properties, and what was left out.

    Documents are sorted by relative path within each input: the file system's own order does not count. ``wanted``
    are properties that the documents are converted to. Raises DataError for an input that is missing or unreadable,
    for a document that does not fit the others, and where none is found.
    """
    if not inputs:
        raise DataError("inputs: none given; name at least one folder or file")
    left_out = LeftOut()
    documents: list[FileDocument] = []
    properties: dict[str, int] | None = None
    occurrences: dict[bytes, int] = {}
    for given in inputs:
        folder, names = _files_of(given, suffixes, exclude, left_out)
        for relative in names:
            path = Path(folder, os.fsdecode(relative))
            if not os.access(path, os.R_OK):
                raise DataError(f"{path}: the file cannot be read; allow reading or exclude it")
            status = path.stat()
            if status.st_size and properties is None:
                with path.open("rb") as file:
                    properties = modality.settle(path, file, wanted)
            size = modality.measure(path, properties) if status.st_size and properties is not None else 0
            if size == 0:
                left_out.empty += 1
                continue
            occurrence = occurrences.get(relative, 0)
            documents.append(FileDocument(folder, relative, occurrence, size, status.st_size, status.st_mtime_ns))
            occurrences[relative] = occurrence + 1
    if not documents or properties is None:
        raise DataError(
            f"{', '.join(map(str, inputs))}: no file to take (suffixes: {' '.join(suffixes) or 'any'}; left out: "
            f"{left_out.empty} empty, {left_out.symlinks} symlinks); name other suffixes or folders"
        )
    return documents, properties, left_out


def _files_of(
    given: Path, suffixes: tuple[str, ...], exclude: tuple[str, ...], left_out: LeftOut
) -> tuple[str, list[bytes]]:
    """The folder of an input, and the sorted paths of its files under that folder."""
    try:
        is_file, is_folder = given.is_file(), given.is_dir()
    except OSError as error:
        raise DataError(f"{given}: cannot be looked at ({error.strerror}); allow reading the folders above") from error
    if is_file:
        return str(given.parent), [os.fsencode(given.name)]
    if not is_folder:
        raise DataError(f"{given}: no such file or folder; name an input that exists")

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror}); allow reading or exclude it")

    passed_over = {"__pycache__", *exclude}
    paths = []
    for folder, folders, files in os.walk(given, onerror=refuse):
        names = [name for name in folders if not name.startswith(".") and name not in passed_over]
        folders[:] = [name for name in names if not Path(folder, name).is_symlink()]
        left_out.symlinks += len(names) - len(folders)
        under = PurePath(folder).relative_to(given)
        for name in files:
            if name.startswith(".") or name in passed_over or (suffixes and PurePath(name).suffix not in suffixes):
                continue
            path = Path(folder, name)
            if path.is_symlink():
                left_out.symlinks += 1
            elif path.is_file():
                paths.append(os.fsencode((under / name).as_posix()))
    return str(given), sorted(paths)
