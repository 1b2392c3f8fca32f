"""Sounds: mu-law as the standard has it, and their bytes from the file to a context."""

import io
import struct
import tarfile
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.building.shard_writer import SAMPLE_BYTES
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES
from longstride.data_pipelines.modalities.wav import mulaw_decode, mulaw_encode
from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.evaluation import split_bytes
from longstride.data_pipelines.shards.verify import verify
from tests.harness.data.streams import open_stream

AUDIO = MODALITIES["audio"]
EVERY_SAMPLE = np.arange(-(2**15), 2**15).astype(np.int16)
EVERY_BYTE = np.arange(256, dtype=np.uint8)
GUID_TAIL = bytes.fromhex("0000000000001000800000aa00389b71")[2:]


def wav(content: bytes, *, tag=1, channels=1, rate=8000, bits=16, before=b"", extensible=False) -> bytes:
    """Write a plain WAV file, with ``before`` as a chunk before the format."""
    frame = channels * bits // 8
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else tag, channels, rate, rate * frame, frame, bits)
    if extensible:
        form += struct.pack("<HHIH", 22, bits, 0, tag) + GUID_TAIL
    chunks = [(b"JUNK", before)] if before else []
    chunks += [(b"fmt ", form), (b"data", content)]
    body = b"".join(name + struct.pack("<I", len(part)) + part + bytes(len(part) % 2) for name, part in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def pcm(values, bits: int) -> bytes:
    """Encode integers of so many bits as little-endian PCM, which is unsigned for 8 bits."""
    if bits == 8:
        return (np.asarray(values) + 128).astype(np.uint8).tobytes()
    return b"".join(int(value).to_bytes(bits // 8, "little", signed=True) for value in np.ravel(values))


def read(path: Path, content: bytes) -> bytes:
    """Read a file that is a set of its own."""
    path.write_bytes(content)
    with path.open("rb") as file:
        properties = AUDIO.settle(path, file, {})
        size = AUDIO.measure(path, properties)
        found = AUDIO.open(path, file, properties).read(0, size)
    assert len(found) == size
    return found


def tone(frames: int, seed: int = 0) -> np.ndarray:
    """Make a fading tone, (frames,) int16."""
    time = np.arange(frames)
    return (np.sin(time * (0.05 + seed / 100)) * 30_000 * np.exp(-time / 5000)).astype(np.int16)


# G.711


def test_mulaw_is_the_standard_s_table():
    """Table 2 of G.711 has 14-bit units: decision values, and between them the decoded values."""
    decisions = [0, 1]
    for segment in range(8):
        steps = 15 if segment == 0 else 16
        decisions += [decisions[-1] + 2 * 2**segment * step for step in range(1, steps + 1)]
    assert len(decisions) == 129 and decisions[16::16] == [31, 95, 223, 479, 991, 2015, 4063, 8159]
    values = [0] + [(low + high) // 2 for low, high in pairwise(decisions[1:])]
    magnitude = np.abs(EVERY_SAMPLE.astype(int))
    number = np.minimum(np.searchsorted(4 * np.array(decisions), magnitude, side="right") - 1, 127)
    assert np.array_equal(mulaw_encode(EVERY_SAMPLE), np.where(EVERY_SAMPLE < 0, 0x7F, 0xFF) - number)
    assert np.array_equal(mulaw_decode(EVERY_BYTE[:127:-1]), 4 * np.array(values))
    assert np.array_equal(mulaw_decode(EVERY_BYTE[127::-1]), -4 * np.array(values))


# Files


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
@pytest.mark.parametrize("channels", [1, 2, 3, 6])
def test_audio_channels_are_mixed_by_their_mean(tmp_path, channels, bits):
    limit = 2 ** (bits - 1)
    values = np.random.default_rng(0).integers(-limit, limit, (500, channels))
    values[:2] = [[-limit] * channels, [limit - 1] * channels]
    exact = [int(round_half_up(sum(map(int, frame)) * 2**16, channels * 2**bits)) for frame in values]
    expected = mulaw_encode(np.clip(exact, -(2**15), 2**15 - 1).astype(np.int16)).tobytes()
    assert read(tmp_path / "a.wav", wav(pcm(values, bits), bits=bits, channels=channels)) == expected


def round_half_up(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


@pytest.mark.parametrize("options", [{"before": b"odd"}, {"extensible": True}], ids=str)
def test_audio_header_of_other_programs_is_read(tmp_path, options):
    assert read(tmp_path / "a.wav", wav(tone(100).tobytes(), **options)) == mulaw_encode(tone(100)).tobytes()


def test_audio_that_is_mulaw_already_is_kept(tmp_path):
    assert read(tmp_path / "a.wav", wav(EVERY_BYTE.tobytes(), tag=7, bits=8)) == EVERY_BYTE.tobytes()
    twice = np.repeat(EVERY_BYTE, 2).tobytes()
    expected = EVERY_BYTE.copy()
    expected[0x7F] = 0xFF
    assert read(tmp_path / "b.wav", wav(twice, tag=7, bits=8, channels=2)) == expected.tobytes()


def test_audio_loads_any_piece_of_a_long_file(tmp_path):
    samples = np.stack([tone(200_001), tone(200_001, 1)], axis=1)
    whole = read(tmp_path / "a.wav", wav(samples.tobytes(), channels=2))
    with (tmp_path / "a.wav").open("rb") as file:
        for offset, size in ((0, 1), (65_535, 3), (131_072, 65_537), (200_000, 9), (200_001, 9)):
            piece = AUDIO.open(tmp_path / "a.wav", file, {"rate": 8000}).read(offset, size)
            assert piece == whole[offset : offset + size]


# Data folders


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build a data folder from three sounds, one of them longer than a sample."""
    base = tmp_path_factory.mktemp("sounds")
    (base / "source").mkdir()
    sounds = [tone(frames, seed) for seed, frames in enumerate((150, 1000, 2**20 + 77))]
    for number, samples in enumerate(sounds):
        (base / "source" / f"{number}.wav").write_bytes(wav(samples.tobytes(), rate=12_000))
    manifest = build([base / "source"], base / "data", modality="audio", validation_fraction=0)
    return base / "data", manifest, [mulaw_encode(samples).tobytes() for samples in sounds]


def test_audio_build_keeps_every_sound(built):
    folder, manifest, sounds = built
    assert manifest.properties == {"rate": 12_000}
    train = manifest.splits["train"]
    assert (train.documents, train.content_bytes) == (3, sum(map(len, sounds)))
    assert train.samples == sum(-(-len(sound) // SAMPLE_BYTES) for sound in sounds)
    assert verify(folder) == []
    content = b"".join(split_bytes(folder, "train"))
    assert all(sound in content for sound in sounds)


def test_audio_members_are_wav_files_of_format_7(built):
    folder, manifest, _ = built
    content = iter(split_bytes(folder, "train"))
    for shard in manifest.splits["train"].shards:
        found = b""
        with tarfile.open(folder / shard.name, "r:") as archive:
            for member in archive:
                assert member.name.endswith(".wav")
                head = archive.extractfile(member).read()
                riff, size, kind = struct.unpack("<4sI4s", head[:12])
                assert (riff, size, kind) == (b"RIFF", len(head) - 8, b"WAVE")
                form = struct.unpack("<4sIHHIIHHH", head[12:38])
                assert form == (b"fmt ", 18, 7, 1, 12_000, 12_000, 1, 8, 0)
                assert struct.unpack("<4sII", head[38:50]) == (b"fact", 4, len(head) - 58)
                assert struct.unpack("<4sI", head[50:58]) == (b"data", len(head) - 58)
                found += head[58:]
        assert found == next(content)


def test_audio_contexts_overlap_by_the_hop(tmp_path):
    """Every sound has its own contexts, which begin every hop; the last one is padded."""
    (tmp_path / "source").mkdir()
    sounds = [tone(frames, seed) for seed, frames in enumerate((150, 64, 10, 65))]
    for number, samples in enumerate(sounds):
        (tmp_path / "source" / f"{number}.wav").write_bytes(wav(samples.tobytes()))
    build([tmp_path / "source"], tmp_path / "data", modality="audio", validation_fraction=0)
    expected = []
    for sound in (mulaw_encode(samples).tobytes() for samples in sounds):
        starts = range(0, max(1, len(sound) - 64 + 24), 24)
        expected += [sound[start : start + 64] for start in starts]
    assert sorted(map(len, expected)) == [10, 41, 54, *[64] * 6]
    stream = open_stream(tmp_path / "data", context=64, global_batch=3, cut=Cut(hop=24))
    batches = list(islice(stream, stream.lanes.steps_in(0)))
    rows = torch.cat([batch.tokens for batch in batches]).numpy()
    lengths = torch.cat([batch.lengths for batch in batches]).tolist()
    found = [bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]
    assert sorted(found) == sorted(expected)
    assert not any(row[length:].any() for row, length in zip(rows, lengths, strict=True))


def test_audio_of_another_rate_is_refused_unless_one_is_asked_for(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.wav").write_bytes(wav(tone(50).tobytes(), rate=8000))
    (tmp_path / "source" / "b.wav").write_bytes(wav(tone(50).tobytes(), rate=44_100))
    with pytest.raises(DataError, match=r"b\.wav: has 44100 Hz, but the set's first file has 8000; .* --rate 8000"):
        build([tmp_path / "source"], tmp_path / "data", modality="audio")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("rate", [0, -1, 2**32])
def test_audio_rate_that_cannot_be_is_refused(tmp_path, rate):
    with pytest.raises(DataError, match=rf"rate={rate}: must be from 1"):
        AUDIO.settle(tmp_path / "a.wav", io.BytesIO(wav(tone(50).tobytes())), {"rate": rate})


WHOLE = wav(tone(100).tobytes(), channels=2)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"ID3 no sound at all", r"cannot be read as a sound \("),
        (b"RIFF", "is not a WAV file"),
        (WHOLE[:-1], "says 200 bytes of sound and holds 199: it is cut short"),
        (WHOLE[:44], "says 200 bytes of sound and holds 0: it is cut short"),
        (WHOLE[:40], "without sound"),
        (WHOLE[:30], "without sound"),
        (WHOLE[:16] + b"\x0a" + WHOLE[17:30] + WHOLE[36:], "its format has 10 bytes, not 16"),
        (WHOLE[:12] + WHOLE[36:], "sound before its format"),
        (WHOLE[:40] + b"\xff" * 4 + WHOLE[44:], "written to a pipe"),
        (WHOLE[:40] + b"\xc7" + WHOLE[41:], "199 bytes of sound are not a multiple of the frame size, 4"),
        (wav(bytes(400), bits=64), "has WAV format 1 with 64 bits; must be PCM"),
        (wav(bytes(400), tag=7, bits=16), "has WAV format 7 with 16 bits"),
        (wav(bytes(400), tag=3, bits=16), r"cannot be read as a sound \("),
        (wav(bytes(402), tag=3, bits=32), "402 bytes of sound are not a multiple of the frame size, 4"),
        (wav(bytes(400), tag=0x55AA, bits=16), r"cannot be read as a sound \("),
        (wav(bytes(400), channels=0), "0 channels of 16 bits"),
        (wav(bytes(400), rate=0), "at 0 Hz"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_audio_damage_is_named(tmp_path, content, rule):
    with pytest.raises(DataError, match=rule) as raised:
        read(tmp_path / "a.wav", content)
    assert str(raised.value).startswith(f"{tmp_path / 'a.wav'}: ") and "\n" not in str(raised.value)
