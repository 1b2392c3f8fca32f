"""Whether what MP3, Ogg and FLAC files state of their length is all of it: a build plans by that, before it decodes.

Of an MP3 file without an Info header the decoder guesses a length from the first bit rate, and of files laid end to end
it sees the first alone. Either would be a shorter sound, without an error.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from longstride.data_pipelines.errors import DataError

_UNKNOWN_FRAMES = 2**63 - 1  # libsndfile's word for a file that does not say
_LOOKED_AT = 2**16  # bytes: of padding, tags or broken frames before a header; an Ogg page has at most 65,307
_TAG_HEAD, _OGG_HEAD = 10, 27  # bytes of an ID3v2 tag, and of an Ogg page, before what is of any length
# An MPEG frame of layer III, of any version, with or without check sum, at a bit rate that exists.
_MPEG_FRAME = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x00-\xef].", re.DOTALL)
_INFO_NAMES = (b"Xing", b"Info")  # the second of files with one bit rate
_TRIMMED = 2**14  # frames that a header may have taken off at both ends: twelve bits each, and what a decoder adds


class _Info(NamedTuple):
    """What an Info header says."""

    frames: int  # of sound, with what is taken off at the ends
    end: int  # in the file, of the last byte that it speaks of; 0 where it does not say


def check_stated_length(path: Path, file: BinaryIO, kind: str, frames: int) -> None:
    """Whether the frames that the decoder has found in a file of that kind are all of its sound. The file is moved.

    Raises DataError where they are a guess, or those of the first of several files laid end to end.
    """
    if frames >= _UNKNOWN_FRAMES:
        raise DataError(
            f"{path}: does not say how long it is; write it anew, such as with `ffmpeg -i IN OUT.flac`, or exclude it"
        )
    if kind == "MP3":
        _check_mp3(path, file, frames)
    elif kind == "OGG":
        _check_ogg(path, file)


def _check_mp3(path: Path, file: BinaryIO, frames: int) -> None:
    start = _behind_tags(file, 0)
    head = _bytes_at(file, start, _LOOKED_AT)
    first = _MPEG_FRAME.search(head)
    info = _info_in(head, first.start(), start) if first else None
    # A decoder that knows the header finds its frames; one that does not, as of other layers, guesses.
    if info is None or not info.frames - _TRIMMED <= frames <= info.frames:
        raise DataError(
            f"{path}: does not say how long it is (an MP3 file without an Info header); write it anew, such as with "
            "`ffmpeg -i IN -c copy OUT.mp3`, or exclude it"
        )
    if info.end:
        behind = _behind_tags(file, info.end)
        tail = _bytes_at(file, behind, _LOOKED_AT)
        if any(_info_in(tail, found.start(), behind) for found in _MPEG_FRAME.finditer(tail)):
            raise _several(path)


def _check_ogg(path: Path, file: BinaryIO) -> None:
    last = _last_ogg_serial(file)
    if last is not None and last not in set(_first_ogg_serials(file)):
        raise _several(path)


def _several(path: Path) -> DataError:
    return DataError(
        f"{path}: several sounds laid end to end, of which only the first would be read; split it, write it anew, such "
        "as with `ffmpeg -i IN OUT.flac`, or exclude it"
    )


def _bytes_at(file: BinaryIO, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)


def _behind_tags(file: BinaryIO, place: int) -> int:
    """Where the ID3 tags that begin there end: of version 2 as many as there are, with pictures; of version 1 one."""
    if _bytes_at(file, place, 3) == b"TAG":
        place += 128
    while (head := _bytes_at(file, place, _TAG_HEAD))[:3] == b"ID3" and len(head) == _TAG_HEAD:
        size = 0
        for seven_bits in head[6:]:
            size = size << 7 | seven_bits & 0x7F
        place += _TAG_HEAD + size + (_TAG_HEAD if head[5] & 0x10 else 0)  # a footer repeats the head
    return place


def _info_in(buffer: bytes, place: int, start: int) -> _Info | None:
    """The Info header in the MPEG frame at a place of a buffer, which begins at ``start`` in the file; None: none."""
    version_1, mono = bool(buffer[place + 1] & 0x08), buffer[place + 3] >> 6 == 3
    side_bytes = {(True, False): 32, (True, True): 17, (False, False): 17, (False, True): 9}[version_1, mono]
    for name in (place + 4 + side_bytes, place + 6 + side_bytes):  # a check sum stands before the second
        if buffer[name : name + 4] in _INFO_NAMES:
            flags, count, size = (int.from_bytes(buffer[name + 4 * n : name + 4 * n + 4], "big") for n in (1, 2, 3))
            if not flags & 1:  # of what each flag speaks follows in their order
                return None
            return _Info(count * (1152 if version_1 else 576), start + place + size if flags & 2 else 0)
    return None


def _first_ogg_serials(file: BinaryIO) -> Iterator[int]:
    """Of the streams that begin at the beginning: side by side in one file."""
    place = 0
    while True:
        head = _bytes_at(file, place, _OGG_HEAD + 255)
        if len(head) < _OGG_HEAD or head[:4] != b"OggS" or not head[5] & 0x02:  # this one begins no stream
            return
        yield _ogg_serial(head)
        segments = head[26]
        place += _OGG_HEAD + segments + sum(head[_OGG_HEAD : _OGG_HEAD + segments])


def _last_ogg_serial(file: BinaryIO) -> int | None:
    """Of the last page; None where what may be its end is none."""
    tail = _bytes_at(file, max(0, file.seek(0, 2) - _LOOKED_AT), _LOOKED_AT)
    place = tail.rfind(b"OggS\0", 0, len(tail) - _OGG_HEAD + 5)
    return None if place < 0 else _ogg_serial(tail[place:])


def _ogg_serial(page: bytes) -> int:
    return int.from_bytes(page[14:18], "little")
