"""Sound: a file is a document, a sample of it a byte of 8-bit mu-law (ITU-T G.711) in one channel.

Channels are mixed by their mean. A member is a WAV file of format 7, which players open: the bytes of the content are
G.711's own, bits inverted as the standard has it, so that silence is 0xFF and 0x7F. All
arithmetic is in integers: the same bytes on every machine.
"""

import struct
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_pipelines.errors import DataError
from data_pipelines.modalities.modality import Properties, both_cases, token_bytes
from data_pipelines.modalities.wav import MULAW, WavFormat, mix, pcm_samples, read_format

_BIAS = 132  # moves the borders of G.711's segments to powers of two; in units of 16 bits, 33 in its own of 14
_CLIP = 32635  # the largest magnitude that the last segment holds with the bias
_BLOCK_FRAMES = 2**16  # converted at once
_HEADER_BYTES = 58


class Audio:
    """Sounds of one rate, in Hz."""

    name = "audio"
    extension = "wav"
    suffixes = both_cases(".wav")
    asks: tuple[str, ...] = ("rate",)
    packing = False
    divisible = True

    def settle(self, path: Path, file: BinaryIO, asked: Properties) -> dict[str, int]:
        """The rate that is asked for, else the first file's. Raises DataError for one that cannot be."""
        if "rate" not in asked:
            return {"rate": read_format(path, file).rate}
        if not 1 <= asked["rate"] < 2**32:
            raise DataError(f"rate={asked['rate']}: must be from 1 to 2**32 - 1 Hz; such as 12000")
        return {"rate": asked["rate"]}

    def document_bytes(self, properties: Properties) -> int | None:
        """Sounds are of any length."""
        return None

    def measure(self, path: Path, properties: Properties) -> int:
        """The frames of a file, by its header."""
        with path.open("rb") as file:
            return _fitting_format(path, file, properties).frames

    def load(self, path: Path, file: BinaryIO, properties: Properties, offset: int, size: int) -> bytes:
        """The bytes of ``size`` frames from frame ``offset`` on; no more than these are held."""
        form = _fitting_format(path, file, properties)
        end = min(offset + size, form.frames)
        file.seek(form.offset + offset * form.frame_bytes)
        blocks = []
        for start in range(offset, end, _BLOCK_FRAMES):
            block = file.read(min(_BLOCK_FRAMES, end - start) * form.frame_bytes)
            blocks.append(_to_mulaw(block, form))
        return b"".join(blocks)

    def header(self, size: int, properties: Properties) -> bytes:
        """Of a mono WAV file of format 7. The even byte that RIFF wants at an odd end is left out, as players allow."""
        rate = properties["rate"]
        riff = struct.pack("<4sI4s", b"RIFF", _HEADER_BYTES - 8 + size, b"WAVE")
        form = struct.pack("<4sIHHIIHHH", b"fmt ", 18, MULAW, 1, rate, rate, 1, 8, 0)
        fact = struct.pack("<4sII", b"fact", 4, size)
        return riff + form + fact + struct.pack("<4sI", b"data", size)

    def encode(self, tokens: np.ndarray, properties: Properties) -> bytes:
        """(n,) integers 0..255 -> a WAV file."""
        content = token_bytes(tokens)
        return self.header(len(content), properties) + content


def mulaw_encode(samples: np.ndarray) -> np.ndarray:
    """(n,) int16 -> (n,) uint8 of G.711, whose all-positive bits are inverted: 0 is 0xFF, full scale 0x80 and 0x00."""
    return _encoding_table()[np.asarray(samples, dtype=np.int16).view(np.uint16)]


def mulaw_decode(content: np.ndarray) -> np.ndarray:
    """(n,) uint8 of G.711 -> (n,) int16, the middle of each step; both zeros, 0xFF and 0x7F, are 0."""
    return _decoding_table()[np.asarray(content, dtype=np.uint8)]


@cache
def _encoding_table() -> np.ndarray:
    """(65536,) uint8: the byte of each int16, by its bits."""
    value = np.arange(2**16, dtype=np.uint16).view(np.int16).astype(np.int64)
    biased = np.minimum(np.abs(value), _CLIP) + _BIAS
    segment = np.searchsorted(2 ** np.arange(8, 15), biased, side="right")  # 0..7: which power of two is below
    step = biased >> (segment + 3) & 0x0F  # 16 equal ones in each segment
    return (~(np.where(value < 0, 0x80, 0) | segment << 4 | step) & 0xFF).astype(np.uint8)


@cache
def _decoding_table() -> np.ndarray:
    """(256,) int16: the value of each byte."""
    code = ~np.arange(2**8, dtype=np.int64) & 0xFF
    segment, step = code >> 4 & 0x07, code & 0x0F
    magnitude = ((2 * step + 33) << (segment + 2)) - _BIAS
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.int16)


def _fitting_format(path: Path, file: BinaryIO, properties: Properties) -> WavFormat:
    form, rate = read_format(path, file), properties["rate"]
    if form.rate != rate:
        raise DataError(
            f"{path}: has {form.rate} Hz, and the set {rate} (its first file's, or --rate); "
            f"resample it first, such as with `sox IN.wav -r {rate} OUT.wav`"
        )
    return form


def _to_mulaw(block: bytes, form: WavFormat) -> bytes:
    """Whole frames of a file -> a byte each."""
    block = block[: len(block) // form.frame_bytes * form.frame_bytes]  # the file may shrink while it is read
    if form.tag == MULAW and form.channels == 1:
        return block  # not even the two zeros change places
    if form.tag == MULAW:
        samples, width = mulaw_decode(np.frombuffer(block, dtype=np.uint8)).astype(np.int64), 2
    else:
        samples, width = pcm_samples(block, form.width), form.width
    return mulaw_encode(mix(samples.reshape(-1, form.channels), width)).tobytes()
