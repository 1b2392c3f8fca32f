"""Pictures: one is one document, one sample and one context of height x width x 3 bytes.

Its content is row after row, in a row pixel after pixel, in a pixel red, green, blue: the order in which the model's
position tables (row, column, channel) count. A sample's member is a binary PPM file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.modality import Content, Properties, both_cases, token_bytes

CHANNELS = 3  # red, green, blue
MAX_PIXELS = 2**26  # of a file or of what is made of it: a few bytes of file may claim any number


@dataclass(frozen=True, slots=True)
class _Pixels:
    content: bytes

    def read(self, offset: int, size: int) -> bytes:
        return self.content[offset : offset + size]


class Image:
    """Pictures of one size. The property ``resized`` is 1 where they were brought to it, 0 where all had it."""

    name = "image"
    extension = "ppm"
    suffixes = both_cases(".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
    asks: tuple[str, ...] = ("height", "width")
    packing = False
    divisible = False

    def settle(self, path: Path, file: BinaryIO, asked: Properties) -> dict[str, int]:
        """The size that is asked for, else the first picture's. Raises DataError for one that cannot be."""
        if asked:
            height, width = (asked.get(name, 0) for name in self.asks)
            if min(height, width) < 1 or height * width > MAX_PIXELS:
                raise DataError(
                    f"height={height}, width={width}: must both be asked for, each at least 1 and together at most "
                    f"{MAX_PIXELS:,} pixels; such as 64 and 64"
                )
        else:
            height, width = _size(path, file)
        return {"height": height, "width": width, "channels": CHANNELS, "resized": int(bool(asked))}

    def document_bytes(self, properties: Properties) -> int:
        """Of every picture, as all have one size."""
        return properties["height"] * properties["width"] * properties["channels"]

    def measure(self, path: Path, properties: Properties) -> int:
        """The same for every picture; none is opened where all are resized, else its header is read."""
        if not properties["resized"]:
            with path.open("rb") as file:
                _check_size(path, _size(path, file), properties)
        return self.document_bytes(properties)

    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """The picture's pixels. Raises DataError for one that is damaged or does not fit the set."""
        from longstride.data_pipelines.modalities.picture import picture_pixels

        wanted = properties["height"], properties["width"]
        pixels = picture_pixels(path, file, wanted if properties["resized"] else None)
        _check_size(path, pixels.shape[:2], properties)
        return _Pixels(pixels.tobytes())

    def header(self, size: int, properties: Properties) -> bytes:
        """Of a binary PPM file."""
        return f"P6\n{properties['width']} {properties['height']}\n255\n".encode()

    def encode(self, tokens: np.ndarray, properties: Properties) -> bytes:
        """(height x width x 3,) integers 0..255 -> a PPM file."""
        content = token_bytes(tokens)
        if len(content) != self.document_bytes(properties):
            raise DataError(
                f"{len(content)} tokens: a picture of {_words(properties['height'], properties['width'])} in "
                f"{CHANNELS} channels is {self.document_bytes(properties)}"
            )
        return self.header(len(content), properties) + content


def _size(path: Path, file: BinaryIO) -> tuple[int, int]:
    from longstride.data_pipelines.modalities.picture import (
        picture_size,  # with Pillow, which other modalities do without
    )

    return picture_size(path, file)


def _check_size(path: Path, size: tuple[int, ...], properties: Properties) -> None:
    wanted = properties["height"], properties["width"]
    if size != wanted:
        raise DataError(
            f"{path}: is {_words(*size)} pixels, and the set's first picture is {_words(*wanted)}; bring all to one "
            f"size with --image-size {wanted[0]}x{wanted[1]}"
        )


def _words(height: int, width: int) -> str:
    return f"{height}x{width} (height x width)"
