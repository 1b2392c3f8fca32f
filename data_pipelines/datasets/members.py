"""Files of a dataset, by themselves or inside archives: nothing is unpacked to the disk, and nothing is read whole.

A deflated file is read once, from its beginning to its end: reading on is cheap, going back begins anew.
"""

import gzip
import hashlib
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from longstride.data_pipelines.documents import OpenInput, changed, check_unchanged
from longstride.data_pipelines.errors import DataError

_GZIP_MAGIC, _ZIP_MAGIC = b"\x1f\x8b", (b"PK\x03\x04", b"PK\x05\x06")
_HASH_BYTES = 2**20
try:
    from lzma import LZMAError
except ImportError:  # a Python that was built without it cannot read such members
    _LZMA_DAMAGE: tuple[type[Exception], ...] = ()
else:
    _LZMA_DAMAGE = (LZMAError,)
# What the standard library raises for a damaged archive. RuntimeError: the archive asks for a password.
_DAMAGE: tuple[type[Exception], ...] = (
    OSError,
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    *_LZMA_DAMAGE,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Member:
    """A file, or one inside archives."""

    path: str  # of the file on the disk
    name: str  # of the innermost file
    layers: tuple[str | None, ...]  # from the outside in: a zip's member by its name, None for gzip
    offset: int  # of its first byte, behind all layers
    size: int
    file_bytes: int  # of the file on the disk
    modified_ns: int

    @property
    def base_name(self) -> str:
        """Without folders."""
        return self.name.rpartition("/")[2]

    @property
    def shown(self) -> str:
        """For messages."""
        return self.path if not self.layers and not self.offset else f"{self.path} ({self.name})"

    @property
    def identity(self) -> tuple[Any, ...]:
        """Names, sizes and time of change, but not where the file lies."""
        place = "/".join("gzip" if layer is None else layer for layer in self.layers)
        return self.path.rpartition("/")[2], place, self.offset, self.size, self.file_bytes, self.modified_ns

    def read(self, open_input: OpenInput, offset: int, size: int) -> bytes:
        """Bytes ``[offset, offset + size)``. Raises DataError where they cannot be read."""
        with _archive_errors(self.shown):
            file, stream = open_input.get((self.path, self.layers), self._open)
            stream.seek(self.offset + offset)
            content = stream.read(size)
            check_unchanged(self.path, file, self.file_bytes, self.modified_ns)
        if len(content) != size:
            raise changed(self.path)
        return content

    def digest(self, open_input: OpenInput, algorithm: str) -> str:
        """The checksum, in hexadecimal. Raises DataError where the member cannot be read."""
        state = hashlib.new(algorithm, usedforsecurity=False)
        for offset in range(0, self.size, _HASH_BYTES):
            state.update(self.read(open_input, offset, min(_HASH_BYTES, self.size - offset)))
        return state.hexdigest()

    def inside(self, name: str) -> "Member":
        """A member of this one, which is a zip archive. Raises DataError where it has none of that name."""
        assert not self.offset, self
        with _archive_errors(self.shown), ExitStack() as stack:
            archive = zipfile.ZipFile(self._open(stack)[1])
            if name not in archive.namelist():
                raise DataError(f"{self.shown}: holds no {name}; fetch it again")
            return replace(
                self, name=f"{self.name}/{name}", layers=(*self.layers, name), size=archive.getinfo(name).file_size
            )

    def _open(self, stack: ExitStack) -> tuple[BinaryIO, BinaryIO]:
        """The file on the disk, and the stream behind all layers."""
        path = Path(self.path)
        file = stack.enter_context(path.open("rb"))
        check_unchanged(path, file, self.file_bytes, self.modified_ns)
        stream: Any = file
        for layer in self.layers:
            if layer is None:
                stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
            else:
                stream = stack.enter_context(stack.enter_context(zipfile.ZipFile(stream)).open(layer))
        return file, stream


def members_of(path: Path) -> list[Member]:
    """The files that an archive (.zip, .tar or .tar.gz) holds. Any other file is its own only member.

    Raises DataError for a file that cannot be read, and for an archive that is damaged or cut short.
    """
    member = whole_file(path)
    with _archive_errors(member.shown), path.open("rb") as file:
        head = file.read(4)
        file.seek(0)
        if head in _ZIP_MAGIC:
            with zipfile.ZipFile(file) as archive:
                return [
                    replace(member, name=entry.filename, layers=(entry.filename,), size=entry.file_size)
                    for entry in archive.infolist()
                    if not entry.is_dir()
                ]
        layers: tuple[str | None, ...] = (None,) if head[:2] == _GZIP_MAGIC else ()
        if not layers and not tarfile.is_tarfile(file):
            return [member]
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:gz" if layers else "r:") as tar:
            return [
                replace(member, name=entry.name, layers=layers, offset=entry.offset_data, size=entry.size)
                for entry in tar
                if entry.isreg()
            ]


def whole_file(path: Path) -> Member:
    """A file on the disk as it is, archive or not. Raises DataError where there is none."""
    with _archive_errors(str(path)):
        status = path.stat()
    return Member(str(path), path.name, (), 0, status.st_size, status.st_size, status.st_mtime_ns)


@contextmanager
def _archive_errors(shown: str) -> Iterator[None]:
    """Raises DataError for any error of reading an archive."""
    try:
        yield
    except DataError:
        raise
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # one without a number is gzip's
            raise DataError(f"{shown}: cannot be read ({error.strerror})") from error
        words = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{shown}: is damaged or cut short ({words}); fetch it again") from error
