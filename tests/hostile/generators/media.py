"""Pictures and sounds that state what is not there, or what nobody could hold."""

import io
import struct
import zlib
from collections.abc import Callable

from PIL import Image


def png_chunk(kind: bytes, content: bytes, size: int | None = None) -> bytes:
    """Build a chunk of a PNG file, with its checksum; ``size`` is the size that it states."""
    size = len(content) if size is None else size
    return struct.pack(">I", size) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(
    width: int, height: int, *between: bytes, rows: bytes = b"", depth: int = 8, kind: int = 2, interlaced: bool = False
) -> bytes:
    """Build a PNG file of the stated size with such chunks and such rows, compressed."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlaced))
    data = png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(between) + data + png_chunk(b"IEND", b"")


def _exif(entries: int, size: int) -> bytes:
    """Build metadata of so many entries, each of which claims all bytes after them."""
    listed = b"".join(struct.pack("<HHII", tag, 7, size, 8) for tag in range(entries))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", entries) + listed + bytes(4 + size)


def _saved(form: str, size: tuple[int, int] = (4, 4)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, form)
    return file.getvalue()


_ROWS = b"\0" + bytes(12)
_ZEROS = zlib.compress(bytes(2**26))
PICTURES: dict[str, Callable[[], bytes]] = {
    "PNG of 2**31 by 2**31": lambda: png(2**31 - 1, 2**31 - 1),
    "PNG of 0 by 0": lambda: png(0, 0),
    "PNG of 8192 by 8193": lambda: png(8192, 8193),
    "PNG of 8192 by 8192 without rows": lambda: png(8192, 8192),
    "PNG with 64 MiB in a text": lambda: png(4, 4, png_chunk(b"zTXt", b"name\0\0" + _ZEROS), rows=_ROWS * 4),
    "PNG with 10,000 texts": lambda: png(4, 4, *([png_chunk(b"tEXt", b"n\0" + b"x" * 9000)] * 10_000), rows=_ROWS * 4),
    "PNG with 64 MiB of colours": lambda: png(4, 4, png_chunk(b"iCCP", b"n\0\0" + _ZEROS), rows=_ROWS * 3),
    "PNG with 4 GB in a chunk": lambda: png(4, 4, png_chunk(b"tEXt", b"n\0x", 2**32 - 1), rows=_ROWS * 4),
    "PNG whose metadata claims itself": lambda: png(4, 4, png_chunk(b"eXIf", _exif(9000, 2**20)), rows=_ROWS * 4),
    "PNG cut short": lambda: png(4, 4, rows=_ROWS * 4)[:44],
    "PNG of other rows": lambda: png(4, 4, rows=b"\x09" * 52),
    "PNG of no kind": lambda: png(4, 4, kind=5, rows=_ROWS * 4),
    "PNG of a depth of 3": lambda: png(4, 4, depth=3, rows=_ROWS * 4),
    "GIF of 10**6 frames": lambda: b"GIF89a\x04\0\x04\0\0\0\0" + b",\0\0\0\0\x04\0\x04\0\0\x02\x01\0\0" * 10**6 + b";",
    "BMP of 2**31 by 2**31": lambda: b"BM" + bytes(8) + struct.pack("<IIiiHH", 54, 40, 2**31 - 1, 2**31 - 1, 1, 24),
    "BMP of -2**31 rows": lambda: b"BM" + bytes(8) + struct.pack("<IIiiHHI", 54, 40, 4, -(2**31), 1, 24, 0) + bytes(20),
    "BMP whose header has 4 GB": lambda: b"BM" + bytes(8) + struct.pack("<II", 54, 2**32 - 1) + bytes(99),
    "PPM of 5,000 digits": lambda: b"P6 " + b"9" * 5000 + b" 4 255\n",
    "PPM of a comment": lambda: b"P6 #" + b"x" * 10_000_000,
    "PPM below zero": lambda: b"P6 -4 4 255\n" + bytes(48),
    "PPM of odd values": lambda: b"P6 8192 8192 100\n" + bytes(99),
    "PPM in letters": lambda: b"P3 8192 8192 255\n" + b"1 " * 99,
    "PPM cut short": lambda: b"P6 4 4 255\n" + bytes(40),
    "JPEG cut short": lambda: _saved("JPEG")[:200],
    "JPEG of 65,535 by 65,535": lambda: _saved("JPEG").replace(b"\x00\x04\x00\x04\x03", b"\xff\xff\xff\xff\x03", 1),
    "WebP cut short": lambda: _saved("WEBP")[:30],
    "WebP of 4 GB": lambda: b"RIFF\xff\xff\xff\xffWEBPVP8X" + bytes(99),
    "a text": lambda: b"no picture at all\n",
    "an eps program": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n",
}


def wav(
    tag: int = 1,
    channels: int = 1,
    rate: int = 8000,
    bits: int = 8,
    frame: int | None = None,
    data: bytes = b"\x80" * 100,
    size: int | None = None,
    before: bytes = b"",
) -> bytes:
    """Build a WAV file with the stated fields."""
    frame = channels * bits // 8 if frame is None else frame
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, tag, channels, rate, rate * frame % 2**32, frame, bits)
    size = len(data) if size is None else size
    return b"RIFF" + struct.pack("<I", 36) + b"WAVE" + before + form + struct.pack("<4sI", b"data", size) + data


SOUNDS: dict[str, Callable[[], bytes]] = {
    "WAV of 4 GB": lambda: wav(size=2**32 - 1),
    "WAV of a byte more": lambda: wav(size=101),
    "WAV of no channel": lambda: wav(channels=0),
    "WAV of a rate of 0": lambda: wav(rate=0),
    "WAV of a rate of 2**32 - 1": lambda: wav(rate=2**32 - 1),
    "WAV of floats that are no numbers": lambda: wav(tag=3, bits=32, data=b"\xff" * 100),
    "WAV of 7 bits": lambda: wav(bits=7),
    "WAV of 65,535 bits": lambda: wav(bits=65535, frame=8191),
    "WAV of frames of other sizes": lambda: wav(frame=3),
    "WAV of half frames": lambda: wav(channels=2, data=b"\x80" * 99),
    "WAV extensible of nothing": lambda: wav(tag=0xFFFE, bits=24),
    "WAV of an unknown kind": lambda: wav(tag=0x55),
    "WAV of a million chunks": lambda: wav(before=b"junk\0\0\0\0" * 10**6),
    "WAV of a chunk of 4 GB": lambda: wav(before=b"junk\xff\xff\xff\xff"),
    "WAV of sound alone": lambda: b"RIFF\0\0\0\0WAVEdata\x04\0\0\0\x80\x80\x80\x80",
    "WAV without sound": lambda: wav()[:36],
    "FLAC of a head": lambda: b"fLaC\x80\0\0\x22" + bytes(34),
    "Ogg of a head": lambda: b"OggS" + bytes(24),
    "MP3 of tags": lambda: b"ID3\x04\0\0\0\0\0\0" * 200_000,
    "a text": lambda: b"no sound at all\n",
    "WAV of no bytes": lambda: wav(size=0),
    "WAV before a million chunks": lambda: wav() + b"junk\0\0\0\0" * 10**6,
    "WAV before a chunk of 4 GB": lambda: wav() + b"junk\xff\xff\xff\xff",
    "WAV of ADPCM without blocks": lambda: wav(tag=2, bits=4, frame=0),
    "WAV of ADPCM of 65,535 channels": lambda: wav(tag=0x11, channels=65_535, bits=4, frame=100),
    "AIFF of 4 GB": lambda: b"FORM\xff\xff\xff\xffAIFFSSND\xff\xff\xff\xff" + bytes(99),
    "Wave64 of nothing": lambda: b"riff.\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\0\0" + bytes(10**6),
    "AU of 4 GB": lambda: b".snd" + b"\xff\xff\xff\xf0" * 2 + bytes(99),
}
