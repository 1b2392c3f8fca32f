"""File formats by their first bytes, and decompression.

The bytes of any file can be trained on, so nothing downstream would notice that a text is an archive. Files are
therefore checked here before they are read as text. The standard library reads gzip, bzip2 and xz; zstandard is
imported only for files that need it.
"""

import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.plain_files import blocks_of

TAR = "a tar archive"
PARQUET = "a Parquet file"  # the one format that a build can read without being compressed
HEAD_BYTES = 512  # identify the format: the magic number of a tar is at byte 257
_BLOCK_BYTES = 2**18  # decompressed at once, by a library that can limit them
_INPUT_BYTES = 2**11  # they may expand to 64 MiB, which zstandard returns in one piece
_WINDOW_BYTES = 2**29  # largest window of a decoder, as written by `zstd --long=29` and `xz -9`
_GZIP_WINDOW = 16 + zlib.MAX_WBITS  # zlib's number for streams of gzip
# A few bytes can expand to any number. No text that is worth training on is compressed so well.
_MOST_RATIO, _FREE_BYTES = 200, 2**30


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A kind of file that is not text."""

    name: str  # for messages, such as "a PDF file"
    pattern: re.Pattern[bytes]  # matches the first bytes
    begin: Callable[[], Any] | None = None  # returns a decompressor of one stream, if a build reads it
    program: str = ""  # the command that unpacks it
    modality: str = ""  # the modality that reads it, if any


def file_format(head: bytes) -> FileFormat | None:
    """Identify a file by its first ``HEAD_BYTES`` bytes, or by all of a shorter one. None: it may be text.

    Only marks that cannot begin a text are listed: nearly all have control characters or bytes that are not UTF-8.
    """
    return next((kind for kind in _FORMATS if kind.pattern.match(head)), None) if _ANY.match(head) else None


def decompress(path: Path | str, blocks: Iterable[bytes], kind: FileFormat) -> Generator[bytes, None, None]:
    """Decompress the blocks of a file, and yield blocks. Concatenated streams, padded with zeros, are read as one.

    ``path`` is for messages. Raises DataError for a file that is damaged or cut short, for more than a GiB that is
    also more than 200 times the compressed size, and for a missing library.
    """
    assert kind.begin is not None
    try:
        stream = kind.begin()
    except ImportError as error:
        module = error.name or "a module"
        missing = f"pip install {module}" if module == "zstandard" else f"take a Python that has {module}"
        raise DataError(
            f"{path}: is {kind.name}, and {module}, which reads such files, cannot be imported ({error}); {missing}, "
            f"or unpack the file first, such as with `{kind.program} FILE`"
        ) from error
    limit = () if kind.program == "zstd -d" else (_BLOCK_BYTES,)  # zstandard has none
    packed_bytes = size = 0
    inputs = (block[place : place + _INPUT_BYTES] for block in blocks for place in range(0, len(block), _INPUT_BYTES))
    # A library's own class of files may silently stop at a damaged later stream, or at the end of a file cut short.
    with as_data_error(path, damage=(Exception,), damaged=f"is {kind.name}, and damaged or cut short"):
        for packed in inputs:
            packed_bytes += len(packed)
            while packed or not getattr(stream, "needs_input", True):
                if stream is None:
                    packed = packed.lstrip(b"\0")
                    stream = kind.begin() if packed else None
                    continue
                block = stream.decompress(packed, *limit)
                size += len(block)
                if size > _FREE_BYTES + _MOST_RATIO * packed_bytes:
                    raise DataError(
                        f"{path}: is {kind.name}, and unpacks to more than {_MOST_RATIO} times its size; unpack it "
                        f"first, such as with `{kind.program} FILE`, if there is room"
                    )
                for place in range(0, len(block), _BLOCK_BYTES):
                    yield block[place : place + _BLOCK_BYTES]
                packed = stream.unused_data if stream.eof else getattr(stream, "unconsumed_tail", b"")  # zlib's
                stream = None if stream.eof else stream
        if stream is not None:
            raise EOFError("it ends within a stream")


class StreamContent:
    """Content that can only be decoded from its beginning: ``begin`` yields it in blocks. Going back starts again."""

    def __init__(self, begin: Callable[[], Iterator[bytes]]) -> None:
        self._begin = begin
        self.position, self._block = 0, memoryview(b"")  # offset of the next byte, and the block from there on
        self._blocks = begin()

    def read(self, offset: int, size: int) -> bytes:
        """Return content bytes ``[offset, offset + size)``, fewer at the end. Raises the errors of ``begin``."""
        if offset < self.position:
            self.position, self._block, self._blocks = 0, memoryview(b""), self._begin()
        end, pieces = offset + size, []
        while self.position < end:
            if not self._block:
                self._block = memoryview(next(self._blocks, b""))
                if not self._block:
                    break
            taken = min(end - self.position, len(self._block))
            pieces.append(self._block[max(offset - self.position, 0) : taken])
            self.position += taken
            self._block = self._block[taken:]
        return b"".join(pieces)


def decompressed_content(path: Path | str, file: BinaryIO, kind: FileFormat) -> StreamContent:
    """Return the content of a compressed file, which must stay open. Reading raises DataError like ``decompress``."""

    def begin() -> Iterator[bytes]:
        file.seek(0)
        return decompress(path, blocks_of(file), kind)

    return StreamContent(begin)


def _bzip2() -> Any:
    import bz2

    return bz2.BZ2Decompressor()


def _xz() -> Any:
    import lzma

    return lzma.LZMADecompressor(lzma.FORMAT_XZ, 2 * _WINDOW_BYTES)


def _zstd() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()


def _mark(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)


GZIP = FileFormat("compressed by gzip", _mark(rb"\x1f\x8b\x08"), partial(zlib.decompressobj, _GZIP_WINDOW), "gunzip")
_FORMATS = (
    GZIP,
    FileFormat("compressed by zstd", _mark(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), _zstd, "zstd -d"),
    FileFormat("compressed by bzip2", _mark(rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)"), _bzip2, "bunzip2"),
    FileFormat("compressed by xz", _mark(rb"\xfd7zXZ\0"), _xz, "unxz"),
    FileFormat("compressed by lz4", _mark(rb"\x04\x22\x4d\x18"), program="unlz4"),
    FileFormat("compressed by lzip", _mark(rb"LZIP\x01"), program="lzip -d"),
    FileFormat("compressed by compress", _mark(rb"\x1f\x9d"), program="uncompress"),
    FileFormat("a zip archive", _mark(rb"PK(\x03\x04|\x05\x06|\x07\x08)"), program="unzip"),
    FileFormat("a 7z archive", _mark(rb"7z\xbc\xaf\x27\x1c"), program="7z x"),
    FileFormat("a RAR archive", _mark(rb"Rar!\x1a\x07"), program="unrar x"),
    FileFormat(TAR, _mark(rb".{257}ustar(\x0000|  \0)"), program="tar xf"),
    FileFormat(PARQUET, _mark(rb"PAR1[\0-\x08\x0e-\x1f]")),
    FileFormat("an Arrow file", _mark(rb"ARROW1\0")),
    FileFormat("an Avro file", _mark(rb"Obj\x01")),
    FileFormat("an HDF5 file", _mark(rb"\x89HDF\r\n\x1a\n")),
    FileFormat("an SQLite database", _mark(rb"SQLite format 3\0")),
    FileFormat("a numpy array", _mark(rb"\x93NUMPY[\x01-\x03]\0")),
    FileFormat("a pickle", _mark(rb"\x80[\x02-\x05][\x95c\x8a}\]]")),
    FileFormat("a PDF file", _mark(rb"%PDF-\d\.\d[ \t]*[\r\n]+(%[\x80-\xff]{2}|\d+ \d+ obj)")),
    FileFormat("an old Office file", _mark(rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")),
    FileFormat("a PNG picture", _mark(rb"\x89PNG\r\n\x1a\n"), modality="image"),
    FileFormat("a JPEG picture", _mark(rb"\xff\xd8\xff"), modality="image"),
    FileFormat("a GIF picture", _mark(rb"GIF8[79]a.{0,6}[\0-\x08]")),
    FileFormat("a WebP picture", _mark(rb"RIFF.{4}WEBPVP8.{1,4}\0"), modality="image"),
    FileFormat("a WAV sound", _mark(rb"RIFF.{4}WAVE.{4,7}\0"), modality="audio"),
    FileFormat("a FLAC sound", _mark(rb"fLaC[\0\x80]"), modality="audio"),
    FileFormat("an Ogg file", _mark(rb"OggS\0"), modality="audio"),
    FileFormat("an MP3 sound", _mark(rb"ID3[\x02-\x04]\0"), modality="audio"),
    FileFormat("an MP4 file", _mark(rb"\0{2}..ftyp")),
    FileFormat("a Matroska file", _mark(rb"\x1a\x45\xdf\xa3")),
    FileFormat("a program (ELF)", _mark(rb"\x7fELF")),
    FileFormat("a program (PE)", _mark(rb"MZ.\0.\0")),
    FileFormat("a program (Mach-O)", _mark(rb"[\xce\xcf]\xfa\xed\xfe|\xca\xfe\xba\xbe")),
    FileFormat("WebAssembly", _mark(rb"\0asm\x01\0")),
    FileFormat("a GGUF model", _mark(rb"GGUF[\x01-\x09]\0")),
)
_ANY = _mark(b"|".join(kind.pattern.pattern for kind in _FORMATS))  # one match suffices for most files
