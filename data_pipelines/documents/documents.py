"""What a build reads: documents, each a row of bytes that can be read in pieces, and what stays open between pieces.

A document is a file of the input (``FileDocument``), or a part of a published dataset (``datasets/parts.py``).
"""

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Content, Modality, Properties

T = TypeVar("T")


class Openings:
    """What one process has open: the last thing that it read from, so that reading on never begins anew."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._opened: Any = None
        self._stack = ExitStack()

    def get(self, key: Hashable, open_it: Callable[[ExitStack], T]) -> T:
        """What ``open_it`` returned for this key, if that was the last one asked for; else it is called.

        It gives to the stack what has to be closed.
        """
        if key != self._key:
            self.close()
            self._opened = open_it(self._stack)
            self._key = key
        return self._opened

    def close(self) -> None:
        """Let go of what is open."""
        self._key, self._opened = None, None
        self._stack.close()


class Document(Protocol):
    """Bytes of one split, of a size that is known before they are read. It can be pickled."""

    @property
    def size(self) -> int:
        """Content bytes."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells it from others, and from itself before a change, wherever the input lies: strings and integers."""

    def read(self, openings: Openings, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        """Content bytes ``[offset, offset + size)``. Raises DataError where they are not as they were found."""


@dataclass(frozen=True, slots=True)
class FileDocument:
    """A file of the input. There may be millions: a folder is one string that all its documents share."""

    folder: str  # the input, or the folder that holds it where the input is a file
    relative: bytes  # path under its input, with slashes: its identity, wherever the input lies
    occurrence: int  # how many earlier inputs hold the same relative path
    size: int  # content bytes
    file_bytes: int
    modified_ns: int  # with the size: whether the file is still the one that was found

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return Path(self.folder, os.fsdecode(self.relative))

    @property
    def identity(self) -> tuple[Any, ...]:
        """Path under the input, sizes and time of change."""
        return self.relative.hex(), self.occurrence, self.size, self.file_bytes, self.modified_ns

    def read(self, openings: Openings, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        """A piece of the content. Raises DataError where the file is no longer as the walk found it."""

        def open_file(stack: ExitStack) -> tuple[BinaryIO, Content]:
            file = stack.enter_context(self.path.open("rb"))
            self._check(file)
            return file, modality.open(self.path, file, properties)

        with reading(self.path):
            file, content = openings.get(self, open_file)
            found = content.read(offset, size)
            self._check(file)
        if len(found) != size:
            raise changed(self.path)
        return found

    def _check(self, file: BinaryIO) -> None:
        check_unchanged(self.path, file, self.file_bytes, self.modified_ns)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises DataError for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def check_unchanged(path: Path | str, file: BinaryIO, file_bytes: int, modified_ns: int) -> None:
    """Raises DataError for an open file that is not the one that was found before."""
    status = os.fstat(file.fileno())
    if (status.st_size, status.st_mtime_ns) != (file_bytes, modified_ns):
        raise changed(path)


def changed(path: Path | str) -> DataError:
    """What to tell of a file that is not the one that was found before."""
    return DataError(f"{path}: changed since the build began")
