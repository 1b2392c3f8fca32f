"""Sounds of other formats and rates: the same bytes in whatever pieces they are asked for, and from any process."""

import io
import math
import sys
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES
from longstride.data_pipelines.modalities.audio import BLOCK_FRAMES, frames_at, resample
from longstride.data_pipelines.modalities.decoder import DecodedFormat, check_stated_length, decode
from longstride.data_pipelines.modalities.wav import mulaw_decode, mulaw_encode
from longstride.data_pipelines.order.evaluation import split_bytes
from longstride.data_pipelines.shards.verify import verify
from tests.data_pipelines.modalities.test_audio import pcm, tone, wav
from tests.harness.data.builds import OutOfOrder, folder_bytes

AUDIO = MODALITIES["audio"]
EXTRA = r'pip install "longstride\[audio\]"'
FORMATS = {
    "flac": ("FLAC", "PCM_16"),
    "ogg": ("OGG", "VORBIS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "opus": ("OGG", "OPUS"),
}


def melody(frames: int, rate: int = 44_100) -> np.ndarray:
    """Make two varying voices below full scale, (frames, 2) float64."""
    time = np.arange(frames) / rate
    left = 0.5 * np.sin(2 * np.pi * (440 * time + 5 * np.sin(time))) + 0.2 * np.sin(2 * np.pi * 1200 * time)
    return np.stack([left, 0.3 * np.sin(2 * np.pi * 220 * time)], axis=1)


def written(path: Path, samples: np.ndarray, rate: int = 44_100) -> Path:
    kind, subtype = FORMATS[path.suffix[1:]]
    soundfile.write(path, samples, rate, format=kind, subtype=subtype)
    return path


def mp3(path: Path, samples: np.ndarray, rate: int = 44_100) -> bytes:
    """Encode at a variable bit rate, so that frames borrow bits from previous ones."""
    options = {"format": "MP3", "subtype": "MPEG_LAYER_III", "bitrate_mode": "VARIABLE", "compression_level": 0.5}
    soundfile.write(path, samples, rate, **options)
    return path.read_bytes()


def content(path: Path, rate: int | None = None) -> bytes:
    """Read a file at its own rate, or at another."""
    with path.open("rb") as file:
        properties = AUDIO.settle(path, file, {} if rate is None else {"rate": rate})
        size = AUDIO.measure(path, properties)
        found = AUDIO.open(path, file, properties).read(0, size + 1)
    assert len(found) == size
    return found


def piecewise(path: Path, properties: dict[str, int], size: int, step: int) -> bytes:
    """Read a file in pieces from one opening."""
    with path.open("rb") as file:
        opened = AUDIO.open(path, file, properties)
        return b"".join(opened.read(start, step) for start in range(0, size, step))


@pytest.mark.parametrize(("bits", "subtype"), [(16, "PCM_16"), (24, "PCM_24"), (8, "PCM_S8")])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_flac_is_the_bytes_of_its_wav(tmp_path, bits, subtype, channels):
    """A lossless file has the same integers, and so the same mean."""
    top = 2 ** (bits - 1)
    values = np.random.default_rng(bits).integers(-top, top, (5000, channels))
    values[:2] = [[-top] * channels, [top - 1] * channels]
    (tmp_path / "a.wav").write_bytes(wav(pcm(values, bits), channels=channels, bits=bits))
    scaled = (values << (32 - bits)).astype(np.int32)
    soundfile.write(tmp_path / "a.flac", scaled, 8000, format="FLAC", subtype=subtype)
    assert content(tmp_path / "a.flac") == content(tmp_path / "a.wav")


@pytest.mark.parametrize("name", ["a.flac", "a.ogg", "a.mp3", "a.opus", "a.wav"])
@pytest.mark.parametrize("rate", [None, 12_000], ids=["own rate", "resampled"])
def test_sound_is_the_same_in_any_pieces(tmp_path, name, rate):
    samples = melody(300_000, 48_000)
    if name == "a.wav":
        path = tmp_path / name
        path.write_bytes(wav(pcm(np.rint(samples * 2**15).astype(int), 16), channels=2, rate=48_000))
    else:
        path = written(tmp_path / name, samples, 48_000)
    whole = content(path, rate)
    properties = {"rate": rate, "resampled": 1} if rate else {"rate": 48_000}
    for step in (65_536, 1009, len(whole) - 1):
        assert piecewise(path, properties, len(whole), step) == whole
    with path.open("rb") as file:  # back and forth
        opened = AUDIO.open(path, file, properties)
        for start in (70_000, 10, 70_000, 0, len(whole) - 3, len(whole)):
            assert opened.read(start, 5000) == whole[start : start + 5000]


@pytest.mark.parametrize("name", ["a.mp3", "a.ogg", "a.opus", "a.flac"])
def test_decoding_in_blocks_is_decoding_at_once(tmp_path, name):
    """A decoder that seeks after a block loses the state that the next one needs."""
    noise = np.random.default_rng(0).standard_normal((140_000, 2)) * (np.arange(140_000) // 9000 % 2)[:, None]
    samples = 0.8 * melody(140_000, 48_000) + 0.05 * noise
    path = tmp_path / name
    if name == "a.mp3":
        mp3(path, samples, 48_000)
    else:
        written(path, samples, 48_000)
    with path.open("rb") as file:
        found = np.concatenate(list(decode(path, file, BLOCK_FRAMES)))
    whole, _ = soundfile.read(path, always_2d=True)
    assert np.array_equal(found, np.clip(np.rint(whole * 2**31), -(2**31), 2**31 - 1).astype(np.int64))


@pytest.mark.parametrize("rate", [44_100, 48_000, 8000, 11_025])
def test_resampled_tone_keeps_its_pitch_and_loudness(tmp_path, rate):
    """A tone far below both limits stays the same, up to the steps of mu-law; its ends are ignored."""
    frames = rate * 2
    samples = np.rint(16_000 * np.sin(2 * np.pi * 500 * np.arange(frames) / rate)).astype(int)
    (tmp_path / "a.wav").write_bytes(wav(pcm(samples, 16), rate=rate))
    found = mulaw_decode(np.frombuffer(content(tmp_path / "a.wav", 12_000), np.uint8)).astype(float)
    expected = 16_000 * np.sin(2 * np.pi * 500 * np.arange(24_000) / 12_000)
    assert len(found) == 24_000
    # Half of G.711's largest step in reach of the tone, which is 1024 wide from 15,996 on and 512 below.
    assert np.abs(found - expected)[200:-200].max() <= 512 + 1


PAIRS = [*permutations((8000, 11_025, 12_000, 22_050, 44_100, 48_000, 96_000), 2)]


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [
        *(pytest.param(*pair, marks=[pytest.mark.campaign] if i % 5 else []) for i, pair in enumerate(PAIRS)),
        (7919, 4421),
        (100, 25_600),
    ],
)
def test_resampled_sound_is_libsoxrs_and_has_the_frames_that_were_planned(rate, wanted):
    """Some lengths fall between two frames; libsoxr rounds some of them up and some down."""
    halves = rate // math.gcd(rate, wanted) // 2
    for frames in {*range(4), halves, 3 * halves, 5 * halves, 60, 997, 3440}:
        samples = np.random.default_rng(frames).standard_normal(frames)
        planned = math.floor(Fraction(frames * wanted, rate) + Fraction(1, 2))
        assert frames_at(Path("a"), DecodedFormat(rate, frames), wanted) == planned
        expected = soxr.resample(samples, rate, wanted, quality="VHQ") if frames else np.empty(0)
        assert planned - 1 <= len(expected) <= planned
        cut = [[samples[start : start + step] for start in range(0, frames, step)] for step in (63, 1000, 4000)]
        first, *others = [np.concatenate([np.empty(0), *resample(iter(blocks), rate, wanted)]) for blocks in cut]
        assert len(first) == planned and np.array_equal(first[: len(expected)], expected)
        assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("rate", "wanted", "frames"), [(48_000, 44_100, 3440), (12_000, 44_100, 60), (48_000, 12_000, 3442)]
)
def test_sound_is_built_at_another_rate_unless_it_is_short(tmp_path, rate, wanted, frames):
    path = tmp_path / "a.wav"
    path.write_bytes(wav(tone(frames).tobytes(), rate=rate))
    assert len(content(path, wanted)) == math.floor(Fraction(frames * wanted, rate) + Fraction(1, 2))
    with path.open("rb", buffering=0) as file:
        opened = AUDIO.open(path, file, {"rate": wanted, "resampled": 1})
        path.write_bytes(path.read_bytes()[:-20])  # ten frames
        with pytest.raises(DataError, match=r"a\.wav: says \d+ frames .* and holds \d+: it is cut short"):
            opened.read(0, frames * wanted)


