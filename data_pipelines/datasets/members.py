"""Files of a dataset, plain or in archives. Nothing is unpacked to the disk, or read into memory at once.

Sequential reads of a compressed file are cheap; going back starts again from the beginning.
"""

import gzip
import hashlib
import io
import os
import zipfile
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from longstride.data_pipelines.documents import OpenInput, changed_error, check_unchanged
from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.formats import GZIP, HEAD_BYTES, TAR, decompress, file_format
from longstride.data_pipelines.plain_files import blocks_of, open_plain, plain_status
from longstride.data_pipelines.shards import TarStream

_GZIP_MAGIC, _ZIP_MAGIC = b"\x1f\x8b", (b"PK\x03\x04", b"PK\x05\x06")
_HASH_BYTES = 2**20
_MOST_AT_ONCE = 2**27  # bytes
_MOST_MEMBERS = 2**20  # of an archive
_DAMAGE = (Exception,)  # the standard library raises many kinds for a damaged archive, or one with a password


@dataclass(frozen=True, slots=True)
class Member:
    """A file, or a member of nested archives."""

    path: str  # of the file on the disk
    name: str  # of the innermost file
    layers: tuple[str | None, ...]  # from the outside in: the name of a zip's member, None for gzip
    offset: int  # of the first byte in the innermost layer
    size: int
    file_bytes: int  # of the file on the disk
    modified_ns: int

    @property
    def base_name(self) -> str:
        """The name without folders."""
        return self.name.rpartition("/")[2]

    @property
    def shown(self) -> str:
        return self.path if not self.layers and not self.offset else f"{self.path} ({self.name})"

    @property
    def identity(self) -> tuple[Any, ...]:
        """Names, sizes and modification time, without the file's folder."""
        place = "/".join("gzip" if layer is None else layer for layer in self.layers)
        return self.path.rpartition("/")[2], place, self.offset, self.size, self.file_bytes, self.modified_ns

    def read(self, open_input: OpenInput, offset: int, size: int) -> bytes:
        """Read bytes ``[offset, offset + size)``. Raises DataError if they cannot be read."""
        with as_data_error(self.shown, damage=_DAMAGE):
            file, stream = open_input.get((self.path, self.layers), self._open)
            stream.seek(self.offset + offset)
            content = stream.read(size)
            check_unchanged(self.path, file, self.file_bytes, self.modified_ns)
        if len(content) != size:
            raise changed_error(self.path)
        return content

    def digest(self, open_input: OpenInput, algorithm: str) -> str:
        """Compute the checksum, in hexadecimal. Raises DataError if the member cannot be read."""
        state = hashlib.new(algorithm, usedforsecurity=False)
        for offset in range(0, self.size, _HASH_BYTES):
            state.update(self.read(open_input, offset, min(_HASH_BYTES, self.size - offset)))
        return state.hexdigest()

    def inside(self, name: str) -> "Member":
        """Return a member of this zip archive. Raises DataError if it has none of that name."""
        assert not self.offset, self
        with as_data_error(self.shown, damage=_DAMAGE), ExitStack() as stack:
            archive = zipfile.ZipFile(self._open(stack)[1])
            if name not in archive.namelist():
                raise DataError(f"{self.shown}: holds no {name}; fetch it again")
            return replace(
                self, name=f"{self.name}/{name}", layers=(*self.layers, name), size=archive.getinfo(name).file_size
            )

    def _open(self, stack: ExitStack) -> tuple[BinaryIO, BinaryIO]:
        """Open the file on the disk, and the stream inside all layers."""
        path = Path(self.path)
        file = stack.enter_context(_open_modest(path))
        check_unchanged(path, file, self.file_bytes, self.modified_ns)
        stream: Any = file
        for layer in self.layers:
            if layer is None:
                stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
            else:
                stream = stack.enter_context(stack.enter_context(zipfile.ZipFile(stream)).open(layer))
        return file, stream


class _ModestFile(io.BufferedReader):
    """A file that limits the bytes of a read: a zip states the length of its list of members itself."""

    def read(self, size: int | None = -1) -> bytes:
        """Read the next bytes. Raises ValueError for too many at once."""
        remaining = max(0, os.fstat(self.fileno()).st_size - self.tell())
        size = remaining if size is None or size < 0 else min(size, remaining)
        if size > _MOST_AT_ONCE:
            raise ValueError(f"claims that {size:,} bytes belong together; at most {_MOST_AT_ONCE:,} are allowed")
        return super().read(size)


def _open_modest(path: Path) -> BinaryIO:
    return cast("BinaryIO", _ModestFile(cast("Any", open_plain(path)).detach()))


def members_of(path: Path) -> list[Member]:
    """List the files of an archive (.zip, .tar or .tar.gz). Any other file is its own only member.

    Raises DataError for a file that cannot be read, and for an archive that is damaged or cut short.
    """
    member = whole_file(path)
    with as_data_error(member.shown, damage=_DAMAGE), _open_modest(path) as file:
        head = file.read(HEAD_BYTES)
        file.seek(0)
        if head[:4] in _ZIP_MAGIC:
            with zipfile.ZipFile(file) as archive:
                return [
                    replace(member, name=entry.filename, layers=(entry.filename,), size=entry.file_size)
                    for entry in archive.infolist()
                    if not entry.is_dir()
                ]
        kind = file_format(head)
        layers: tuple[str | None, ...] = (None,) if head[:2] == _GZIP_MAGIC else ()
        if not layers and (kind is None or kind.name != TAR):
            return [member]
        blocks = decompress(path, blocks_of(file), GZIP) if layers else blocks_of(file)
        with closing(TarStream(str(path), blocks)) as stream:
            return [
                replace(member, name=entry.name, layers=layers, offset=stream.offset, size=entry.size)
                for entry in islice(stream.members(), _MOST_MEMBERS)
                if entry.isreg() and not entry.issparse()
            ]


def whole_file(path: Path) -> Member:
    """Return a file on the disk as a member, archive or not. Raises DataError if it does not exist."""
    with as_data_error(path):
        status = plain_status(path)
    return Member(str(path), path.name, (), 0, status.st_size, status.st_size, status.st_mtime_ns)
