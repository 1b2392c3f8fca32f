"""WAV files of floats, A-law and ADPCM: read by soundfile, and the values are those of the standards."""

import io
import struct
import sys

import numpy as np
import pytest
import soundfile

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.wav import mulaw_encode
from tests.data_pipelines.modalities.test_audio import read, tone, wav
from tests.data_pipelines.modalities.test_chunks import chunk, stated
from tests.data_pipelines.modalities.test_sound import EXTRA, content, melody

FLOATS = [32, 64]


def floats(values: np.ndarray, bits: int) -> bytes:
    return b"".join(struct.pack("<f" if bits == 32 else "<d", value) for value in np.ravel(values))


def in_16_bits(values: np.ndarray) -> np.ndarray:
    """Convert numbers of full scale 1, (n,), to int16, rounded to the nearest and clipped."""
    return np.clip(np.floor(values * 2**15 + 0.5), -(2**15), 2**15 - 1).astype(np.int16)


def alaw_value(code: int) -> int:
    """Decode G.711's A-law in 16-bit units: even bits are inverted; 8 segments of 16 steps, the first two equal."""
    code ^= 0x55
    segment, step = code >> 4 & 7, code & 15
    magnitude = 2 * step + 1 if segment == 0 else (2 * step + 33) << (segment - 1)
    return 8 * magnitude if code & 0x80 else -8 * magnitude


@pytest.mark.parametrize("extensible", [False, True], ids=["plain", "extensible"])
@pytest.mark.parametrize("bits", FLOATS)
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_floats_are_the_sound_that_they_say(tmp_path, channels, bits, extensible):
    values = np.random.default_rng(0).uniform(-1, 1, (3000, channels)).astype(np.float32)
    found = read(
        tmp_path / "a.wav", wav(floats(values, bits), tag=3, bits=bits, channels=channels, extensible=extensible)
    )
    expected = in_16_bits(values.astype(np.float64).mean(axis=1))
    assert np.array_equal(np.frombuffer(found, np.uint8), mulaw_encode(expected))


@pytest.mark.parametrize("bits", FLOATS)
def test_floats_beyond_full_scale_are_clipped(tmp_path, bits):
    values = np.array([0, 1, -1, 1.5, -1.5, 1e30, -1e30, np.inf, -np.inf, 1e-30])
    expected = mulaw_encode(np.array([0, *[2**15 - 1, -(2**15)] * 4, 0]).astype(np.int16))
    assert read(tmp_path / "a.wav", wav(floats(values, bits), tag=3, bits=bits)) == expected.tobytes()


@pytest.mark.parametrize("bits", FLOATS)
def test_floats_that_are_no_numbers_are_refused(tmp_path, bits):
    with pytest.raises(DataError, match=r"a\.wav: holds samples that are not numbers \(NaN\)"):
        read(tmp_path / "a.wav", wav(floats(np.array([0, np.nan, 0]), bits), tag=3, bits=bits))


@pytest.mark.parametrize("extensible", [False, True], ids=["plain", "extensible"])
def test_alaw_is_the_standard_s_table(tmp_path, extensible):
    found = read(tmp_path / "a.wav", wav(bytes(range(256)), tag=6, bits=8, extensible=extensible))
    values = np.array([alaw_value(code) for code in range(256)], np.int16)
    assert [values.min(), values.max(), np.abs(values).min()] == [-32256, 32256, 8]
    assert found == mulaw_encode(values).tobytes()


def adpcm(kind: str, levels: list[int]) -> bytes:
    """Write a WAV file with an ADPCM block for each level, in which no difference is coded."""
    tag, block_bytes = {"IMA": 0x11, "Microsoft": 2}[kind], 256
    if kind == "IMA":  # the first frame, the step's number
        frames, extra = 2 * (block_bytes - 4) + 1, b""
        blocks = [struct.pack("<hBB", level, 0, 0) + bytes(block_bytes - 4) for level in levels]
    else:  # the predictor's number, the step, the second frame and the first; predictor 0 repeats the last frame
        frames = 2 * (block_bytes - 7) + 2
        coefficients = (256, 0, 512, -256, 0, 0, 192, 64, 240, 0, 460, -208, 392, -232)
        extra = struct.pack("<H14h", 7, *coefficients)
        blocks = [struct.pack("<Bhhh", 0, 16, level, level) + bytes(block_bytes - 7) for level in levels]
    form = struct.pack("<HHIIHHHH", tag, 1, 8000, 4055, block_bytes, 4, 2 + len(extra), frames) + extra
    return riff(form, chunk(b"fact", struct.pack("<I", frames * len(levels))), b"".join(blocks))


