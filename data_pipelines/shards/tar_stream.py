"""A tar that is read once from its beginning: its members, and checksums of everything that is read."""

import hashlib
import io
import re
import tarfile
import zlib
from collections.abc import Generator, Iterator
from typing import Any

from longstride.data_pipelines.errors import DataError

_MOST_HEADER_BYTES = 2**20  # pax headers and long names of a member are read into memory
_MOST_GLOBAL_HEADERS = 1000
_MOST_NAME_CHARACTERS = 4096
_DIGITS = re.compile(rb"\d{256}")  # no valid header has so many, and `tarfile` parses them in quadratic time
_MOST_END_BYTES = 2**26  # zeros at the end of a tar
_REPAIR = "write the tar again or fetch it again"


class TarStream:
    """A forward-only stream from which ``tarfile`` reads headers. It holds no more than a block of the source.

    ``name`` is for messages; ``blocks`` are the tar's bytes in sequence.
    """

    def __init__(self, name: str, blocks: Generator[bytes, None, None]) -> None:
        self._name, self._blocks = name, blocks
        self._buffer = memoryview(b"")
        self.offset = 0
        self._header_left = _MOST_HEADER_BYTES  # of the member whose header is being read
        self.sha256 = hashlib.sha256()  # of all bytes so far
        self.crc32 = 0  # of the bytes since a reader set it to 0; ``members`` does so before each header

    def members(self) -> Iterator[tarfile.TarInfo]:
        """Yield the members in sequence; unread data of a member are skipped before the next one.

        pax headers, also global ones, and GNU's long names are applied. Raises DataError for a tar that is damaged, cut
        short, or continues after its end.
        """
        last = "its beginning"
        archive = tarfile.TarFile(fileobj=io.BytesIO(bytes(tarfile.RECORDSIZE)))
        archive.fileobj, archive.offset = self, 0  # type: ignore[assignment]
        while True:
            self.crc32 = 0
            block = self.peek(tarfile.BLOCKSIZE)
            if len(block) < tarfile.BLOCKSIZE:
                raise DataError(f"{self._name}: ends after {last}, without the zeros that end a tar; {_REPAIR}")
            if not any(block):
                break
            start, self._header_left = self.offset, _MOST_HEADER_BYTES
            try:
                member = tarfile.TarInfo.fromtarfile(archive)
            except DataError:
                raise
            except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
                reason = " ".join(str(error).split())
                rule = f"has an invalid tar header after {last}, at byte {start} ({reason}); {_REPAIR}"
                raise DataError(f"{self._name}: {rule}") from error
            headers = archive.pax_headers
            if (
                not 0 <= member.size < 2**62
                or len(member.name) > _MOST_NAME_CHARACTERS
                or len(headers) > _MOST_GLOBAL_HEADERS
                or sum(len(name) + len(value) for name, value in headers.items()) > _MOST_HEADER_BYTES
            ):
                raise self._damaged_header(start)
            last = f"member {shown(member.name)}"
            yield member
            self.pass_by(archive.offset - self.offset)
        begin = self.offset
        for block in self._take(2**62):
            if self.offset - begin > _MOST_END_BYTES:
                rule = f"continues after {last} with more than {_MOST_END_BYTES:,} zeros; {_REPAIR}"
                raise DataError(f"{self._name}: {rule}")
            if bytes(block).strip(b"\0"):
                rule = f"continues after {last} without a member header (damage, or concatenated tars); {_REPAIR}"
                raise DataError(f"{self._name}: {rule}")

    def read(self, size: int) -> bytes:
        """Read the next bytes of a header, fewer at the end."""
        begin = self.offset
        self._header_left -= size
        if self._header_left < 0:
            raise self._damaged_header(begin)
        content = b"".join(self._take(size))
        if _DIGITS.search(content):
            raise self._damaged_header(begin)
        return content

    def tell(self) -> int:  # for `tarfile`
        return self.offset

    def peek(self, size: int) -> bytes:
        """Return the next bytes without consuming them, fewer at the end."""
        while len(self._buffer) < size:
            block = next(self._blocks, b"")
            if not block:
                break
            self._buffer = memoryview(bytes(self._buffer) + block)
        return bytes(self._buffer[:size])

    def pass_by(self, size: int) -> None:
        """Skip bytes. Raises DataError if there are fewer."""
        begin = self.offset
        for _ in self._take(size):
            pass
        if self.offset - begin < size:
            raise DataError(f"{self._name}: cut short at byte {self.offset}, in the middle of a member; {_REPAIR}")

    def _damaged_header(self, place: int) -> DataError:
        return DataError(
            f"{self._name}: the header of a member at byte {place} is damaged, or larger than {_MOST_HEADER_BYTES:,} "
            f"bytes; {_REPAIR}"
        )

    def close(self) -> None:
        self._blocks.close()

    def _take(self, size: int) -> Iterator[Any]:
        while size > 0:
            if not self._buffer:
                self._buffer = memoryview(next(self._blocks, b""))
                if not self._buffer:
                    return
            part, self._buffer = self._buffer[:size], self._buffer[size:]
            self.sha256.update(part)
            self.crc32 = zlib.crc32(part, self.crc32)
            self.offset += len(part)
            size -= len(part)
            yield part


def shown(name: str) -> str:
    """Format a member's name for messages: bytes that are not UTF-8 become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()