def test_audio_folder_of_many_formats_is_brought_to_one_rate(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number, (name, rate) in enumerate((("a.flac", 44_100), ("b.ogg", 22_050), ("c.mp3", 48_000))):
        written(source / name, melody(100_000 + number, rate), rate)
    samples = tone(60_000)
    (source / "d.wav").write_bytes(wav(samples.tobytes(), rate=12_000))
    (source / "e.wav").write_bytes(wav(tone(400_000).tobytes(), rate=96_000))
    options = {"modality": "audio", "properties": {"rate": 12_000}, "validation_fraction": 0, "shard_bytes": 70_000}
    manifest = build([source], tmp_path / "data", **options)
    assert manifest.properties == {"rate": 12_000, "resampled": 1}
    assert manifest.splits["train"].documents == 5 and len(manifest.splits["train"].shards) > 2
    assert verify(tmp_path / "data") == []
    train = b"".join(split_bytes(tmp_path / "data", "train"))
    assert mulaw_encode(samples).tobytes() in train  # a WAV file of that rate is taken as before
    for path in source.iterdir():
        assert content(path, 12_000) in train
    build([source], tmp_path / "again", crew=OutOfOrder(), **options)  # long sounds are begun amidst, and gone back in
    assert folder_bytes(tmp_path / "again") == folder_bytes(tmp_path / "data")


def test_sound_of_an_unlikely_rate_is_refused(tmp_path):
    (tmp_path / "a.wav").write_bytes(wav(tone(50).tobytes(), rate=2**30))
    with pytest.raises(DataError, match=r"a\.wav: has 1073741824 Hz, too far from 12000 to be resampled"):
        content(tmp_path / "a.wav", 12_000)


@pytest.mark.parametrize("name", ["a.flac", "a.mp3"])
def test_sound_that_is_cut_short_is_told(tmp_path, name):
    """The file states its length, or its decoder finds the cut. A part of an Ogg file is valid."""
    whole = written(tmp_path / name, melody(200_000)).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"{name}: .*cut short.* fetch it again or exclude it") as caught:
        content(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("channels", "rate"), [(1, 44_100), (2, 22_050), (1, 22_050), (2, 8000)])