def riff(form: bytes, between: bytes, sound: bytes) -> bytes:
    body = b"WAVE" + chunk(b"fmt ", form) + between + chunk(b"data", sound)
    return chunk(b"RIFF", body)


@pytest.mark.parametrize(("kind", "frames"), [("IMA", 505), ("Microsoft", 500)])
def test_adpcm_is_what_its_blocks_say(tmp_path, kind, frames):
    levels = [0, 1000, -1000, 32767, -32768, 12345]
    whole = adpcm(kind, levels)
    expected = mulaw_encode(np.repeat(levels, frames).astype(np.int16)).tobytes()
    assert read(tmp_path / "a.wav", whole) == expected
    for damaged, rule in (
        (whole[:-1], "says 1536 bytes of sound and holds 1535"),
        (whole + whole, "holds several sounds one after another"),
        (stated(whole, 512), "says 512 bytes of sound, and 1024 bytes follow"),
        (stated(whole, 1500)[:-36], "1500 bytes of sound are not a multiple of the frame size, 256"),
    ):
        with pytest.raises(DataError, match=rule):
            read(tmp_path / "b.wav", damaged)


def test_mp3_within_wav_does_not_say_its_length(tmp_path):
    """The decoder's number of frames is a guess by the first bit rate."""
    file = io.BytesIO()
    soundfile.write(file, melody(9000, 8000)[:, 0], 8000, format="MP3", subtype="MPEG_LAYER_III")
    mp3 = file.getvalue()
    frames = mp3[mp3.index(mp3[:2], 4) :]  # without the frame that says the length
    form = struct.pack("<HHIIHHHHIHHH", 0x55, 1, 8000, 1000, 1, 0, 12, 1, 2, 72, 1, 0)
    path = tmp_path / "a.wav"
    path.write_bytes(riff(form, b"", frames))
    assert soundfile.info(path).subtype == "MPEG_LAYER_III"
    with pytest.raises(DataError, match=r"a\.wav: does not declare its length .*`ffmpeg -i IN -c copy OUT\.mp3`"):
        content(path)


@pytest.mark.parametrize(("tag", "bits"), [(3, 32), (3, 64), (6, 8)])
@pytest.mark.parametrize("extensible", [False, True], ids=["plain", "extensible"])
def test_without_soundfile_the_extra_is_named_and_pcm_is_read(tmp_path, monkeypatch, tag, bits, extensible):
    for name in ("soundfile", "soxr"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.wav").write_bytes(wav(bytes(400), tag=tag, bits=bits, extensible=extensible))
    with pytest.raises(DataError, match=rf"a\.wav: is not a WAV file of PCM or mu-law, and soundfile, .*; {EXTRA}, or"):
        build([tmp_path / "source"], tmp_path / "data", modality="audio", validation_fraction=0)
    assert not (tmp_path / "data").exists()
    for number, form in enumerate([{"bits": 8}, {"bits": 24, "extensible": True}, {"tag": 7, "bits": 8}]):
        assert len(read(tmp_path / f"{number}.wav", wav(bytes(300), **form))) == 300 * 8 // form["bits"]


def test_a_folder_of_every_encoding_is_one_set(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    sound = tone(1000)
    (source / "a.wav").write_bytes(wav(sound.tobytes()))
    (source / "b.wav").write_bytes(wav(floats(sound / 2**15, 32), tag=3, bits=32))
    (source / "c.wav").write_bytes(wav(floats(sound / 2**15, 64), tag=3, bits=64, extensible=True))
    (source / "d.wav").write_bytes(wav(bytes(256), tag=6, bits=8))
    manifest = build([source], tmp_path / "data", modality="audio", validation_fraction=0)
    assert (manifest.splits["train"].documents, manifest.splits["train"].content_bytes) == (4, 3256)
    found = [content(source / name) for name in ("a.wav", "b.wav", "c.wav")]
    assert found == [mulaw_encode(sound).tobytes()] * 3
