"""Sounds that have to be decoded or resampled: read from their beginning on, in blocks, so that nothing is held whole.

Where a block begins does not depend on what is asked for, and a decoder is never told to seek. So the bytes of a sound
are the same in whatever pieces they are asked for, also where a decoder needs what lies before (MP3, Opus) and across
the seams of the resampler's filter. Reading on continues; going back begins anew.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.mulaw import mulaw_decode, mulaw_encode
from longstride.data_pipelines.modalities.stated_length import check_stated_length
from longstride.data_pipelines.modalities.wav import MULAW, WavFormat, is_wav, mix, pcm_samples, read_format

BLOCK_FRAMES = 2**16  # converted at once
_MAX_RATIO = 256  # of two rates: the filters of the resampler grow with it, and no two rates in use are as far apart


class DecodedFormat:
    """What the decoder says of a file that is no WAV file."""

    def __init__(self, rate: int, frames: int) -> None:
        self.rate, self.frames = rate, frames


Form = WavFormat | DecodedFormat


def described(path: Path, file: BinaryIO) -> Form:
    """What an open sound file says of itself. Raises DataError where it cannot be read, or its length not be told."""
    if is_wav(file):
        return read_format(path, file)
    from longstride.data_pipelines.modalities.decoder import opened_sound  # with libsndfile, which WAV files do without

    with opened_sound(path, file) as sound:
        kind, found = sound.format, DecodedFormat(sound.samplerate, sound.frames)
    check_stated_length(path, file, kind, found.frames)
    return found


def frames_at(path: Path, form: Form, rate: int) -> int:
    """Frames of a file when it has so many a second. Raises DataError where it cannot be brought to that rate."""
    if form.rate == rate:
        return form.frames
    if max(form.rate, rate) > _MAX_RATIO * min(form.rate, rate):
        raise DataError(
            f"{path}: has {form.rate} Hz, too far from {rate} to be resampled (at most {_MAX_RATIO} to 1); name a rate "
            "such as 12000, or exclude the file"
        )
    from longstride.data_pipelines.modalities.resampler import (
        resampled_frames,  # with soxr, which the right rate does without
    )

    return resampled_frames(path, form.frames, form.rate, rate)


def wav_samples(block: bytes, form: WavFormat) -> tuple[np.ndarray, int]:
    """Whole frames of a WAV file -> (frames, channels) int64, and how many bytes wide the numbers are."""
    block = block[: len(block) // form.frame_bytes * form.frame_bytes]  # the file may shrink while it is read
    if form.tag == MULAW:
        samples, width = mulaw_decode(np.frombuffer(block, dtype=np.uint8)).astype(np.int64), 2
    else:
        samples, width = pcm_samples(block, form.width), form.width
    return samples.reshape(-1, form.channels), width


class StreamedSound:
    """The content of a sound: a byte of mu-law a frame, at ``rate`` frames a second."""

    def __init__(self, path: Path, file: BinaryIO, form: Form, rate: int) -> None:
        """``file`` stays open as long as it is read."""
        self._path, self._file, self._form, self._rate = path, file, form, rate
        self._frames = frames_at(path, form, rate)
        self._position = 0  # of the next frame
        self._block = b""  # from there on
        self._blocks = self._mulaw_blocks()

    def read(self, offset: int, size: int) -> bytes:
        """See ``Content``. Raises DataError for a sound that is damaged, or shorter than it says."""
        end = min(offset + size, self._frames)
        if offset >= end:
            return b""
        if offset < self._position:
            self._begin()
        found = []
        while self._position < end:
            if not self._block:
                self._block = next(self._blocks, b"")
                if not self._block:
                    raise DataError(
                        f"{self._path}: says {self._frames} frames (at {self._rate} Hz) and holds {self._position}: "
                        "it is cut short; fetch it again or exclude it"
                    )
            start = max(offset - self._position, 0)
            taken = min(end - self._position, len(self._block))
            found.append(self._block[start:taken])
            self._position += taken
            self._block = self._block[taken:]
        return b"".join(found)

    def _begin(self) -> None:
        self._position, self._block, self._blocks = 0, b"", self._mulaw_blocks()

    def _mulaw_blocks(self) -> Iterator[bytes]:
        if self._form.rate == self._rate:
            for samples, width in self._samples():
                yield mulaw_encode(mix(samples, width)).tobytes()
            return
        from longstride.data_pipelines.modalities.resampler import resampled

        # Mixed, and not rounded before the filter: sums of a few numbers of at most 32 bits are exact.
        mono = (samples.sum(axis=1) / (samples.shape[1] << 8 * width - 1) for samples, width in self._samples())
        for block in resampled(mono, self._form.rate, self._rate):
            rounded = np.clip(np.rint(block * 2**15), -(2**15), 2**15 - 1)
            yield mulaw_encode(rounded.astype(np.int16)).tobytes()

    def _samples(self) -> Iterator[tuple[np.ndarray, int]]:
        """Blocks of (frames, channels) int64, and how many bytes wide the numbers are."""
        form = self._form
        if isinstance(form, WavFormat):
            self._file.seek(form.offset)
            for start in range(0, form.frames, BLOCK_FRAMES):
                block = self._file.read(min(BLOCK_FRAMES, form.frames - start) * form.frame_bytes)
                yield wav_samples(block, form)
            return
        from longstride.data_pipelines.modalities.decoder import decoded

        for samples in decoded(self._path, self._file, BLOCK_FRAMES):
            yield samples, 4
