"""A picture file to 8-bit red, green and blue, and back. Only this file and ``damage.py`` import Pillow.

Grey pictures get three equal channels. Of 16 bits the upper 8 are taken, of an animation the first frame. Transparent
pictures are laid on white: a drawing in black on nothing would vanish on black. An orientation in the metadata is
applied, colour profiles are not.
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
from longstride.data_pipelines.modalities.damage import check_undamaged

MAX_PIXELS = 2**26  # of a file, or of what is made of it: a few bytes of a file may claim any number
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM")  # Pillow knows more, some of which start other programs
_MOST_FILE_BYTES = 6 * MAX_PIXELS + 2**20  # of which some formats are read whole: 48 bits a pixel, and a header
_MOST_METADATA_BYTES = 2**16  # of EXIF, as a JPEG file's: each entry may claim all of it again
# Pillow reads heads, and some formats' rows, in Python: part by part, a microsecond each.
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
    """(height, width) of a picture as it will be read, by its header alone. Raises DataError for a damaged one."""
    with _reading(path):
        picture = _opened(file)
        turned = _orientation(picture) >= 5  # these change rows and columns
        return (picture.width, picture.height) if turned else (picture.height, picture.width)


def picture_pixels(path: Path, file: BinaryIO, size: tuple[int, int] | None) -> np.ndarray:
    """(height, width, 3) uint8 of a picture open as ``file``; with a size, its middle cropped and resized to that.

    Raises DataError, naming ``path``, for one that is damaged or too large.
    """
    with _reading(path):
        picture = _upright(file)
    return np.asarray(picture if size is None else _fitted(picture, *size))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what Pillow raises about a file into one line that names the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata does no harm, and sizes are checked here
            yield
    except DataError:
        raise
    except Image.DecompressionBombError:
        raise DataError(f"{path}: claims more than {MAX_PIXELS:,} pixels; shrink it first, or exclude it") from None
    except Exception as error:  # Pillow's decoders raise what they like on a damaged file
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's fault, not the picture's
        unknown = isinstance(error, UnidentifiedImageError)
        what = f"not one of {', '.join(_FORMATS)}" if unknown else " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read as a picture ({what}); repair, remove or exclude it") from error


def _opened(file: BinaryIO) -> ImageFile.ImageFile:
    """The picture by its header, not decoded yet."""
    size = file.seek(0, 2)
    if size > _MOST_FILE_BYTES:
        raise ValueError(f"has {size:,} bytes, where {_MOST_FILE_BYTES:,} are the most")
    counted = _CountedReads(file, _MOST_HEAD_READS)
    picture = Image.open(cast("BinaryIO", counted), formats=_FORMATS)
    if picture.width * picture.height > MAX_PIXELS:
        raise Image.DecompressionBombError
    if any(tile[0] in _SLOW for tile in picture.tile) and picture.width * picture.height > _MOST_SLOW_PIXELS:
        raise ValueError(
            f"of more than {_MOST_SLOW_PIXELS:,} pixels, a PPM must be binary and have values up to 255, and a BMP not "
            "be compressed"
        )
    counted.left = _MOST_READS
    return picture


class _CountedReads:
    """A file that Pillow may read in so many parts: a comment of a PPM is read a byte at a time."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        self.left = left
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int = -1) -> bytes:
        """The next bytes, fewer at the end. Raises ValueError where it was called too often."""
        self.left -= 1
        if self.left < 0:
            raise ValueError("its head, or its rows, are in too many parts")
        return self._read(size)


def _orientation(picture: Image.Image) -> int:
    """1 to 8, as EXIF numbers them; 1 is upright."""
    for name in ("exif", "Raw profile type exif"):
        if len(picture.info.get(name, b"")) > 2 * _MOST_METADATA_BYTES:  # the second in two digits a byte
            raise ValueError(f"its EXIF has more than {_MOST_METADATA_BYTES:,} bytes")
    # The base class's method: PNG's own decodes the whole picture to look for metadata after it.
    orientation = Image.Image.getexif(picture).get(_ORIENTATION, 1)
    return orientation if orientation in _TURNS else 1


def _upright(file: BinaryIO) -> Image.Image:
    """The picture in 8-bit red, green and blue, as a person would see it."""
    opened = _opened(file)
    orientation = _orientation(opened)
    raw_mode = opened.tile[0][3] if opened.tile else None
    check_undamaged(file, opened)
    opened.load()
    picture: Image.Image = opened
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers")
    has_key = "transparency" in picture.info and picture.mode in ("1", "L", "I", "I;16", "RGB")
    transparent = _has_key_colour(file, picture, raw_mode) if has_key else None
    if picture.mode.startswith("I"):  # grey of 16 bits, which Pillow would clip to 255
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


def _has_key_colour(file: BinaryIO, picture: Image.Image, raw_mode: object) -> np.ndarray:
    """(height, width) bool: where a loaded PNG picture has the one colour that it calls transparent. Removes the key.

    The key has the depth of the file's samples, ``raw_mode``. Pillow compares it with samples of 8 bits.
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
        lower = _opened(file)
        lower.tile = [(*lower.tile[0][:3], "RGB;16L")]  # type: ignore[list-item]  # the other byte of each sample
        lower.load()
    return is_key & (np.asarray(lower) == key & 255).all(axis=2)


def _fitted(picture: Image.Image, height: int, width: int) -> Image.Image:
    """The middle of a picture, cropped to the shape of (height, width) and resized to it."""
    rows, columns = picture.height, picture.width
    if columns * height > rows * width:
        columns = max(1, (2 * rows * width + height) // (2 * height))
    else:
        rows = max(1, (2 * columns * height + width) // (2 * width))
    left, top = (picture.width - columns) // 2, (picture.height - rows) // 2
    picture = picture.crop((left, top, left + columns, top + rows))
    if (rows, columns) == (height, width):
        return picture
    # Shrunk, a pixel is the mean of those that it covers; enlarged, it lies on a smooth curve between them.
    smaller = height <= rows and width <= columns
    return picture.resize((width, height), Image.Resampling.BOX if smaller else Image.Resampling.BICUBIC)


def png_file(pixels: np.ndarray) -> bytes:
    """(height, width, 3) uint8 -> a PNG file that holds them without loss."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()
