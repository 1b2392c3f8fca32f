"""Pictures: each is one document, one sample and one context of height x width x 3 bytes.

The content is row by row, pixel by pixel, in a pixel red, green, blue. The model's position tables (row, column,
channel) count in this order. A sample's member is a binary PPM file. ``picture.py`` reads and writes files. It imports
Pillow, so it is only imported when it is used.
"""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.modality import (
    Content,
    FileContent,
    Modality,
    Option,
    Properties,
    both_cases,
    token_bytes,
    whole_number,
)
from longstride.data_pipelines.plain_files import open_plain

CHANNELS = 3  # red, green, blue
_DRAWN_CHANNELS = (1, CHANNELS)
_TILE_PIXELS = 96  # shortest longer side in a grid: smaller pictures are enlarged, each pixel to a square
_GRID_PIXELS = 2**26  # largest grid
_PAPER, _MASK = 255, 128  # grey levels between pictures, and after the end of a prompt


class Image(Modality):
    """Pictures of one size. The property ``resized`` is 1 if they were resized to it, 0 if all had it."""

    name = "image"
    extension = "ppm"
    suffixes = both_cases(".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
    asks = ("height", "width")
    build_options = (
        Option("--image-size", "HxW", "crop and resize pictures to this height and width (default: all must have one)"),
    )
    packing = False
    divisible = False
    has_palettes = True
    unit = "dimension"  # a byte is the value of one channel
    prompt_help = "pictures to complete"
    prompt_files = "+"
    keep_option = Option("--keep-rows", "R", "complete the first R rows of each --prompt-image (default: half)", int)
    output_suffix = ".png"
    one_output = True
    shown_as = "picture"
    words = "pictures"
    description = "pictures, channel by channel"
    examples = ("longstride sample . --count 16 --output samples.png",)

    def settle(self, path: Path, file: BinaryIO, requested: Properties) -> dict[str, int]:
        """Choose the requested size, else the first picture's. Raises DataError for one that is not possible."""
        from longstride.data_pipelines.modalities.picture import MAX_PIXELS, picture_size

        if requested:
            height, width = (requested.get(name, 0) for name in self.asks)
            if min(height, width) < 1 or height * width > MAX_PIXELS:
                rule = f"must both be set, each to at least 1, and together to at most {MAX_PIXELS:,} pixels"
                raise DataError(f"height={height}, width={width}: {rule}; such as 64 and 64")
        else:
            height, width = picture_size(path, file)
        return {"height": height, "width": width, "channels": CHANNELS, "resized": int(bool(requested))}

    def check_properties(self, properties: Properties) -> None:
        for name in (*self.asks, "channels", "resized"):
            if name not in properties:
                raise DataError(f"{name}: missing")
        if min(_shape(properties)) < 1 or properties["channels"] != CHANNELS:
            raise DataError(f"pictures of {_shape(properties)} (height, width, channels)")

    def document_bytes(self, properties: Properties) -> int:
        return math.prod(_shape(properties))

    def measure(self, path: Path, properties: Properties) -> int:
        """Return the common size. A header is only read if pictures are not resized."""
        if not properties["resized"]:
            from longstride.data_pipelines.modalities.picture import picture_size

            with open_plain(path) as file:
                _check_size(path, picture_size(path, file), properties)
        return self.document_bytes(properties)

    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """Decode the picture. Raises DataError for one that is damaged or does not fit the set."""
        from longstride.data_pipelines.modalities.picture import picture_pixels

        pixels = picture_pixels(path, file, _shape(properties)[:2] if properties["resized"] else None)
        _check_size(path, pixels.shape[:2], properties)
        return FileContent(BytesIO(pixels.tobytes()))

    def header(self, size: int, properties: Properties) -> bytes:
        return f"P6\n{properties['width']} {properties['height']}\n255\n".encode()

    def encode(self, tokens: np.ndarray, properties: Properties) -> bytes:
        """Encode tokens, (height x width x 3,) integers 0..255, as a PPM file."""
        content = token_bytes(tokens)
        if len(content) != self.document_bytes(properties):
            size = f"{_size_words(*_shape(properties)[:2])} in {CHANNELS} channels"
            raise DataError(f"{len(content)} tokens: a picture of {size} is {self.document_bytes(properties)}")
        return self.header(len(content), properties) + content

    def parse_build_option(self, option: Option, value: str) -> dict[str, int]:
        """Parse 32x16 as height 32 and width 16; a single number is both."""
        from longstride.data_pipelines.modalities.picture import MAX_PIXELS

        rows, cross, columns = value.partition("x")
        height, width = whole_number(rows), whole_number(columns if cross else rows)
        if height is None or width is None:
            rule = "must be height x width in pixels, or one number for both; such as 32x32"
        elif height * width > MAX_PIXELS:
            rule = f"must be at most {MAX_PIXELS:,} pixels in all, such as 64x64"
        else:
            return {"height": height, "width": width}
        raise DataError(f"--image-size={value}: {rule}")

    def model_properties(self, fields: Mapping[str, Any], context: int) -> dict[str, int]:
        """Select the size of pictures, which must match the context."""
        names = ("height", "width", "channels")
        if not all(type(fields.get(name)) is int and fields[name] > 0 for name in names):
            raise DataError("does not say how large its pictures are")
        properties = {name: fields[name] for name in names}
        height, width, channels = _shape(properties)
        size = f"says pictures of {height} x {width} x {channels}"
        if self.document_bytes(properties) != context:
            raise DataError(f"{size}, but the context is {context}")
        if channels not in _DRAWN_CHANNELS:
            raise DataError(f"{size}; pictures of {channels} channels cannot be drawn")
        return properties

    def open_sample(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """Decode a picture of exactly the model's size."""
        from longstride.data_pipelines.modalities.picture import picture_pixels

        height, width, channels = _shape(properties)
        if channels != CHANNELS:
            raise DataError(f"{path}: the model's pictures have one channel; take --prompt-file with their bytes")
        pixels = picture_pixels(path, file, None)
        if pixels.shape[:2] != (height, width):
            rule = f"is {_size_words(*pixels.shape[:2])}, but the model's pictures are {height}x{width}"
            raise DataError(f"{path}: {rule}; scale it, such as with `convert IN -resize {width}x{height}! OUT.png`")
        return FileContent(BytesIO(pixels.tobytes()))

    def read_prompt(self, content: Content, keep: Any, properties: Properties, context: int) -> bytes:
        """Read the upper rows, by default half of them."""
        height, width, channels = _shape(properties)
        rows = height // 2 if keep is None else int(keep)
        if not 0 <= rows < height:
            nearest = min(max(rows, 0), height - 1)
            rule = f"must be from 0 to {height - 1}, fewer than a picture has; nearest {nearest}"
            raise DataError(f"--keep-rows={rows}: {rule}")
        return content.read(0, rows * width * channels)

    def check_samples(self, count: int, num_prompts: int, properties: Properties) -> None:
        """Raise DataError if a grid of so many pictures is too large."""
        columns = count + 2 if num_prompts else square_columns(count)
        grid_size(num_prompts or -(-count // columns), columns, *_shape(properties)[:2])

    def sample_files(
        self, samples: np.ndarray, properties: Properties, prompted: Sequence[tuple[bytes, bytes]] = ()
    ) -> list[bytes]:
        """Write one PNG file. A completed file has a row: the original, its prompt above grey, the samples."""
        from longstride.data_pipelines.modalities.picture import png_file

        shape = _shape(properties)
        pictures = list(samples.reshape(-1, *shape))
        columns = len(pictures) // len(prompted) if prompted else square_columns(len(pictures))
        rows = [pictures[start : start + columns] for start in range(0, len(pictures), columns)]
        for row, contents in zip(rows, prompted, strict=False):
            padded = [content.ljust(math.prod(shape), bytes([_MASK])) for content in contents]
            row[:0] = [np.frombuffer(content, dtype=np.uint8).reshape(shape) for content in padded]
        return [png_file(grid(rows))]

    def shown(self, content: np.ndarray, properties: Properties) -> np.ndarray:
        return content.reshape(_shape(properties))


def square_columns(count: int) -> int:
    """Return the number of columns of the smallest square grid for so many pictures."""
    return math.ceil(math.sqrt(count))


def grid(rows: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Arrange rows of pictures, (height, width, channels) uint8 each, in one, (H, W, 3); each pixel becomes a square.

    Raises DataError like ``grid_size``.
    """
    height, width, _ = rows[0][0].shape
    scale, gap = _spacing(height, width)
    paper = np.full((*grid_size(len(rows), max(map(len, rows)), height, width), 3), _PAPER, dtype=np.uint8)
    for row, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            y, x = gap + row * (height * scale + gap), gap + column * (width * scale + gap)
            paper[y : y + height * scale, x : x + width * scale] = picture.repeat(scale, axis=0).repeat(scale, axis=1)
    return paper


def grid_size(rows: int, columns: int, height: int, width: int) -> tuple[int, int]:
    """Return the height and width in pixels of a grid of pictures. Raises DataError if it is too large for a file."""
    scale, gap = _spacing(height, width)
    size = (rows * (height * scale + gap) + gap, columns * (width * scale + gap) + gap)
    if math.prod(size) > _GRID_PIXELS:
        raise DataError(f"--count: a grid of {size[0]} x {size[1]} pixels is too large; take fewer samples")
    return size


def _spacing(height: int, width: int) -> tuple[int, int]:
    """Return the grid pixels per picture pixel, and the gap between pictures."""
    scale = max(1, _TILE_PIXELS // max(height, width))
    return scale, max(2, scale // 2)


def _shape(properties: Properties) -> tuple[int, int, int]:
    return properties["height"], properties["width"], properties["channels"]


def _check_size(path: Path, size: tuple[int, ...], properties: Properties) -> None:
    height, width, _ = _shape(properties)
    if size != (height, width):
        rule = f"is {_size_words(*size)} pixels, but the set's first picture is {_size_words(height, width)}"
        raise DataError(f"{path}: {rule}; scale all pictures to one size with --image-size {height}x{width}")


def _size_words(height: int, width: int) -> str:
    return f"{height}x{width} (height x width)"
