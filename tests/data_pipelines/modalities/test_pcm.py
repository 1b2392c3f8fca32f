"""Sounds whose members are 16-bit PCM: contexts, samples and checks are those of a set whose members are mu-law."""

import io
import itertools
import json
import tarfile
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.building.shard_writer import SAMPLE_BYTES
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES
from longstride.data_pipelines.modalities.wav import mulaw_decode, mulaw_encode, mulaw_to_pcm
from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.evaluation import evaluation_contexts, split_bytes
from longstride.data_pipelines.shards import DataFolder, index_tars, sample_documents, verify
from longstride.launcher import cli
from tests.harness.data.builds import sound
from tests.harness.data.streams import open_stream

AUDIO = MODALITIES["audio"]
PCM = {"pcm_bits": 16}


@pytest.fixture
def sets(tmp_path):
    """Build the same sounds, some of them long, as mu-law and as PCM."""
    generator = np.random.default_rng(0)
    (tmp_path / "source").mkdir()
    for number in range(9):
        frames = 2 * SAMPLE_BYTES + 777 if number == 4 else 100 + 37 * number
        content = sound(generator.normal(0, 60, frames) ** 3 / 40)
        (tmp_path / "source" / f"{number}.wav").write_bytes(content)
    folders = [tmp_path / "mulaw", tmp_path / "pcm"]
    for folder, properties in zip(folders, ({}, PCM), strict=True):
        build([tmp_path / "source"], folder, modality="audio", properties=properties, shard_bytes=30_000)
    return folders


def test_every_byte_of_mulaw_comes_back_from_pcm():
    every = np.arange(256, dtype=np.uint8)
    numbers = mulaw_to_pcm(every)
    assert numbers.dtype == np.int16 and np.array_equal(mulaw_encode(numbers), every)
    assert np.flatnonzero(numbers != mulaw_decode(every)).tolist() == [0x7F]
    stored = AUDIO.stored(every.tobytes(), PCM)
    assert np.array_equal(AUDIO.restored(np.frombuffer(stored, np.uint8), PCM), every) and len(stored) == 512


def test_contents_are_the_same_and_members_are_pcm(sets):
    mulaw, pcm = sets
    assert verify(pcm) == []
    manifests = [DataFolder(folder).manifest for folder in sets]
    assert manifests[1].properties == {"rate": 8000, "pcm_bits": 16}
    versions = [json.loads((folder / "manifest.json").read_text())["format_version"] for folder in sets]
    assert versions == [2, 5] and manifests[0].fingerprint != manifests[1].fingerprint
    for split in ("train", "validation"):
        content = list(split_bytes(pcm, split))
        assert content == list(split_bytes(mulaw, split)) and 0x7F in content[0]
        for ours, theirs in zip(manifests[1].splits[split].shards, manifests[0].splits[split].shards, strict=True):
            assert (ours.content_bytes, ours.samples) == (theirs.content_bytes, theirs.samples)
        found, expected = (list(sample_documents(folder, split, 5)) for folder in (pcm, mulaw))
        assert all(
            np.array_equal(a.content, b.content) and a.key == b.key for a, b in zip(found, expected, strict=True)
        )
    with tarfile.open(pcm / "train-00000.tar") as archive:
        for member in archive:
            with wave.open(io.BytesIO(archive.extractfile(member).read())) as sound:
                assert sound.getparams()[:3] == (1, 2, 8000) and 44 + 2 * sound.getnframes() == member.size


@pytest.mark.parametrize(
    "cut", [Cut(), Cut(packing=True, separator=7), Cut(packing=True, apart=True), Cut(hop=300)], ids=str
)
def test_batches_are_the_same(sets, cut):
    options = {"context": 1000, "global_batch": 3, "seed": 1, "shuffle_bytes": 5000, "cut": cut}
    streams = [open_stream(folder, **options) for folder in sets]
    for mulaw, pcm in itertools.islice(zip(*streams, strict=True), 40):
        assert torch.equal(mulaw.tokens, pcm.tokens) and torch.equal(mulaw.lengths, pcm.lengths)
        assert mulaw.begins is pcm.begins is None or torch.equal(mulaw.begins, pcm.begins)


def test_damage_of_pcm_is_found_before_it_is_read(sets):
    path = sets[1] / "train-00000.tar"
    content = bytearray(path.read_bytes())
    content[512 + 44 + 51] ^= 1  # a low bit, which would not change its byte of mu-law
    path.write_bytes(content)
    assert any("sample train-00000-0000000.wav is damaged (CRC-32)" in line for line in verify(sets[1]))
    with pytest.raises(DataError, match=r"train-00000\.tar: sample train-00000-0000000\.wav is damaged"):
        list(evaluation_contexts(sets[1], "train", context=10**6, batch_size=1))


def test_an_index_of_pcm_is_read_the_same(sets, tmp_path):
    index_tars([str(sets[1])], tmp_path / "index", modality="audio")
    assert verify(tmp_path / "index") == []
    for split in ("train", "validation"):
        assert list(split_bytes(tmp_path / "index", split)) == list(split_bytes(sets[0], split))
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert manifest["format_version"] == 5 and manifest["tars"] == "../pcm"


def test_samples_are_files_of_the_set_s_form():
    tokens = np.arange(256)
    for properties in ({"rate": 8000}, {"rate": 8000, **PCM}):
        content = io.BytesIO(AUDIO.encode(tokens, properties))
        assert AUDIO.open(Path("sample.wav"), content, {"rate": 8000}).read(0, 256) == bytes(range(256))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (
            ["--modality", "audio", "--wav", "flac"],
            "--wav=flac: must be mulaw or pcm; pcm is for readers without mu-law",
        ),
        (["--wav", "pcm"], "--wav=pcm: only applies to --modality audio, and this is text"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, capsys, options, rule):
    (tmp_path / "a.txt").write_text("a")
    assert cli.main(["data", "build", str(tmp_path), "--output", str(tmp_path / "data"), *options]) == 2
    assert rule in capsys.readouterr().err
    with pytest.raises(DataError, match="pcm_bits=24: must be 16, or left out for mu-law"):
        AUDIO.settle(tmp_path, io.BytesIO(), {"rate": 8000, "pcm_bits": 24})
