"""A tar that is read once from its beginning: its members, and the checksums of what goes by."""

import hashlib
import io
import re
import tarfile
import zlib
from collections.abc import Generator, Iterator
from typing import Any

from longstride.data_pipelines.errors import DataError

_MOST_HEADER_BYTES = 2**20  # of a member's pax headers and long names, which are read as a whole
_MOST_GLOBAL_HEADERS = 1000  # that hold for all members behind them
_MOST_NAME_CHARACTERS = 4096  # as of a path
_DIGITS = re.compile(rb"\d{256}")  # no header has as many in a row, and `tarfile` takes their square of time
_MOST_END_BYTES = 2**26  # zeros, which end a tar
_REPAIR = "write the tar again or fetch it again"


class TarStream:
    """What ``tarfile`` reads headers from. It goes forwards alone, and holds no more than a block of the source.

    ``name`` is for messages; ``blocks`` are the tar's bytes in sequence.
    """

    def __init__(self, name: str, blocks: Generator[bytes, None, None]) -> None:
        self._name, self._blocks = name, blocks
        self._held = memoryview(b"")
        self.offset = 0
        self._header_left = _MOST_HEADER_BYTES  # of the member whose header is being read
        self.sha256 = hashlib.sha256()  # of all that went by
        self.crc32 = 0  # of what went by since a reader set it to 0; ``members`` does so before each header

    def members(self) -> Iterator[tarfile.TarInfo]:
        """The members in sequence; what is left of one's data goes by before the next.

        pax headers, global ones too, and GNU's long names are taken up. Raises DataError for a tar that is damaged, cut
        short, or goes on behind its end.
        """
        last = "its beginning"
        archive = tarfile.TarFile(fileobj=io.BytesIO(bytes(tarfile.RECORDSIZE)))
        archive.fileobj, archive.offset = self, 0  # type: ignore[assignment]
        while True:
            self.crc32 = 0
            block = self.peek(tarfile.BLOCKSIZE)
            if len(block) < tarfile.BLOCKSIZE:
                raise DataError(f"{self._name}: stops behind {last}, without the zeros that end a tar; {_REPAIR}")
            if not any(block):
                break
            start, self._header_left = self.offset, _MOST_HEADER_BYTES
            try:
                member = tarfile.TarInfo.fromtarfile(archive)
            except DataError:
                raise
            except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
                reason = " ".join(str(error).split())
                raise DataError(
                    f"{self._name}: no header of a tar behind {last}, at byte {start} ({reason}); {_REPAIR}"
                ) from error
            held = archive.pax_headers
            if (
                not 0 <= member.size < 2**62
                or len(member.name) > _MOST_NAME_CHARACTERS
                or len(held) > _MOST_GLOBAL_HEADERS
            ):
                raise self._damaged_header(start)
            if sum(len(name) + len(value) for name, value in held.items()) > _MOST_HEADER_BYTES:
                raise self._damaged_header(start)
            last = f"member {shown(member.name)}"
            yield member
            self.pass_by(archive.offset - self.offset)
        begin = self.offset
        for rest in self._take(2**62):
            if self.offset - begin > _MOST_END_BYTES:
                raise DataError(
                    f"{self._name}: goes on behind {last} with more than {_MOST_END_BYTES:,} zeros; {_REPAIR}"
                )
            if bytes(rest).strip(b"\0"):
                raise DataError(
                    f"{self._name}: goes on behind {last} with no header of a member (damage, or tars laid end to "
                    f"end); {_REPAIR}"
                )

    def read(self, size: int) -> bytes:
        """The next bytes, fewer at the end; for headers."""
        begin = self.offset
        self._header_left -= size
        if self._header_left < 0:
            raise self._damaged_header(begin)
        content = b"".join(self._take(size))
        if _DIGITS.search(content):
            raise self._damaged_header(begin)
        return content

    def tell(self) -> int:
        """The offset, as ``tarfile`` asks for it."""
        return self.offset

    def peek(self, size: int) -> bytes:
        """The next bytes, fewer at the end; they stay to be read."""
        while len(self._held) < size:
            block = next(self._blocks, b"")
            if not block:
                break
            self._held = memoryview(bytes(self._held) + block)
        return bytes(self._held[:size])

    def pass_by(self, size: int) -> None:
        """Skips bytes. Raises DataError where there are fewer."""
        begin = self.offset
        for _ in self._take(size):
            pass
        if self.offset - begin < size:
            raise DataError(f"{self._name}: cut short at byte {self.offset}, in the midst of a member; {_REPAIR}")

    def _damaged_header(self, place: int) -> DataError:
        return DataError(
            f"{self._name}: the header of a member at byte {place} is damaged, or larger than {_MOST_HEADER_BYTES:,} "
            f"bytes; {_REPAIR}"
        )

    def close(self) -> None:
        """Closes the source."""
        self._blocks.close()

    def _take(self, size: int) -> Iterator[Any]:
        while size > 0:
            if not self._held:
                self._held = memoryview(next(self._blocks, b""))
                if not self._held:
                    return
            part, self._held = self._held[:size], self._held[size:]
            self.sha256.update(part)
            self.crc32 = zlib.crc32(part, self.crc32)
            self.offset += len(part)
            size -= len(part)
            yield part


def shown(name: str) -> str:
    """A member's name for messages: bytes that are no UTF-8 as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()
