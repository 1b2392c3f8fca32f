"""Reject pictures with damage that Pillow ignores, so that no wrong pixels are trained on.

Pillow stops when all rows are complete, ignores the checksums of a PNG's rows, and drops warnings of libjpeg. Damage
that a format cannot detect is listed in docs/data/images.md.
"""

import zlib
from io import BytesIO
from typing import BinaryIO

from PIL import Image, ImageFile

_MOST_CHUNKS = 2**17  # of a PNG or WebP file; some programs write a PNG's rows in chunks of 4 KiB
_MOST_SCANNED_PIXELS = 2**32  # pixels times scans of a JPEG: a scan visits every block and takes only a few bytes
_MOST_COMMENTS = 1000  # of a plain-text PPM file: Pillow copies a block for each
_BLOCK_BYTES = 2**20
_TRIMMED_BYTES = 8  # cut from a WebP picture; encoders may pad its last word


def check_undamaged(file: BinaryIO, picture: ImageFile.ImageFile) -> None:
    """Check a picture file, and restore its position; ``picture`` is the opened file, not decoded yet.

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
    """Verify the checksum of every chunk, up to the one that ends the file."""
    for _ in range(_MOST_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            raise ValueError("it is cut short: no IEND chunk ends it")
        remaining, name = int.from_bytes(head[:4], "big"), head[4:]
        checksum = zlib.crc32(name)
        while remaining and (block := file.read(min(remaining, _BLOCK_BYTES))):
            checksum = zlib.crc32(block, checksum)
            remaining -= len(block)
        if remaining or file.read(4) != checksum.to_bytes(4, "big"):
            raise ValueError(f"it is damaged or cut short: the check sum of its chunk {name!r} is another")
        if name == b"IEND":
            return
    raise ValueError(f"it has more than {_MOST_CHUNKS:,} chunks")


def _check_jpeg(content: bytes, picture: ImageFile.ImageFile) -> None:
    """Raise ValueError for a warning of libjpeg. It reads the full file even to decode an eighth of the size."""
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
    except ValueError:  # the library does not support this kind of JPEG: unknown
        return
    raise ValueError(f"it is damaged: {warning}")


def _check_webp(content: bytes) -> None:
    """Check the sizes of chunks, and that the picture needs its last bytes.

    After damage a decoder ends early or late; libwebp only detects the latter.
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
