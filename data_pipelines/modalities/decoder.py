"""Decode sounds by libsndfile, and check that the stated length of a file covers all of its sound.

A build plans by stated lengths before it decodes, and they can be wrong. The decoder guesses the length of an MP3 file
without an Info header from the first bit rate, and only sees the first of several concatenated files. Without a check,
sounds would silently be cut.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.wav import find_chunks, read_at

_WRITE_AGAIN = "write it again, such as with `ffmpeg -i IN OUT.flac`, or exclude it"
_FULL_SCALE = 2**31
_BLOCK_SAMPLES = 2**20  # decoded at once, over all channels, of which there may be 1,024
_MOST_PARTS = 1000  # tags, or multiplexed streams, at the beginning of a file
_UNKNOWN_FRAMES = 2**63 - 1  # libsndfile's value for an unknown length
_SEARCH_BYTES = 2**16  # padding, tags or broken frames before a header; an Ogg page has at most 65,307 bytes
_TAG_HEAD, _OGG_HEAD = 10, 27  # fixed bytes of an ID3v2 tag and of an Ogg page
# An MPEG frame of layer III, of any version, with or without checksum, at a valid bit rate.
_MPEG_FRAME = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x00-\xef].", re.DOTALL)
_INFO_NAMES = (b"Xing", b"Info")  # variable and constant bit rate
_TRIMMED = 2**14  # most frames trimmed at both ends: twelve bits each, and the decoder's delay


class DecodedFormat(NamedTuple):
    """The format of a file by the decoder. A frame is one sample of every channel."""

    rate: int  # frames per second
    frames: int


def probe_format(path: Path, file: BinaryIO) -> DecodedFormat:
    """Return rate and length of an open sound file that needs a decoder, by its chunks and its header.

    Raises DataError if it cannot be read, or its length is unknown.
    """
    find_chunks(path, file, _after_tags(file, 0))
    with _opened_sound(path, file) as sound:
        kind = "MP3" if sound.subtype.startswith("MPEG") else sound.format  # WAV and CAF files may hold MP3
        form = DecodedFormat(sound.samplerate, sound.frames)
    check_stated_length(path, file, kind, form.frames)
    return form


def decode(path: Path, file: BinaryIO, block_frames: int) -> Iterator[np.ndarray]:
    """Decode a file to blocks of (frames, channels) int64 with 32 bits full scale; only floating point is rounded.

    Raises DataError for a damaged file.
    """
    with _opened_sound(path, file) as sound:
        # soundfile seeks to the current position after every read. An MP3 decoder then loses bits that the next frame
        # borrows from previous ones.
        sound.seekable = lambda: False
        frames = min(block_frames, max(1, _BLOCK_SAMPLES // sound.channels))
        while len(block := sound.read(frames, dtype="float64", always_2d=True)):
            if np.isnan(block).any():
                raise DataError(f"{path}: holds samples that are not numbers (NaN); repair or exclude it")
            # Lossy formats may decode beyond full scale.
            yield np.clip(np.rint(block * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE - 1).astype(np.int64)


@contextmanager
def _opened_sound(path: Path, file: BinaryIO) -> Iterator[Any]:
    """Open a ``soundfile.SoundFile`` over an open file, which stays open.

    Raises DataError if the library is missing, and for a file that it cannot read, also later in the block.
    """
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the package is there, and libsndfile is not
        cause = " ".join(str(error).split())
        raise DataError(
            f"{path}: is not a WAV file of PCM or mu-law, and soundfile, which reads other sounds, cannot be imported "
            f'({cause}); pip install "longstride[audio]", or convert the file, such as with `ffmpeg -i IN OUT.wav`'
        ) from error
    sound = None
    try:
        file.seek(0)
        with soundfile.SoundFile(file) as sound:
            yield sound
    except TypeError as error:
        if sound is not None:
            raise
        # soundfile infers raw samples from a name in .raw, and then needs more arguments.
        raise DataError(
            f"{path}: does not declare its sound format ({error}); convert it, such as with "
            "`sox -r 44100 -c 2 -b 16 -e signed IN.raw OUT.wav`, or exclude it"
        ) from error
    except soundfile.LibsndfileError as error:
        words = " ".join(error.error_string.split()).rstrip(".")
        if sound is None:
            raise DataError(f"{path}: cannot be read as a sound ({words}); convert or exclude it") from error
        raise DataError(f"{path}: is damaged or cut short ({words}); fetch it again or exclude it") from error


def check_stated_length(path: Path, file: BinaryIO, kind: str, frames: int) -> None:
    """Check that the decoder's number of frames covers all sound of a file of that kind. Moves the file.

    Raises DataError if the number is a guess, or only of the first of several concatenated files.
    """
    if frames >= _UNKNOWN_FRAMES:
        raise DataError(f"{path}: does not declare its length; {_WRITE_AGAIN}")
    has_several = False
    if kind == "MP3":
        start = _after_tags(file, 0)
        head = read_at(file, start, _SEARCH_BYTES)
        first = _MPEG_FRAME.search(head)
        info = _info_in(head, first.start(), start) if first else None
        # A decoder that reads the header returns its frames; otherwise, as for other layers, it guesses.
        if info is None or not info[0] - _TRIMMED <= frames <= info[0]:
            mend = "write it again, such as with `ffmpeg -i IN -c copy OUT.mp3`, or exclude it"
            raise DataError(f"{path}: does not declare its length (an MP3 file without an Info header); {mend}")
        if info[1]:
            end = _after_tags(file, info[1])
            tail = read_at(file, end, _SEARCH_BYTES)
            has_several = any(_info_in(tail, frame.start(), end) for frame in _MPEG_FRAME.finditer(tail))
    elif kind == "OGG":
        tail = read_at(file, max(0, file.seek(0, 2) - _SEARCH_BYTES), _SEARCH_BYTES)
        last_page = tail.rfind(b"OggS\0", 0, len(tail) - _OGG_HEAD + 5)
        serials, place = set(), 0  # of the multiplexed streams at the beginning of the file
        for _ in range(_MOST_PARTS):
            head = read_at(file, place, _OGG_HEAD + 255)
            if len(head) < _OGG_HEAD or head[:4] != b"OggS" or not head[5] & 0x02:  # the page begins no stream
                break
            serials.add(head[14:18])
            place += _OGG_HEAD + head[26] + sum(head[_OGG_HEAD : _OGG_HEAD + head[26]])
        has_several = last_page >= 0 and tail[last_page:][14:18] not in serials
    if has_several:
        rule = "holds several sounds one after another, and only the first would be read"
        raise DataError(f"{path}: {rule}; split it, {_WRITE_AGAIN}")


def _after_tags(file: BinaryIO, place: int) -> int:
    """Skip the ID3 tags that begin at ``place``: one of version 1, then any number of version 2."""
    if read_at(file, place, 3) == b"TAG":
        place += 128
    for _ in range(_MOST_PARTS):
        head = read_at(file, place, _TAG_HEAD)
        if head[:3] != b"ID3" or len(head) < _TAG_HEAD:
            break
        size = 0
        for seven_bits in head[6:]:
            size = size << 7 | seven_bits & 0x7F
        place += _TAG_HEAD + size + (_TAG_HEAD if head[5] & 0x10 else 0)  # a footer repeats the head
    return place


def _info_in(buffer: bytes, place: int, start: int) -> tuple[int, int] | None:
    """Parse the Info header of the MPEG frame at a place of a buffer, which begins at ``start`` in the file.

    Returns the number of frames before trimming at both ends, and where the stream ends in the file, or 0 if unknown.
    """
    version_1, mono = bool(buffer[place + 1] & 0x08), buffer[place + 3] >> 6 == 3
    side_bytes = {(True, False): 32, (True, True): 17, (False, False): 17, (False, True): 9}[version_1, mono]
    for name in (place + 4 + side_bytes, place + 6 + side_bytes):  # the second is after a checksum
        if buffer[name : name + 4] in _INFO_NAMES:
            flags, count, size = (int.from_bytes(buffer[name + 4 * n : name + 4 * n + 4], "big") for n in (1, 2, 3))
            if not flags & 1:  # flags of the fields that are present
                return None
            return count * (1152 if version_1 else 576), start + place + size if flags & 2 else 0
    return None
