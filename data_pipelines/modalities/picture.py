"""Read picture files as 8-bit red, green and blue, and write them. Only this file imports Pillow.

Grey pictures get three equal channels. The upper 8 of 16 bits are used, and the first frame of an animation.
Transparent pictures are composed on white: a black drawing would vanish on black. The orientation in the metadata is
applied; colour profiles are not.

Pictures with damage that Pillow ignores are rejected, so that no wrong pixels are trained on. Pillow stops when all
rows are complete, ignores the checksums of a PNG's rows, and drops warnings of libjpeg. Damage that a format cannot
detect is listed in docs/data/images.md.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from longstride.data_pipelines.errors import DataError

MAX_PIXELS = 2**26  # before and after resizing: a few bytes of a file may claim any number
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM")  # some of Pillow's other formats start programs
_MOST_FILE_BYTES = 6 * MAX_PIXELS + 2**20  # 48 bits per pixel, and a header; some formats are read into memory
_MOST_METADATA_BYTES = 2**16  # of EXIF, as in a JPEG file: each entry may claim all of it again
# Pillow reads headers, and rows of some formats, in Python, part by part, a microsecond each.
_SLOW, _MOST_SLOW_PIXELS = ("ppm", "ppm_plain", "bmp_rle"), 2**22
_MOST_HEAD_READS, _MOST_READS = 2**16, 2**24
_ORIENTATION = 0x0112  # EXIF's number for it
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def picture_size(path: Path, file: BinaryIO) -> tuple[int, int]:
    """Return (height, width) of a picture after rotation, by its header alone. Raises DataError if damaged."""
    with _picture_errors(path):
        picture = _open_picture(file)
        turned = _orientation(picture) >= 5  # these swap rows and columns
        return (picture.width, picture.height) if turned else (picture.height, picture.width)


def picture_pixels(path: Path, file: BinaryIO, size: tuple[int, int] | None) -> np.ndarray:
    """Decode a picture to (height, width, 3) uint8; with a size, crop the middle and resize it.

    Raises DataError, naming ``path``, for a picture that is damaged or too large.
    """
    with _picture_errors(path):
        picture = _decode(file)
    if size is None:
        return np.asarray(picture)
    height, width = size
    rows, columns = picture.height, picture.width
    if columns * height > rows * width:
        columns = max(1, (2 * rows * width + height) // (2 * height))
    else:
        rows = max(1, (2 * columns * height + width) // (2 * width))
    x, y = (picture.width - columns) // 2, (picture.height - rows) // 2
    picture = picture.crop((x, y, x + columns, y + rows))
    if (rows, columns) != size:
        # A pixel becomes the mean of the pixels that it covers, or is interpolated by a smooth curve.
        is_smaller = height <= rows and width <= columns
        picture = picture.resize((width, height), Image.Resampling.BOX if is_smaller else Image.Resampling.BICUBIC)
    return np.asarray(picture)


@contextmanager
def _picture_errors(path: Path) -> Iterator[None]:
    """Turn Pillow's exceptions about a file into one line that names the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata does no harm, and sizes are checked here
            yield
    except DataError:
        raise
    except Image.DecompressionBombError:
        raise DataError(f"{path}: claims more than {MAX_PIXELS:,} pixels; shrink it first, or exclude it") from None
    except Exception as error:  # Pillow's decoders may raise anything for a damaged file
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the picture
        unknown = isinstance(error, UnidentifiedImageError)
        what = f"not one of {', '.join(_FORMATS)}" if unknown else " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read as a picture ({what}); repair, remove or exclude it") from error


def _open_picture(file: BinaryIO, most_reads: int = _MOST_READS) -> ImageFile.ImageFile:
    """Open a picture by its header, without decoding it."""
    size = file.seek(0, 2)
    if size > _MOST_FILE_BYTES:
        raise ValueError(f"has {size:,} bytes; at most {_MOST_FILE_BYTES:,} are allowed")
    counted = _CountedReads(file, _MOST_HEAD_READS)
    picture = Image.open(cast("BinaryIO", counted), formats=_FORMATS)
    if picture.width * picture.height > MAX_PIXELS:
        raise Image.DecompressionBombError
    if any(tile[0] in _SLOW for tile in picture.tile) and picture.width * picture.height > _MOST_SLOW_PIXELS:
        rule = "a PPM must be binary with values up to 255, and a BMP must be uncompressed"
        raise ValueError(f"of more than {_MOST_SLOW_PIXELS:,} pixels, {rule}")
    counted.remaining = most_reads
    return picture


class _CountedReads:
    """A file that limits Pillow's number of reads: it reads a comment of a PPM byte by byte."""

    def __init__(self, file: BinaryIO, remaining: int) -> None:
        self.remaining = remaining
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int = -1) -> bytes:
        """Read the next bytes. Raises ValueError after too many reads."""
        self.remaining -= 1
        if self.remaining < 0:
            raise ValueError("its head, or its rows, are in too many parts")
        return self._read(size)