def test_mp3_with_a_header_is_taken_whatever_stands_before_it(tmp_path, channels, rate):
    """The header is elsewhere in mono, and at low rates; tags may precede and follow it."""
    samples = melody(5000, rate)[:, :channels]
    whole = mp3(tmp_path / "a.mp3", samples, rate)
    tag = b"ID3\x03\0\0" + bytes([0, 8, 0, 1]) + b"\xff\xfb" * 2**16 + b"\0"
    (tmp_path / "b.mp3").write_bytes(tag + whole + b"TAG" + bytes(125))
    assert content(tmp_path / "b.mp3") == content(tmp_path / "a.mp3")
    assert len(content(tmp_path / "a.mp3")) == 5000


@pytest.mark.parametrize("change", ["no header", "no count in it", "a VBRI header"])
def test_mp3_that_does_not_say_its_length_is_refused(tmp_path, change):
    """The decoder guesses: after a quiet beginning at a low bit rate, a far shorter sound."""
    samples = np.concatenate([0.001 * melody(44_100), melody(44_100)])
    whole = bytearray(mp3(tmp_path / "a.mp3", samples))
    assert whole[36:40] == b"Xing"
    if change == "no header":
        del whole[: whole.index(b"\xff\xfb", 4)]
    elif change == "no count in it":
        whole[40:44] = bytes(4)
    else:
        whole[36:62] = b"VBRI" + bytes(10) + bytes(whole[44:48]) + bytes(8)
    (tmp_path / "a.mp3").write_bytes(whole)
    assert soundfile.info(tmp_path / "a.mp3").frames not in range(88_200 - 1152, 88_200 + 2 * 1152)
    with pytest.raises(DataError, match=r"a\.mp3: does not declare its length \(an MP3 .* `ffmpeg -i IN -c copy"):
        content(tmp_path / "a.mp3")


