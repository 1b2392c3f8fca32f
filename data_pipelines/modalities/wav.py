"""Where the sound lies in a WAV file, and sound as 16-bit numbers.

The standard library's ``wave`` reads neither mu-law nor, before Python 3.12, the "extensible" header that most
programs write for 24 bits or more than two channels.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from longstride.data_pipelines.errors import DataError

PCM, MULAW, _EXTENSIBLE = 1, 7, 0xFFFE  # format tags of the RIFF registry
_TAG_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")  # behind the tag in an extensible header's GUID
_CONVERT = "convert it first, such as with `sox IN.wav -b 16 OUT.wav`"


@dataclass(frozen=True, slots=True)
class WavFormat:
    """What a WAV file holds. A frame is one sample of every channel."""

    tag: int  # PCM or MULAW
    channels: int
    rate: int  # frames a second
    width: int  # bytes of a sample
    offset: int  # of the first frame in the file
    frames: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame."""
        return self.channels * self.width


def is_wav(file: BinaryIO) -> bool:
    """Whether an open file begins as a WAV file does, or ends before that can be told."""
    file.seek(0)
    head = file.read(12)
    return head[:4] == b"RIFF" and head[8:] in (b"WAVE", b"")


def read_format(path: Path, file: BinaryIO) -> WavFormat:
    """What an open WAV file says of itself. Raises DataError where it is none, cut short, or of another encoding."""
    file_bytes = file.seek(0, 2)
    file.seek(0)
    head = file.read(12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        raise DataError(f"{path}: is no WAV file (it begins with no RIFF WAVE header); {_CONVERT}")
    found: tuple[int, int, int, int] | None = None
    while len(chunk := file.read(8)) == 8:
        name, size = chunk[:4], int.from_bytes(chunk[4:], "little")
        start = file.tell()
        if name == b"fmt ":
            found = _parse_format(path, file.read(min(size, 40)))
        elif name == b"data":
            if found is None:
                raise DataError(f"{path}: is a broken WAV file (sound before its format); {_CONVERT}")
            if start + size > file_bytes:
                raise DataError(
                    f"{path}: says {size} bytes of sound and holds {file_bytes - start}: it is cut short, or was "
                    "written to a pipe; fetch it again, or convert it to a file"
                )
            frame_bytes = found[1] * found[3]
            if size % frame_bytes:
                raise DataError(f"{path}: {size} bytes of sound are no whole frames of {frame_bytes}; {_CONVERT}")
            return WavFormat(*found, offset=start, frames=size // frame_bytes)
        file.seek(start + size + size % 2)  # chunks begin at even places
    raise DataError(f"{path}: is a WAV file without sound (cut short before its data); fetch it again")


def _parse_format(path: Path, content: bytes) -> tuple[int, int, int, int]:
    """(tag, channels, rate, width)."""
    if len(content) < 16:
        raise DataError(f"{path}: is a broken WAV file (its format has {len(content)} bytes, not 16); {_CONVERT}")
    tag, channels, rate, _, frame_bytes, bits = struct.unpack("<HHIIHH", content[:16])
    if tag == _EXTENSIBLE and content[26:40] == _TAG_GUID_TAIL:
        (tag,) = struct.unpack("<H", content[24:26])
    known = (tag == PCM and bits in (8, 16, 24, 32)) or (tag == MULAW and bits == 8)
    if not known:
        raise DataError(
            f"{path}: is of WAV format {tag} with {bits} bits; must be PCM (1) of 8, 16, 24 or 32 bits or mu-law (7); "
            f"{_CONVERT}"
        )
    if not channels or not rate or frame_bytes != channels * bits // 8:
        raise DataError(
            f"{path}: is a broken WAV file ({channels} channels of {bits} bits at {rate} Hz in frames of {frame_bytes} "
            f"bytes); {_CONVERT}"
        )
    return tag, channels, rate, bits // 8


def pcm_samples(content: bytes, width: int) -> np.ndarray:
    """Little-endian PCM of so many bytes a sample -> (n,) int64; of one byte they are unsigned around 128."""
    if width == 1:
        return np.frombuffer(content, dtype=np.uint8).astype(np.int64) - 128
    if width == 3:
        parts = np.frombuffer(content, dtype=np.uint8).reshape(-1, 3).astype(np.int64)
        unsigned = parts[:, 0] | parts[:, 1] << 8 | parts[:, 2] << 16
        return (unsigned ^ 0x800000) - 0x800000
    return np.frombuffer(content, dtype=f"<i{width}").astype(np.int64)


def mix(samples: np.ndarray, width: int) -> np.ndarray:
    """(frames, channels) int64 of ``width`` bytes each -> (frames,) int16: their mean, rounded to the nearest.

    In integers, so that it is the same on every machine.
    """
    total = samples.sum(axis=1)
    if width == 1:
        total <<= 8
    divisor = samples.shape[1] << 8 * max(0, width - 2)
    mean = (2 * total + divisor) // (2 * divisor)
    return np.minimum(mean, 2**15 - 1).astype(np.int16)
