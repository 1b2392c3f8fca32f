"""Sound from one rate to another, by libsoxr: the only file that imports soxr, and only when a rate differs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from longstride.data_pipelines.errors import DataError

_QUALITY = "VHQ"  # the passband and the noise of 28 bits: far below a step of mu-law


def resampled_frames(path: Path, frames: int, rate: int, wanted: int) -> int:
    """How many frames come of so many at another rate: rounded to the nearest, halves upwards.

    Raises DataError, naming ``path``, where the library that makes them is missing: before anything is written.
    """
    try:
        import soxr  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"{path}: has {rate} Hz, and soxr, which would resample it to {wanted}, cannot be imported ({error}); "
            f"pip install soxr, or resample it first, such as with `sox IN.wav -r {wanted} OUT.wav`"
        ) from error
    return (2 * frames * wanted + rate) // (2 * rate)


def resampled(blocks: Iterator[np.ndarray], rate: int, wanted: int) -> Iterator[np.ndarray]:
    """Blocks of (n,) float64 at one rate -> blocks at another, which do not depend on where the first are cut."""
    import soxr

    stream = soxr.ResampleStream(rate, wanted, 1, dtype="float64", quality=_QUALITY)
    for block in blocks:
        yield from _some(stream.resample_chunk(block))
    yield from _some(stream.resample_chunk(np.empty(0), last=True))


def _some(block: np.ndarray) -> Iterator[np.ndarray]:
    if len(block):
        yield block
