"""Refuse pictures whose damage Pillow reads over, so that other pixels than the file's would be trained on.

Pillow stops when the rows are full, holds no check sum of a PNG's rows, and drops what libjpeg warns of. What a format
itself cannot tell is listed in docs/data/images.md.
"""

import zlib
from io import BytesIO
from typing import BinaryIO

from PIL import Image, ImageFile

_MOST_CHUNKS = 2**17  # of a PNG or WebP file; some programs write a PNG's rows in chunks of 4 KiB
_MOST_SCANNED_PIXELS = 2**32  # of a JPEG file: pixels times scans. A few bytes are a scan, which visits every block
_MOST_COMMENTS = 1000  # of a PPM file in letters: Pillow copies a block of it for each
_BLOCK_BYTES = 2**20
_TRIMMED_BYTES = 8  # of a WebP picture: encoders may fill up a word at its end


def check_undamaged(file: BinaryIO, picture: ImageFile.ImageFile) -> None:
    """Read a picture file once, and leave it where it was; ``picture`` is the file opened, and not decoded yet.

    Raises:
        ValueError: the file is damaged or cut short.
    """
    place = file.seek(0, 1)
    if picture.format == "PNG":
        file.seek(8)
        _check_png(file)
    elif picture.format in ("JPEG", "MPO"):
        file.seek(0)
        _check_jpeg(file.read(), picture)
    elif picture.format == "WEBP":
        file.seek(0)
        _check_webp(file.read())
    elif any(tile[0] == "ppm_plain" for tile in picture.tile):
        file.seek(0)
        if file.read().count(b"#") > _MOST_COMMENTS:
            raise ValueError(f"it has more than {_MOST_COMMENTS:,} comments")
    file.seek(place)


def _check_png(file: BinaryIO) -> None:
    """Check the check sum of every chunk, up to the one that ends the file."""
    for _ in range(_MOST_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            raise ValueError("it is cut short: no IEND chunk ends it")
        left, name = int.from_bytes(head[:4], "big"), head[4:]
        checksum = zlib.crc32(name)
        while left and (block := file.read(min(left, _BLOCK_BYTES))):
            checksum = zlib.crc32(block, checksum)
            left -= len(block)
        if left or file.read(4) != checksum.to_bytes(4, "big"):
            raise ValueError(f"it is damaged or cut short: the check sum of its chunk {name!r} is another")
        if name == b"IEND":
            return
    raise ValueError(f"it has more than {_MOST_CHUNKS:,} chunks")


def _check_jpeg(content: bytes, picture: ImageFile.ImageFile) -> None:
    """Refuse what libjpeg warns of. An eighth of the size is enough, as all of the file is decoded for it."""
    import simplejpeg

    if content.count(b"\xff\xda") * picture.width * picture.height > _MOST_SCANNED_PIXELS:
        raise ValueError(f"its scans have more than {_MOST_SCANNED_PIXELS:,} pixels")
    size = {"min_height": 1, "min_width": 1, "min_factor": 8}
    colours = "CMYK" if picture.mode == "CMYK" else "GRAY"
    try:
        simplejpeg.decode_jpeg(content, colours, strict=True, **size)
        return
    except ValueError as error:
        warning = str(error)
    try:
        simplejpeg.decode_jpeg(content, colours, strict=False, **size)
    except ValueError:  # a kind of JPEG that this library does not know: it says nothing of damage
        return
    raise ValueError(f"it is damaged: {warning}")


def _check_webp(content: bytes) -> None:
    """Check sizes of chunks, and that the picture needs its last bytes.

    A decoder that lost its way ends early or late. libwebp sees only the latter.
    """
    end = 8 + int.from_bytes(content[4:8], "little")
    place = 12
    for _ in range(_MOST_CHUNKS):
        if place >= end:
            return
        name, size = content[place : place + 4], int.from_bytes(content[place + 4 : place + 8], "little")
        start, place = place + 8, place + 8 + size + size % 2
        if start + size > min(end, len(content)):
            raise ValueError(f"it is damaged or cut short: its chunk {name!r} ends behind the file")
        if name in (b"VP8 ", b"VP8L") and size > _TRIMMED_BYTES:
            trimmed = content[start : start + size - _TRIMMED_BYTES]
            padded = name + len(trimmed).to_bytes(4, "little") + trimmed + bytes(len(trimmed) % 2)
            riff = b"RIFF" + (4 + len(padded)).to_bytes(4, "little") + b"WEBP" + padded
            try:
                Image.open(BytesIO(riff), formats=("WEBP",)).load()
            except (OSError, ValueError):
                continue
            raise ValueError("it is damaged: its rows are full before its data end")
    raise ValueError(f"it has more than {_MOST_CHUNKS:,} chunks")
