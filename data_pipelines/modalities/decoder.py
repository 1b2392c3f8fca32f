"""FLAC, Ogg and MP3 to numbers, by libsndfile: the only file that imports soundfile, and only when one is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from longstride.data_pipelines.errors import DataError

_FULL_SCALE = 2**31


@contextmanager
def opened_sound(path: Path, file: BinaryIO) -> Iterator[Any]:
    """A ``soundfile.SoundFile`` over an open file, from its beginning; the file stays open.

    Raises DataError where the library is missing, and for a file that it cannot read, then or inside.
    """
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the package is there, and libsndfile is not
        cause = " ".join(str(error).split())
        raise DataError(
            f"{path}: is no WAV file, and soundfile, which reads FLAC, Ogg and MP3, cannot be imported ({cause}); "
            "pip install soundfile, or convert the file, such as with `sox IN OUT.wav`"
        ) from error
    sound = None
    try:
        file.seek(0)
        with soundfile.SoundFile(file) as sound:
            yield sound
    except TypeError as error:
        if sound is not None:
            raise
        # Of a file named .raw soundfile, and nobody else, takes the name for the format, and asks for the rest.
        raise DataError(
            f"{path}: does not say what sound it holds ({error}); convert it, such as with "
            "`sox -r 44100 -c 2 -b 16 -e signed IN.raw OUT.wav`, or exclude it"
        ) from error
    except soundfile.LibsndfileError as error:
        words = " ".join(error.error_string.split()).rstrip(".")
        if sound is None:
            raise DataError(
                f"{path}: is no WAV file, and cannot be read as another sound ({words}); convert or exclude it"
            ) from error
        raise DataError(f"{path}: is damaged or cut short ({words}); fetch it again or exclude it") from error


def decoded(path: Path, file: BinaryIO, block_frames: int) -> Iterator[np.ndarray]:
    """Blocks of (frames, channels) int64, of 32 bits full scale: integers of a file as they are, the rest rounded.

    Raises DataError for a file that is damaged.
    """
    with opened_sound(path, file) as sound:
        # Where it may, soundfile seeks behind every read to where it is already, and an MP3 decoder that was told to
        # seek has lost the bits that the next frame borrows from those before it.
        sound.seekable = lambda: False
        while len(block := sound.read(block_frames, dtype="float64", always_2d=True)):
            if np.isnan(block).any():
                raise DataError(f"{path}: holds samples that are no numbers (NaN); write it anew or exclude it")
            # Decoders of formats with loss go beyond full scale.
            yield np.clip(np.rint(block * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE - 1).astype(np.int64)
