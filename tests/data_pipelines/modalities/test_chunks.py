"""Files that hold more or less sound than their first chunk states are refused, not ones with other chunks behind."""

import io
import struct

import numpy as np
import pytest
import soundfile

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.wav import mulaw_encode
from tests.data_pipelines.modalities.test_audio import pcm, read, tone, wav
from tests.data_pipelines.modalities.test_sound import content

FRAMES = 2000
SOUND = tone(FRAMES)
ENCODINGS = {
    "8 bits": {"bits": 8},
    "16 bits": {"bits": 16},
    "24 bits": {"bits": 24},
    "32 bits": {"bits": 32},
    "extensible": {"bits": 24, "extensible": True},
    "mu-law": {"tag": 7, "bits": 8},
    "float": {"tag": 3, "bits": 32},
    "float, extensible": {"tag": 3, "bits": 32, "extensible": True},
    "double": {"tag": 3, "bits": 64},
    "A-law": {"tag": 6, "bits": 8},
}
NOISE = np.random.default_rng(0).bytes
FLAWS = {
    "a recorder was stopped": lambda sound, whole: stated(whole, 0),
    "a recorder was stopped in silence": lambda sound, whole: stated(whole, 0)[: -len(sound)] + bytes(len(sound)),
    "half the size": lambda sound, whole: stated(whole, len(sound) // 2),
    "half the size, then silence": lambda sound, whole: stated(
        whole[: -len(sound) // 2] + bytes(len(sound) // 2), len(sound) // 2
    ),
    "a frame too many": lambda sound, whole: stated(whole, len(sound) - 8),
    "bytes of no chunk": lambda sound, whole: whole + NOISE(100),
    "a line of text": lambda sound, whole: whole + b"written by a recorder\n",
    "a tag that is no chunk": lambda sound, whole: whole + b"TAG" + bytes(125),
    "a chunk that is cut short": lambda sound, whole: whole + chunk(b"LIST", b"INFO" + bytes(100))[:-10],
    "sound behind a chunk": lambda sound, whole: whole + chunk(b"LIST", b"INFO") + sound,
}
SEVERAL = {
    "two files": lambda sound, whole: whole + whole,
    "three files": lambda sound, whole: 3 * whole,
    "two files with tags": lambda sound, whole: whole + chunk(b"LIST", b"INFO") + whole,
    "another kind of file": lambda sound, whole: whole + b"RF64" + whole[4:],
    "an empty file and one": lambda sound, whole: stated(whole, 0)[: -len(sound)] + whole,
    "two chunks of sound": lambda sound, whole: whole + chunk(b"data", sound),
    "two chunks of sound, one empty": lambda sound, whole: whole + chunk(b"data", b""),
    "an empty chunk and one of sound": lambda sound, whole: stated(whole, 0)[: -len(sound)] + chunk(b"data", sound),
    "chunks of sound with tags between": lambda sound, whole: whole + chunk(b"id3 ", b"ID3") + chunk(b"data", sound),
}
UNKNOWN = [2**32 - 1, 2**31 - 1, 0x7FFFF000, 0x7FFFFFFF + 1]


def chunk(name: bytes, content: bytes, pad: bool = True) -> bytes:
    return name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2 if pad else 0)


def stated(whole: bytes, size: int) -> bytes:
    """Write a WAV file that states another size of its sound."""
    place = whole.index(b"data") + 4
    return whole[:place] + struct.pack("<I", size) + whole[place + 4 :]


def sound_of(encoding: str) -> bytes:
    """Make an even number of bytes of sound."""
    form = ENCODINGS[encoding]
    if form.get("tag") == 3:
        return (SOUND / 2**15).astype(f"<f{form['bits'] // 8}").tobytes()
    return mulaw_encode(SOUND).tobytes() if "tag" in form else pcm(SOUND.astype(int) >> 8, form["bits"])


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("flaw", FLAWS)
def test_wav_that_goes_on_after_its_sound_is_refused(tmp_path, flaw, encoding):
    sound = sound_of(encoding)
    whole = wav(sound, **ENCODINGS[encoding])
    assert len(read(tmp_path / "whole.wav", whole)) == FRAMES
    with pytest.raises(DataError, match=r"\d+ bytes of sound, and \d+ bytes follow that are not .*`ffmpeg") as caught:
        read(tmp_path / "a.wav", FLAWS[flaw](sound, whole))
    assert str(caught.value).startswith(f"{tmp_path / 'a.wav'}: says") and "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("flaw", SEVERAL)
def test_wav_of_several_sounds_is_refused(tmp_path, flaw, encoding):
    sound = sound_of(encoding)
    damaged = SEVERAL[flaw](sound, wav(sound, **ENCODINGS[encoding]))
    with pytest.raises(DataError, match=r"a\.wav: holds several sounds one after.*; split it at byte \d+") as caught:
        read(tmp_path / "a.wav", damaged)
    place = int(str(caught.value).split("at byte ")[1].split(",")[0])
    assert damaged[place : place + 4] in (b"RIFF", b"RF64", b"data") and place > damaged.index(b"data")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", UNKNOWN)
def test_wav_of_a_size_that_was_not_known_is_refused(tmp_path, size, encoding):
    """A pipe leaves such a file. It may be incomplete."""
    with pytest.raises(DataError, match=rf"says {size} bytes of sound and holds \d+: .*written to a pipe; .*`ffmpeg"):
        read(tmp_path / "a.wav", stated(wav(sound_of(encoding), **ENCODINGS[encoding]), size))


def test_wav_of_more_than_4_gib_is_refused(tmp_path):
    """Its size is stated modulo 2**32."""
    path = tmp_path / "a.wav"
    path.write_bytes(wav(bytes(FRAMES)))
    with path.open("r+b") as file:
        file.truncate(2**32 + path.stat().st_size)
    with pytest.raises(DataError, match=rf"says {FRAMES} bytes of sound, and {2**32} bytes follow"):
        content(path)


BEHIND = [
    chunk(name, bytes(size)) for name in (b"LIST", b"id3 ", b"bext", b"fact", b"cue ", b"_PMX") for size in (0, 7, 30)
]


@pytest.mark.parametrize("behind", [*BEHIND, b"".join(BEHIND), chunk(b"LIST", b"odd", pad=False), b"\0", bytes(7)])
@pytest.mark.parametrize("frames", [0, 99, 100])
@pytest.mark.parametrize("bits", [8, 16])
def test_wav_with_other_chunks_behind_its_sound_is_read(tmp_path, bits, frames, behind):
    """A sound of odd size is padded by a byte, which may be missing at the end of the file."""
    values = SOUND[:frames].astype(int) >> 8 << 8
    whole = wav(pcm(values >> 8 if bits == 8 else values, bits), bits=bits)
    expected = mulaw_encode(values.astype(np.int16)).tobytes()
    assert read(tmp_path / "a.wav", whole + behind) == expected
    unpadded = whole[: len(whole) - frames % 2] if bits == 8 else whole
    assert read(tmp_path / "b.wav", unpadded) == expected


def test_wav_that_is_refused_ends_a_build_and_an_empty_one_does_not(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.wav").write_bytes(wav(SOUND.tobytes()))
    (source / "b.wav").write_bytes(wav(b"") + chunk(b"LIST", b"INFO"))
    manifest = build([source], tmp_path / "data", modality="audio", validation_fraction=0)
    assert manifest.splits["train"].documents == 1 and manifest.made["left_out"]["empty_files"] == 1
    (source / "b.wav").write_bytes(stated(wav(SOUND.tobytes()), 0))
    with pytest.raises(DataError, match=r"b\.wav: says 0 bytes of sound, and 4000 bytes follow"):
        build([source], tmp_path / "again", modality="audio", validation_fraction=0)
    assert not (tmp_path / "again").exists()


# Other files of chunks: name and bytes of what holds the sound's size, in which order, and what it counts beside it.
CONTAINERS = {
    "RF64": (b"ds64", 16, "<Q"),
    "AIFF": (b"SSND", 4, ">I"),
    "CAF": (b"data", 4, ">Q"),
    "W64": (b"data", 16, "<Q"),
    "SVX": (b"BODY", 4, ">I"),
    "AU": (b".snd", 8, ">I"),
    "WAV": (b"data", 4, ">I"),  # RIFX, as soundfile writes it in big-endian order
}


def contained(kind: str) -> bytes:
    file = io.BytesIO()
    endian = "BIG" if kind == "WAV" else "FILE"
    soundfile.write(file, SOUND, 8000, format=kind, subtype="PCM_16", endian=endian)
    return file.getvalue()


@pytest.mark.parametrize("kind", CONTAINERS)
def test_other_files_of_chunks_hold_the_sound_that_they_say(tmp_path, kind):
    whole = contained(kind)
    path = tmp_path / ("a.wav" if kind in ("RF64", "WAV") else f"a.{kind.lower()}")
    assert read(path, whole) == mulaw_encode(SOUND).tobytes()
    name, distance, form = CONTAINERS[kind]
    place = whole.index(name) + distance
    (size,) = struct.unpack_from(form, whole, place)
    assert 2 * FRAMES <= size <= 2 * FRAMES + 24
    for less in (2 * FRAMES // 2, size - 24):
        patched = bytearray(whole)
        struct.pack_into(form, patched, place, size - less)
        with pytest.raises(DataError, match=r"says \d+ bytes of sound, and \d+ bytes follow that are not a chunk"):
            read(path, bytes(patched))
    with pytest.raises(DataError, match=r"says \d+ bytes of sound and holds \d+: it is cut short"):
        read(path, whole[:-FRAMES])
    with pytest.raises(DataError, match=r"holds several sounds one after another|bytes follow that are not a chunk"):
        read(path, whole + whole)
    with pytest.raises(DataError, match=r"holds several sounds one after another|bytes follow that are not a chunk"):
        read(path, b"ID3\x03\0\0\0\0\0\x04" + bytes(4) + whole + whole)  # tags before the file are passed over


def test_au_file_without_a_size_ends_with_its_sound(tmp_path):
    """The format allows this."""
    whole = contained("AU")
    assert read(tmp_path / "a.au", whole[:8] + b"\xff" * 4 + whole[12:]) == mulaw_encode(SOUND).tobytes()


@pytest.mark.parametrize(("kind", "name"), [("AIFF", b"ANNO"), ("RF64", b"LIST"), ("CAF", b"info"), ("WAV", b"LIST")])
def test_other_chunks_behind_the_sound_of_other_files_are_passed_over(tmp_path, kind, name):
    head = name + struct.pack({"AIFF": ">I", "RF64": "<I", "CAF": ">Q", "WAV": ">I"}[kind], 6)
    path = tmp_path / ("a.wav" if kind in ("RF64", "WAV") else f"a.{kind.lower()}")
    assert read(path, contained(kind) + head + bytes(6)) == mulaw_encode(SOUND).tobytes()