def test_flac_that_does_not_say_its_length_is_refused_before_anything_is_made(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    whole = bytearray(written(source / "a.flac", melody(5000)).read_bytes())
    whole[21] &= 0xF0  # the 36 bits of STREAMINFO's total
    whole[22:26] = bytes(4)
    (source / "a.flac").write_bytes(whole)
    with pytest.raises(DataError, match=r"a\.flac: does not declare its length; write it again, .* or exclude it$"):
        build([source], tmp_path / "data", modality="audio", validation_fraction=0)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("frames", [4095, 4096, 8192, 100_001])
def test_flac_files_laid_end_to_end_are_refused(tmp_path, frames):
    path = written(tmp_path / "a.flac", melody(frames))
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(DataError, match=r"a\.flac: is damaged or cut short \(.*; fetch it again or exclude it"):
        content(path)


@pytest.mark.parametrize("name", ["a.ogg", "a.opus", "a.mp3"])
@pytest.mark.parametrize("between", [b"", b"TAG" + bytes(125)], ids=["bare", "tagged"])
def test_sounds_laid_end_to_end_are_refused(tmp_path, name, between):
    first, second = (written(tmp_path / f"{n}{name}", melody(9000, 48_000), 48_000).read_bytes() for n in "12")
    both = tmp_path / name
    both.write_bytes(first + between * (name == "a.mp3") + second)
    assert soundfile.info(both).frames == 9000  # the decoder sees the first alone
    with pytest.raises(DataError, match=rf"{name}: holds several sounds one after.*; split it, write it") as caught:
        content(both)
    assert "\n" not in str(caught.value)


def test_ogg_streams_side_by_side_are_one_sound(tmp_path):
    """The last page may belong to any stream of the beginning."""
    whole = written(tmp_path / "a.ogg", melody(9000)).read_bytes()
    head = 27 + whole[26] + sum(whole[27 : 27 + whole[26]])
    other = bytearray(whole[:head])
    other[14:18] = bytes(4)
    path = tmp_path / "b.ogg"
    last = bytes(other[:5]) + b"\4" + bytes(other[6:])
    path.write_bytes(bytes(other) + whole + last)
    with path.open("rb") as file:
        check_stated_length(path, file, "OGG", 9000)
    path.write_bytes(whole + last)
    with path.open("rb") as file, pytest.raises(DataError, match="several sounds"):
        check_stated_length(path, file, "OGG", 9000)


def test_sound_without_a_header_and_sound_without_numbers_are_told_in_one_line(tmp_path):
    (tmp_path / "a.raw").write_bytes(bytes(1000))
    with pytest.raises(DataError, match=r"a\.raw: does not declare its sound format .*convert it, such as with `sox"):
        content(tmp_path / "a.raw")
    soundfile.write(tmp_path / "a.aiff", np.array([0.0, np.nan, np.inf]), 8000, format="AIFF", subtype="FLOAT")
    with pytest.raises(DataError, match=r"a\.aiff: holds samples that are not numbers"):
        content(tmp_path / "a.aiff")


def test_missing_resampler_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soxr", None)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.wav").write_bytes(wav(tone(9000).tobytes()))
    with pytest.raises(DataError, match=rf"a\.wav: has 8000 Hz, and soxr, .*; {EXTRA}, or resample it first"):
        build([tmp_path / "source"], tmp_path / "data", modality="audio", properties={"rate": 12_000})
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_sound_is_never_held_whole(tmp_path):
    """Sequential reads of a file of any length take blocks."""

    class Counted(io.BytesIO):
        largest = 0

        def read(self, size=-1):
            found = super().read(size)
            self.largest = max(self.largest, len(found))
            return found

    file = Counted(wav(tone(600_000).tobytes(), rate=48_000))
    opened = AUDIO.open(Path("a.wav"), file, {"rate": 12_000, "resampled": 1})
    assert sum(len(opened.read(start, 1000)) for start in range(0, 150_000, 1000)) == 150_000
    assert file.largest <= 2 * 65_536
