"""WAV files, also RF64: PCM or 8-bit mu-law (ITU-T G.711).

The standard library's ``wave`` reads neither mu-law nor, before Python 3.12, the "extensible" header that most programs
write for 24 bits or more than two channels.
"""

import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.chunks import find_chunks

PCM, _FLOAT, _ALAW, MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE  # format tags of the RIFF registry
_TAG_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")  # after the tag in an extensible header's GUID
_MAGICS = (b"RIFF", b"RF64", b"BW64")  # the last two have sizes of 64 bits
_CONVERT = "convert it first, such as with `sox IN.wav -b 16 OUT.wav`"
_BIAS = 132  # moves the borders of G.711's segments to powers of two; 33 in the standard's 14-bit units
_CLIP = 32635  # the largest magnitude of the last segment, without the bias


@dataclass(frozen=True, slots=True)
class WavFormat:
    """The format of a WAV file. A frame is one sample of every channel."""

    tag: int  # PCM or MULAW
    channels: int
    rate: int  # frames per second
    width: int  # bytes of a sample
    offset: int  # of the first frame in the file
    frames: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame."""
        return self.channels * self.width

    def samples(self, block: bytes) -> tuple[np.ndarray, int]:
        """Convert little-endian frames to (frames, channels) int64; also return the width of a number in bytes."""
        # The file may shrink while it is read.
        raw = np.frombuffer(block[: len(block) // self.frame_bytes * self.frame_bytes], dtype=np.uint8)
        width = self.width
        if self.tag == MULAW:
            samples, width = mulaw_decode(raw).astype(np.int64), 2
        elif width == 1:  # unsigned around 128
            samples = raw.astype(np.int64) - 128
        elif width == 3:
            low, middle, high = raw.reshape(-1, 3).astype(np.int64).T
            samples = ((low | middle << 8 | high << 16) ^ 0x800000) - 0x800000
        else:
            samples = raw.view(f"<i{width}").astype(np.int64)
        return samples.reshape(-1, self.channels), width


def is_wav(file: BinaryIO) -> bool:
    """Whether an open file begins like a WAV file, or is too short to tell."""
    file.seek(0)
    head = file.read(12)
    return head[:4] in _MAGICS and head[8:] in (b"WAVE", b"")


def read_format(path: Path, file: BinaryIO) -> WavFormat | None:
    """Read the format of an open WAV file; None for an encoding that needs a decoder.

    Raises DataError for a file that is not WAV, is cut short, or holds more sound than it states.
    """
    file.seek(0)
    if file.read(12)[8:] != b"WAVE":
        raise DataError(f"{path}: is no WAV file (it begins with no RIFF WAVE header); {_CONVERT}")
    chunks = find_chunks(path, file)
    if b"data" not in chunks:
        raise DataError(f"{path}: is a WAV file without sound (cut short before its data); fetch it again")
    if b"fmt " not in chunks:
        raise DataError(f"{path}: is a broken WAV file (sound before its format); {_CONVERT}")
    place, size = chunks[b"fmt "]
    file.seek(place)
    tag, channels, rate, frame_bytes = _parse_format(path, file.read(min(size, 40)))
    offset, size = chunks[b"data"]
    if size % frame_bytes:
        raise DataError(f"{path}: {size} bytes of sound are no whole frames of {frame_bytes}; {_CONVERT}")
    if tag not in (PCM, MULAW):
        return None
    return WavFormat(tag, channels, rate, frame_bytes // channels, offset, size // frame_bytes)


def _parse_format(path: Path, content: bytes) -> tuple[int, int, int, int]:
    """Parse a format chunk to (tag, channels, rate, bytes of a frame or of an encoded block)."""
    if len(content) < 16:
        raise DataError(f"{path}: is a broken WAV file (its format has {len(content)} bytes, not 16); {_CONVERT}")
    tag, channels, rate, _, frame_bytes, bits = struct.unpack("<HHIIHH", content[:16])
    if tag == _EXTENSIBLE and content[26:40] == _TAG_GUID_TAIL:
        (tag,) = struct.unpack("<H", content[24:26])
    if (tag == PCM and bits not in (8, 16, 24, 32)) or (tag == MULAW and bits != 8):
        raise DataError(
            f"{path}: is of WAV format {tag} with {bits} bits; must be PCM (1) of 8, 16, 24 or 32 bits or mu-law (7); "
            f"{_CONVERT}"
        )
    is_one_width = tag in (PCM, _FLOAT, _ALAW, MULAW)
    if not channels or not rate or not frame_bytes or (is_one_width and frame_bytes != channels * bits // 8):
        raise DataError(
            f"{path}: is a broken WAV file ({channels} channels of {bits} bits at {rate} Hz in frames of {frame_bytes} "
            f"bytes); {_CONVERT}"
        )
    return tag, channels, rate, frame_bytes


def mix(samples: np.ndarray, width: int) -> np.ndarray:
    """Average channels: (frames, channels) int64 of ``width`` bytes each become (frames,) int16, rounded to nearest.

    The arithmetic is in integers, so the result is the same on every machine.
    """
    total = samples.sum(axis=1)
    if width == 1:
        total <<= 8
    divisor = samples.shape[1] << 8 * max(0, width - 2)
    mean = (2 * total + divisor) // (2 * divisor)
    return np.minimum(mean, 2**15 - 1).astype(np.int16)


def mulaw_encode(samples: np.ndarray) -> np.ndarray:
    """Encode (n,) int16 as (n,) uint8 of G.711, with inverted bits: 0 is 0xFF, full scale 0x80 and 0x00."""
    return _encoding_table()[np.asarray(samples, dtype=np.int16).view(np.uint16)]


def mulaw_decode(content: np.ndarray) -> np.ndarray:
    """Decode (n,) uint8 of G.711 to (n,) int16, the middle of each step; both zeros, 0xFF and 0x7F, become 0."""
    return _decoding_table()[np.asarray(content, dtype=np.uint8)]


def mulaw_to_pcm(content: np.ndarray) -> np.ndarray:
    """Decode (n,) uint8 of G.711 to (n,) int16 that ``mulaw_encode`` maps back to the same bytes.

    The numbers are those of ``mulaw_decode``, except that 0x7F, the negative zero, becomes -1.
    """
    content = np.asarray(content, dtype=np.uint8)
    return mulaw_decode(content) - (content == 0x7F).astype(np.int16)


@cache
def _encoding_table() -> np.ndarray:
    """Build the byte of each int16 by its bits, (65536,) uint8."""
    value = np.arange(2**16, dtype=np.uint16).view(np.int16).astype(np.int64)
    biased = np.minimum(np.abs(value), _CLIP) + _BIAS
    segment = np.searchsorted(2 ** np.arange(8, 15), biased, side="right")  # 0..7, between powers of two
    step = biased >> (segment + 3) & 0x0F  # 16 equal steps in each segment
    return (~(np.where(value < 0, 0x80, 0) | segment << 4 | step) & 0xFF).astype(np.uint8)


@cache
def _decoding_table() -> np.ndarray:
    """Build the value of each byte, (256,) int16."""
    code = ~np.arange(2**8, dtype=np.int64) & 0xFF
    segment, step = code >> 4 & 0x07, code & 0x0F
    magnitude = ((2 * step + 33) << (segment + 2)) - _BIAS
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.int16)
