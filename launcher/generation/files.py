"""Files of samples by modality: a grid of pictures as PNG, a WAV a sound, bytes as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from longstride.kernels import ConfigError
from longstride.launcher.generation.plain_files import check_new, write_new
from longstride.launcher.models import ModelData

_SUFFIXES = {"image": ".png", "audio": ".wav"}
_TILE_PIXELS = 96  # of the longer side, at least: smaller pictures are shown with their pixels as squares
_MOST_PIXELS = 2**26  # of a whole grid
_PAPER, _MASK = 255, 128  # between pictures, and where a prompt has nothing


def output_files(output: Path, data: ModelData, count: int) -> list[Path]:
    """The files that so many samples go to, of which none is there yet: one for pictures, else one a sample.

    Raises:
        ConfigError: the suffix is not that of the modality, one of them is there, or they cannot be made.
    """
    suffix = _SUFFIXES.get(data.modality)
    if suffix is not None and output.suffix != suffix:
        raise ConfigError(f"--output={output}: must be a {suffix} file, as the model writes {data.words}")
    files = [output]
    if data.modality != "image" and count > 1:
        files = [output.with_name(f"{output.stem}-{number}{output.suffix}") for number in range(1, count + 1)]
    for file in files:
        check_new(file)
    return files


def write_sounds(files: Sequence[Path], sounds: np.ndarray, rate: int) -> None:
    """(n, frames) uint8 of mu-law -> a WAV file each."""
    from longstride.data_pipelines.modalities import Audio

    for file, sound in zip(files, sounds, strict=True):
        write_new(file, Audio().encode(sound, {"rate": rate}))


def write_plain(files: Sequence[Path], samples: np.ndarray) -> None:
    """(n, bytes) uint8 -> a file each."""
    for file, sample in zip(files, samples, strict=True):
        write_new(file, sample.tobytes())


def write_pictures(file: Path, tiles: Sequence[Sequence[np.ndarray]]) -> None:
    """Rows of pictures (height, width, channels) uint8 -> one PNG file."""
    from longstride.data_pipelines.modalities.picture import png_file  # with Pillow

    write_new(file, png_file(grid(tiles)))


def in_square(pictures: Sequence[np.ndarray]) -> list[Sequence[np.ndarray]]:
    """Pictures in rows, as many as columns or one less."""
    columns = square_columns(len(pictures))
    return [pictures[start : start + columns] for start in range(0, len(pictures), columns)]


def square_columns(count: int) -> int:
    """Of a square that has room for so many."""
    return math.ceil(math.sqrt(count))


def masked(picture: np.ndarray, rows: int) -> np.ndarray:
    """What a model is given of a picture: its upper rows, and grey below."""
    shown = picture.copy()
    shown[rows:] = _MASK
    return shown


def grid(tiles: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Rows of pictures of one size, (height, width, channels) uint8 -> one, (H, W, 3): every pixel a square of its own.

    Raises:
        ConfigError: as ``grid_size``.
    """
    height, width, _ = tiles[0][0].shape
    scale, gap = _spacing(height, width)
    paper = np.full((*grid_size(len(tiles), max(map(len, tiles)), height, width), 3), _PAPER, dtype=np.uint8)
    for row, pictures in enumerate(tiles):
        for column, picture in enumerate(pictures):
            top, left = gap + row * (height * scale + gap), gap + column * (width * scale + gap)
            large = picture.repeat(scale, axis=0).repeat(scale, axis=1)
            paper[top : top + height * scale, left : left + width * scale] = large
    return paper


def grid_size(rows: int, columns: int, height: int, width: int) -> tuple[int, int]:
    """Pixels down and across of a grid of so many pictures; ConfigError where they are too many for a picture."""
    scale, gap = _spacing(height, width)
    size = (rows * (height * scale + gap) + gap, columns * (width * scale + gap) + gap)
    if math.prod(size) > _MOST_PIXELS:
        raise ConfigError(f"--count: a grid of {size[0]} x {size[1]} pixels is too large; take fewer samples")
    return size


def _spacing(height: int, width: int) -> tuple[int, int]:
    """Pixels of the grid a pixel of a picture, and between pictures."""
    scale = max(1, _TILE_PIXELS // max(height, width))
    return scale, max(2, scale // 2)
