"""WAV files, also RF64: PCM or 8-bit mu-law (ITU-T G.711); and the chunks of WAV and similar files.

The standard library's ``wave`` reads neither mu-law nor, before Python 3.12, the "extensible" header that most programs
write for 24 bits or more than two channels.

WAV, RF64, Wave64, AIFF, IFF and CAF files consist of chunks, and an AU file is a single one. A reader takes the size
that the first chunk of sound states. This is too small if a recorder was stopped before it wrote the size, if the size
exceeded 4 GiB, or if `cat` joined files. The remaining sound would be lost without an error, so it is checked here.
"""

import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np

from longstride.data_pipelines.errors import DataError

PCM, _FLOAT, _ALAW, MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE  # format tags of the RIFF registry
_TAG_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")  # after the tag in an extensible header's GUID
_WAV_MAGICS = (b"RIFF", b"RF64", b"BW64")  # the last two have sizes of 64 bits
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
    return head[:4] in _WAV_MAGICS and head[8:] in (b"WAVE", b"")


def read_format(path: Path, file: BinaryIO) -> WavFormat | None:
    """Read the format of an open WAV file; None for an encoding that needs a decoder.

    Raises DataError for a file that is not WAV, is cut short, or holds more sound than it states.
    """
    file.seek(0)
    if file.read(12)[8:] != b"WAVE":
        raise DataError(f"{path}: is not a WAV file (it does not begin with a RIFF WAVE header); {_CONVERT}")
    chunks = find_chunks(path, file)
    if b"data" not in chunks:
        raise DataError(f"{path}: is a WAV file without sound (cut short before its data); fetch it again")
    if b"fmt " not in chunks:
        raise DataError(f"{path}: is a broken WAV file (sound before its format); {_CONVERT}")
    place, size = chunks[b"fmt "]
    file.seek(place)
    content = file.read(min(size, 40))
    if len(content) < 16:
        raise DataError(f"{path}: is a broken WAV file (its format has {len(content)} bytes, not 16); {_CONVERT}")
    tag, channels, rate, _, frame_bytes, bits = struct.unpack("<HHIIHH", content[:16])
    if tag == _EXTENSIBLE and content[26:40] == _TAG_GUID_TAIL:
        (tag,) = struct.unpack("<H", content[24:26])
    if (tag == PCM and bits not in (8, 16, 24, 32)) or (tag == MULAW and bits != 8):
        rule = "must be PCM (1) of 8, 16, 24 or 32 bits or mu-law (7)"
        raise DataError(f"{path}: has WAV format {tag} with {bits} bits; {rule}; {_CONVERT}")
    is_one_width = tag in (PCM, _FLOAT, _ALAW, MULAW)
    if not channels or not rate or not frame_bytes or (is_one_width and frame_bytes != channels * bits // 8):
        form = f"{channels} channels of {bits} bits at {rate} Hz in frames of {frame_bytes} bytes"
        raise DataError(f"{path}: is a broken WAV file ({form}); {_CONVERT}")
    offset, size = chunks[b"data"]
    if size % frame_bytes:  # of an encoded block, for a decoder
        rule = f"{size} bytes of sound are not a multiple of the frame size, {frame_bytes}; {_CONVERT}"
        raise DataError(f"{path}: {rule}")
    if tag not in (PCM, MULAW):
        return None
    return WavFormat(tag, channels, rate, frame_bytes // channels, offset, size // frame_bytes)


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
    return _mulaw_tables()[0][np.asarray(samples, dtype=np.int16).view(np.uint16)]


def mulaw_decode(content: np.ndarray) -> np.ndarray:
    """Decode (n,) uint8 of G.711 to (n,) int16, the middle of each step; both zeros, 0xFF and 0x7F, become 0."""
    return _mulaw_tables()[1][np.asarray(content, dtype=np.uint8)]


def mulaw_to_pcm(content: np.ndarray) -> np.ndarray:
    """Decode (n,) uint8 of G.711 to (n,) int16 that ``mulaw_encode`` maps back to the same bytes.

    The numbers are those of ``mulaw_decode``, except that 0x7F, the negative zero, becomes -1.
    """
    content = np.asarray(content, dtype=np.uint8)
    return mulaw_decode(content) - (content == 0x7F).astype(np.int16)


@cache
def _mulaw_tables() -> tuple[np.ndarray, np.ndarray]:
    """Build the byte of each int16 by its bits, (65536,) uint8, and the value of each byte, (256,) int16."""
    value = np.arange(2**16, dtype=np.uint16).view(np.int16).astype(np.int64)
    biased = np.minimum(np.abs(value), _CLIP) + _BIAS
    segment = np.searchsorted(2 ** np.arange(8, 15), biased, side="right")  # 0..7, between powers of two
    step = biased >> (segment + 3) & 0x0F  # 16 equal steps in each segment
    encoded = (~(np.where(value < 0, 0x80, 0) | segment << 4 | step) & 0xFF).astype(np.uint8)
    code = ~np.arange(2**8, dtype=np.int64) & 0xFF
    segment, step = code >> 4 & 0x07, code & 0x0F
    magnitude = ((2 * step + 33) << (segment + 2)) - _BIAS
    return encoded, np.where(code & 0x80, -magnitude, magnitude).astype(np.int16)


# Chunks.

_MOST_CHUNKS = 10_000  # of a file; editors write a few dozen
_HEAD_BYTES = 8  # of the shortest chunk


class _Layout(NamedTuple):
    """How a format consists of chunks, each with a name, a size, and so many bytes."""

    magic: bytes  # at the beginning of the file
    first: int  # offset of the first chunk
    sound: tuple[bytes, ...]  # names of chunks that hold sound
    order: Literal["little", "big"] = "little"  # of the bytes of a size
    size_bytes: int = 4
    multiple: int = 2  # a chunk is padded to a multiple of so many bytes
    counts_head: bool = False  # whether a size counts the bytes of name and size too


_LAYOUTS = (
    _Layout(b"RIFF", 12, (b"data",)),
    _Layout(b"RF64", 12, (b"data",)),
    _Layout(b"BW64", 12, (b"data",)),
    _Layout(b"RIFX", 12, (b"data",), "big"),
    _Layout(b"FORM", 12, (b"SSND", b"BODY"), "big"),
    _Layout(b"caff", 8, (b"data",), "big", 8, 1),
    _Layout(b"riff.\x91\xcf\x11", 40, (b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0O\x8e\xdb\x8a",), "little", 8, 8, True),
)
_LAYOUT_MAGICS = tuple(layout.magic for layout in _LAYOUTS)
_REPAIR = "write it again or exclude it"
_REPAIR_WAV = (
    "write it again: `ffmpeg -ignore_length 1 -i IN.wav -c copy -rf64 auto OUT.wav` takes all to its end as sound, and "
    "without `-ignore_length 1` what it says"
)


def find_chunks(path: Path, file: BinaryIO, start: int = 0) -> dict[bytes, tuple[int, int]]:
    """Return offset and size of each chunk up to the sound, by name; an empty dict for a file without chunks.

    ``start`` is where the format begins, after tags. Moves the file.

    Raises:
        DataError: the sound is cut short, or something follows it that is not a chunk without sound.
    """
    file_bytes = file.seek(0, 2)
    magic = read_at(file, start, 12)
    if magic[:4] == b".snd":  # AU
        place, size = start + int.from_bytes(magic[4:8], "big"), int.from_bytes(magic[8:], "big")
        if size != 2**32 - 1:  # the format's word for the rest of the file
            _check_size(path, size, file_bytes - place, _REPAIR)
            _check_end(path, file, size, place + size, _REPAIR)
        return {}
    layout = next((layout for layout in _LAYOUTS if magic.startswith(layout.magic)), None)
    if layout is None:
        return {}
    repair = _REPAIR_WAV if magic[8:] == b"WAVE" else _REPAIR
    name_bytes = len(layout.sound[0])
    head_bytes = name_bytes + layout.size_bytes
    chunks: dict[bytes, tuple[int, int]] = {}
    sound_bytes: int | None = None
    place = start + layout.first
    for _ in range(_MOST_CHUNKS):
        head = read_at(file, place, head_bytes)
        if len(head) < head_bytes:
            break
        name, offset = head[:name_bytes], place + head_bytes
        size = int.from_bytes(head[name_bytes:], layout.order)
        if layout.counts_head:
            size = max(0, size - head_bytes)
        if sound_bytes is None:
            if name in layout.sound:
                if size == 2**32 - 1 and b"ds64" in chunks:
                    size = int.from_bytes(read_at(file, chunks[b"ds64"][0] + 8, 8), "little")
                _check_size(path, size, file_bytes - offset, repair)
                sound_bytes = size
            chunks.setdefault(name, (offset, size))
        elif name in layout.sound or name.startswith(_LAYOUT_MAGICS):
            rule = "holds several sounds one after another, and only the first would be read"
            raise DataError(f"{path}: {rule}; split it at byte {place}, or exclude it")
        elif offset + size > file_bytes or (name_bytes == 4 and not all(0x20 <= byte < 0x7F for byte in name)):
            break
        place = offset + size + -size % layout.multiple
    else:
        raise DataError(f"{path}: has more than {_MOST_CHUNKS:,} chunks; write it again or exclude it")
    if sound_bytes is not None:
        _check_end(path, file, sound_bytes, place, repair)
    return chunks


def _check_size(path: Path, size: int, present: int, repair: str) -> None:
    """Raise DataError if a file holds less sound than it states."""
    if size > present:
        rule = f"says {size} bytes of sound and holds {max(0, present)}: it is cut short, or written to a pipe"
        raise DataError(f"{path}: {rule}; fetch it again, or {repair}")


def _check_end(path: Path, file: BinaryIO, size: int, end: int, repair: str) -> None:
    """Raise DataError if a file continues after its last chunk with more than a few bytes of padding."""
    extra_bytes = file.seek(0, 2) - end
    if extra_bytes >= _HEAD_BYTES or read_at(file, end, _HEAD_BYTES).strip(b"\0"):
        rule = f"says {size} bytes of sound, and {extra_bytes} bytes follow that are not a chunk"
        why = "they may be sound, if a recorder was stopped or the file exceeds 4 GiB"
        raise DataError(f"{path}: {rule}: {why}; {repair}")


def read_at(file: BinaryIO, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)
