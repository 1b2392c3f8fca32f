"""Find the sound of a file that is made of chunks, and check that it is all the sound in the file.

WAV, RF64, Wave64, AIFF, IFF and CAF files are made of chunks, and an AU file is a single one. A reader takes what the
first chunk of sound states. It states too little if a recorder was stopped before it wrote the size, if the size went
past 4 GiB, or if `cat` laid files end to end. The rest would be lost without an error.
"""

from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from longstride.data_pipelines.errors import DataError

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
_MAGICS = tuple(layout.magic for layout in _LAYOUTS)
_REPAIR = "write it anew or exclude it"
_REPAIR_WAV = (
    "write it anew: `ffmpeg -ignore_length 1 -i IN.wav -c copy -rf64 auto OUT.wav` takes all to its end as sound, and "
    "without `-ignore_length 1` what it says"
)


def find_chunks(path: Path, file: BinaryIO, start: int = 0) -> dict[bytes, tuple[int, int]]:
    """Return offset and size of each chunk up to the sound, by name; an empty dict for a file without chunks.

    ``start`` is where the format begins, after tags. Moves the file.

    Raises:
        DataError: the sound is cut short, or something follows it that is not a chunk without sound.
    """
    file_bytes = file.seek(0, 2)
    magic = _read_at(file, start, 12)
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
        head = _read_at(file, place, head_bytes)
        if len(head) < head_bytes:
            break
        name, offset = head[:name_bytes], place + head_bytes
        size = int.from_bytes(head[name_bytes:], layout.order)
        if layout.counts_head:
            size = max(0, size - head_bytes)
        if sound_bytes is None:
            if name in layout.sound:
                if size == 2**32 - 1 and b"ds64" in chunks:
                    size = int.from_bytes(_read_at(file, chunks[b"ds64"][0] + 8, 8), "little")
                _check_size(path, size, file_bytes - offset, repair)
                sound_bytes = size
            chunks.setdefault(name, (offset, size))
        elif name in layout.sound or name.startswith(_MAGICS):
            raise DataError(
                f"{path}: several sounds laid end to end, of which only the first would be read; split it at byte "
                f"{place}, or exclude it"
            )
        elif offset + size > file_bytes or (name_bytes == 4 and not all(0x20 <= byte < 0x7F for byte in name)):
            break
        place = offset + size + -size % layout.multiple
    else:
        raise DataError(f"{path}: has more than {_MOST_CHUNKS:,} chunks; write it anew or exclude it")
    if sound_bytes is not None:
        _check_end(path, file, sound_bytes, place, repair)
    return chunks


def _check_size(path: Path, size: int, present: int, repair: str) -> None:
    """Raise DataError if a file holds less sound than it states."""
    if size > present:
        raise DataError(
            f"{path}: says {size} bytes of sound and holds {max(0, present)}: it is cut short, or written to a pipe; "
            f"fetch it again, or {repair}"
        )


def _check_end(path: Path, file: BinaryIO, size: int, end: int, repair: str) -> None:
    """Raise DataError if a file continues after its last chunk with more than a few bytes of padding."""
    extra_bytes = file.seek(0, 2) - end
    if extra_bytes >= _HEAD_BYTES or _read_at(file, end, _HEAD_BYTES).strip(b"\0"):
        raise DataError(
            f"{path}: says {size} bytes of sound, and {extra_bytes} bytes follow that are no chunk: they may be sound, "
            f"of a recorder that was stopped or a file of more than 4 GiB; {repair}"
        )


def _read_at(file: BinaryIO, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)
