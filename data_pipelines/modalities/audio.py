"""Sound: a file is a document, a sample of it a byte of 8-bit mu-law (ITU-T G.711) in one channel.

Channels are mixed by their mean. A member is a WAV file of format 7, which players open: the bytes of the content are
G.711's own, bits inverted as the standard has it, so that silence is 0xFF and 0x7F. For a WAV file of the set's rate
all arithmetic is in integers: the same bytes on every machine. What is decoded or resampled (`sound.py`) follows from
the libraries that do it.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.modality import Content, Properties, both_cases, token_bytes
from longstride.data_pipelines.modalities.mulaw import mulaw_decode, mulaw_encode
from longstride.data_pipelines.modalities.sound import (
    BLOCK_FRAMES,
    Form,
    StreamedSound,
    described,
    frames_at,
    wav_samples,
)
from longstride.data_pipelines.modalities.wav import MULAW, WavFormat, mix

__all__ = ["Audio", "mulaw_decode", "mulaw_encode"]

_HEADER_BYTES = 58


class Audio:
    """Sounds of one rate, in Hz. The property ``resampled`` is 1 where others are brought to it, else there is none."""

    name = "audio"
    extension = "wav"
    suffixes = both_cases(".flac", ".mp3", ".ogg", ".wav")
    asks: tuple[str, ...] = ("rate",)
    packing = False
    divisible = True

    def settle(self, path: Path, file: BinaryIO, asked: Properties) -> dict[str, int]:
        """The rate that is asked for, else the first file's. Raises DataError for one that cannot be."""
        if "rate" not in asked:
            return {"rate": described(path, file).rate}
        if not 1 <= asked["rate"] < 2**32:
            raise DataError(f"rate={asked['rate']}: must be from 1 to 2**32 - 1 Hz; such as 12000")
        return {"rate": asked["rate"], "resampled": 1}

    def document_bytes(self, properties: Properties) -> int | None:
        """Sounds are of any length."""
        return None

    def measure(self, path: Path, properties: Properties) -> int:
        """The frames of a file at the set's rate, by its header."""
        with path.open("rb") as file:
            form = _fitting(path, file, properties)
        return frames_at(path, form, properties["rate"])

    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """A byte a frame. A WAV file of the set's rate is read anywhere, any other sound from its beginning on."""
        form = _fitting(path, file, properties)
        if isinstance(form, WavFormat) and form.rate == properties["rate"]:
            return _WavContent(file, form)
        return StreamedSound(path, file, form, properties["rate"])

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


@dataclass(frozen=True, slots=True)
class _WavContent:
    """Of a WAV file of the set's rate; no more is held than is asked for."""

    file: BinaryIO
    form: WavFormat

    def read(self, offset: int, size: int) -> bytes:
        """A byte for each of ``size`` frames from frame ``offset`` on."""
        form = self.form
        end = min(offset + size, form.frames)
        self.file.seek(form.offset + offset * form.frame_bytes)
        blocks = []
        for start in range(offset, end, BLOCK_FRAMES):
            block = self.file.read(min(BLOCK_FRAMES, end - start) * form.frame_bytes)
            if form.tag == MULAW and form.channels == 1:
                blocks.append(block)  # not even the two zeros change places
            else:
                blocks.append(mulaw_encode(mix(*wav_samples(block, form))).tobytes())
        return b"".join(blocks)


def _fitting(path: Path, file: BinaryIO, properties: Properties) -> Form:
    form, rate = described(path, file), properties["rate"]
    if form.rate != rate and not properties.get("resampled"):
        raise DataError(
            f"{path}: has {form.rate} Hz, and the set's first file {rate}; bring all to one rate with --rate {rate}"
        )
    return form