def _orientation(picture: Image.Image) -> int:
    """Return the orientation from 1 to 8, as EXIF numbers them; 1 is upright."""
    for name in ("exif", "Raw profile type exif"):
        if len(picture.info.get(name, b"")) > 2 * _MOST_METADATA_BYTES:  # the second is hexadecimal
            raise ValueError(f"its EXIF has more than {_MOST_METADATA_BYTES:,} bytes")
    # The base class's method: PNG's own decodes the whole picture to look for metadata after it.
    orientation = Image.Image.getexif(picture).get(_ORIENTATION, 1)
    return orientation if orientation in _TURNS else 1


def _decode(file: BinaryIO) -> Image.Image:
    """Decode a picture to 8-bit red, green and blue, upright and on white."""
    opened = _open_picture(file)
    orientation = _orientation(opened)
    raw_mode = opened.tile[0][3] if opened.tile else None
    check_undamaged(file, opened)
    opened.load()
    picture: Image.Image = opened
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers")
    has_key = "transparency" in picture.info and picture.mode in ("1", "L", "I", "I;16", "RGB")
    transparent = _pop_key_colour(file, picture, raw_mode) if has_key else None
    if picture.mode.startswith("I"):  # 16-bit grey, which Pillow would clip to 255
        upper = np.asarray(picture) >> 8
        picture = Image.fromarray(np.clip(upper, 0, 255, out=upper).astype(np.uint8))
    elif picture.mode in ("LA", "PA", "RGBA") or "transparency" in picture.info:
        if picture.mode != "RGBA":
            picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    picture = picture.convert("RGB")
    if transparent is not None:
        picture.paste("white", mask=Image.fromarray(transparent))
    return picture.transpose(_TURNS[orientation]) if orientation in _TURNS else picture


def _pop_key_colour(file: BinaryIO, picture: Image.Image, raw_mode: object) -> np.ndarray:
    """Remove the transparent colour of a loaded PNG picture, and return where it occurs, (height, width) bool.

    The colour has the depth of the file's samples, ``raw_mode``; Pillow would compare it with 8-bit samples.
    """
    key = np.array(picture.info.pop("transparency"))
    if picture.mode.startswith("I"):
        return np.asarray(picture) == key
    if picture.mode != "RGB":
        largest = {"1": 1, "L;2": 3, "L;4": 15}.get(str(raw_mode), 255)
        return np.asarray(picture.convert("L")) == (key & largest) * (255 // largest)
    is_key = np.ones((picture.height, picture.width), bool)
    lower = picture
    if raw_mode == "RGB;16B":
        is_key = (np.asarray(picture) == key >> 8).all(axis=2)
        lower = _open_picture(file)
        lower.tile = [(*lower.tile[0][:3], "RGB;16L")]  # type: ignore[list-item]  # the other byte of each sample
        lower.load()
    return is_key & (np.asarray(lower) == key & 255).all(axis=2)


def png_file(pixels: np.ndarray) -> bytes:
    """Encode pixels, (height, width, 3) uint8, as a PNG file."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


# Damage.

_MOST_PNG_READS = 2**18  # two or three for each chunk; some programs write rows in chunks of 8 KiB
_MOST_CHUNKS = 2**17  # of a WebP file
_MOST_SCANNED_PIXELS = 2**32  # pixels times scans of a JPEG: a scan visits every block and takes only a few bytes
_MOST_COMMENTS = 1000  # of a plain-text PPM file: Pillow copies a block for each
_TRIMMED_BYTES = 8  # cut from a WebP picture; encoders may pad its last word


def check_undamaged(file: BinaryIO, picture: ImageFile.ImageFile) -> None:
    """Check a picture file, and restore its position; ``picture`` is the opened file, not decoded yet.

    Raises:
        ValueError, OSError, SyntaxError: the file is damaged or cut short.
    """
    place = file.seek(0, 1)
    if picture.format == "PNG":
        file.seek(0)
        _open_picture(file, _MOST_PNG_READS).verify()  # the checksum of every chunk, up to the one that ends the file
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
            raise ValueError(f"it is damaged or cut short: its chunk {name!r} extends beyond the end of the file")
        if name in (b"VP8 ", b"VP8L") and size > _TRIMMED_BYTES:
            trimmed = content[start : start + size - _TRIMMED_BYTES]
            padded = name + len(trimmed).to_bytes(4, "little") + trimmed + bytes(len(trimmed) % 2)
            riff = b"RIFF" + (4 + len(padded)).to_bytes(4, "little") + b"WEBP" + padded
            try:
                Image.open(BytesIO(riff), formats=("WEBP",)).load()
            except (OSError, ValueError):
                continue
            raise ValueError("it is damaged: it has more data than its rows can hold")
    raise ValueError(f"it has more than {_MOST_CHUNKS:,} chunks")
