"""What samples begin with: text, the bytes of a file, the upper rows of a picture, the beginning of a sound."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from longstride.kernels import ConfigError
from longstride.launcher.models import ModelData


def read_prompt(text: str, path: Path | None) -> bytes:
    """The prompt's bytes.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None:
        return text.encode(errors="surrogateescape")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompt-file={path}: {error.strerror}") from None


def read_picture(path: Path, data: ModelData, name: str = "--prompt-image") -> np.ndarray:
    """A picture of the model's own size, (height, width, 3) uint8.

    Raises:
        ConfigError: the model writes no such pictures, or the file holds none of that size.
        DataError: it cannot be read as a picture.
    """
    from longstride.data_pipelines.modalities.picture import picture_pixels  # with Pillow

    option = f"{name}={path}"
    if data.modality != "image":
        raise ConfigError(f"{option}: the model writes {data.words}; take --prompt-file for bytes as they are")
    height, width, channels = data.shape
    if channels != 3:
        raise ConfigError(f"{option}: the model's pictures have one channel; take --prompt-file with their bytes")
    try:
        with path.open("rb") as file:
            pixels = picture_pixels(path, file, None)
    except OSError as error:
        raise ConfigError(f"{option}: {error.strerror}") from None
    if pixels.shape[:2] != (height, width):
        rule = f"is {pixels.shape[0]}x{pixels.shape[1]} (height x width), and the model's pictures {height}x{width}"
        raise ConfigError(f"{option}: {rule}; scale it, such as with `convert IN -resize {width}x{height}! OUT.png`")
    return pixels


def kept_rows(asked: int | None, data: ModelData) -> int:
    """How many rows of a picture are given; half of them unless told otherwise. ConfigError out of range."""
    height = data.shape[0]
    if asked is None:
        return height // 2
    if not 0 <= asked < height:
        nearest = min(max(asked, 0), height - 1)
        raise ConfigError(
            f"--keep-rows={asked}: must be from 0 to {height - 1}, less than a picture; nearest {nearest}"
        )
    return asked


def read_sound(
    path: Path,
    data: ModelData,
    seconds: float | None = None,
    most_bytes: int | None = None,
    name: str = "--prompt-audio",
) -> bytes:
    """The beginning of a sound as the model's bytes: so many seconds, or at most so many bytes, or all of it.

    Raises:
        ConfigError: the model writes no sounds, or the sound is not so long.
        DataError: it cannot be read as a sound.
    """
    from longstride.data_pipelines.errors import DataError
    from longstride.data_pipelines.modalities import Audio

    option = f"{name}={path}"
    if data.modality != "audio":
        raise ConfigError(f"{option}: the model writes {data.words}; take --prompt-file for bytes as they are")
    properties, sound = {"rate": data.rate, "resampled": 1}, Audio()
    try:
        with path.open("rb") as file:
            frames = sound.measure(path, properties)
            wanted = frames if most_bytes is None else min(frames, most_bytes)
            if seconds is not None:
                wanted = frames_in(seconds, data.rate, "--keep-seconds")
            if wanted > frames:
                rule = f"the sound has {frames / data.rate:.6g} seconds; name no more"
                raise ConfigError(f"--keep-seconds={seconds:g}: {rule}")
            return sound.open(path, file, properties).read(0, wanted)
    except DataError as error:
        raise DataError(f"{name}={error}" if str(error).startswith(str(path)) else str(error)) from None
    except OSError as error:
        raise ConfigError(f"{option}: {error.strerror}") from None


def frames_in(seconds: float, rate: int, option: str) -> int:
    """Frames of so many seconds; ConfigError for a number that cannot be."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"{option}={seconds:g}: must be above 0, in seconds")
    return max(1, round(seconds * rate))
