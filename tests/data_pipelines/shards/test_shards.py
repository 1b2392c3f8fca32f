"""The manifest and what it refuses; verification of a folder."""

import errno
import hashlib
import json
import os
import shutil
import zlib
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.shards.manifest import (
    INDEX_DTYPE,
    DataManifest,
    ShardRecord,
    index_bytes,
    index_to_bytes,
)
from longstride.data_pipelines.shards.verify import check_split, verify
from longstride.data_pipelines.stores import open_store


@pytest.fixture
def copy(corpus, tmp_path):
    """Copy a data folder that may be damaged."""
    return shutil.copytree(corpus.folder, tmp_path / "data")


def edit_manifest(folder, change):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_manifest_round_trips(corpus):
    assert DataManifest.load(open_store(corpus.folder)) == corpus.manifest
    assert corpus.manifest.to_json() == (corpus.folder / "manifest.json").read_text()


def test_manifest_counts_agree(corpus):
    for split, record in corpus.manifest.splits.items():
        assert record.content_bytes == sum(map(len, corpus.shard_payloads(split)))
        assert record.samples == record.documents  # none of them is long enough to be cut


@pytest.mark.parametrize("content", ["", "{", "\xff", "[]", "{}", '{"format": "other"}'])
def test_manifest_that_is_none_is_refused(copy, content):
    (copy / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"manifest\.json"):
        DataManifest.load(open_store(copy))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda content: content.update(format_version=1), "format_version=1, but this version reads 2"),
        (lambda content: content.update(modality="smell"), "edited since it was built"),
        (lambda content: content.pop("splits"), "incomplete or misspelt"),
        (lambda content: content.pop("fingerprint"), "edited since it was built"),
        (lambda content: content["splits"]["train"]["shards"].reverse(), "edited since it was built"),
        (lambda content: content["splits"]["train"]["shards"].pop(), "edited since it was built"),
        (lambda content: content["splits"]["train"]["shards"][0].update(more=1), "incomplete or misspelt"),
        (lambda content: content["splits"]["train"]["shards"][0].pop("sha256"), "incomplete or misspelt"),
        (lambda content: content["splits"].update(train=[]), "incomplete or misspelt"),
    ],
)
def test_manifest_edited_is_refused(copy, change, rule):
    edit_manifest(copy, change)
    with pytest.raises(DataError, match=rule):
        DataManifest.load(open_store(copy))


@pytest.mark.parametrize("name", ["train-00003.tar", "train-00003.index.npy"])
def test_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(DataError, match=f"{name}: is missing"):
        check_split(copy, "train")
    check_split(copy, "validation")
    assert len(verify(copy)) == 1


def test_verify_finds_nothing_in_good_folder(corpus):
    assert verify(corpus.folder) == []


def test_verify_names_every_damage(copy):
    damaged = bytearray((copy / "train-00001.tar").read_bytes())
    damaged[520] ^= 4  # payload of the first sample
    (copy / "train-00001.tar").write_bytes(damaged)
    damaged = bytearray((copy / "train-00002.tar").read_bytes())
    damaged[3] ^= 4  # header of the first sample
    (copy / "train-00002.tar").write_bytes(damaged)
    (copy / "train-00004.tar").write_bytes((copy / "train-00004.tar").read_bytes()[:-700])
    damaged = bytearray((copy / "train-00005.index.npy").read_bytes())
    damaged[-1] ^= 4
    (copy / "train-00005.index.npy").write_bytes(damaged)
    (copy / "validation-00099.tar").write_bytes(b"")
    findings = verify(copy)
    for finding in (
        "train-00001.tar: its SHA-256",
        "train-00001.tar: sample train-00001-0000000.txt is damaged (CRC-32); build",
        "train-00002.tar: its SHA-256",
        "train-00002.tar: holds sample",
        "train-00002.tar: has an invalid tar header after its beginning",
        "train-00005.index.npy: the index is damaged",
        "validation-00099.tar: manifest.json does not list it",
    ):
        assert any(finding in line for line in findings), finding
    assert any("train-00004.tar: " in line and "cut short" in line for line in findings)
    assert not any("train-00003" in line for line in findings)


@pytest.mark.parametrize("name", ["train-00001.tar", "train-00001.index.npy", "manifest.json"])
def test_verify_tells_a_lacking_permission_from_damage(copy, monkeypatch, name):
    opened = os.open

    def refuse(path, *arguments, **options):
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    line = f"{copy / name}: cannot be read (Permission denied); allow reading"
    if name == "manifest.json":
        with pytest.raises(DataError) as caught:
            verify(copy)
        assert str(caught.value) == line
    else:
        assert verify(copy) == [line]


def test_verify_finds_a_sample_of_another_name(copy):
    """Only programs that read the tars without their indexes would notice it."""
    manifest = DataManifest.load(open_store(copy))
    record = manifest.splits["train"].shards[0]
    content = bytearray((copy / record.name).read_bytes())
    content[:512] = content[:512].replace(b"train-00000-0000000", b"train-00000-0000009")
    content[148:156] = b"%06o\0 " % (sum(content[:148]) + 8 * 32 + sum(content[156:512]))
    (copy / record.name).write_bytes(content)
    index = np.load(copy / record.index_name)
    index["crc32"][0] = zlib.crc32(content[: int(index["member"][1])])
    (copy / record.index_name).write_bytes(index_to_bytes(index))
    digests = (hashlib.sha256((copy / name).read_bytes()).hexdigest() for name in (record.name, record.index_name))
    sealed = replace(record, **dict(zip(("sha256", "index_sha256"), digests, strict=True)))
    train = replace(manifest.splits["train"], shards=(sealed, *manifest.splits["train"].shards[1:]))
    manifest = replace(manifest, splits={**manifest.splits, "train": train})
    (copy / "manifest.json").write_text(manifest.to_json())
    assert [line.split(": ")[1][:54] for line in verify(copy) if "sources" not in line] == [
        "sample train-00000-0000000 is not where the index says"
    ]


def test_verify_tells_how_far_it_is(corpus):
    calls = []
    verify(corpus.folder, lambda done, total: calls.append((done, total)))
    sizes = [shard.file_bytes for shard in corpus.manifest.shards()]
    assert calls == [(done, sum(sizes)) for done in accumulate(sizes)]


def test_verify_refuses_what_is_no_data_folder(tmp_path):
    with pytest.raises(DataError, match="not a data folder"):
        verify(tmp_path)


def test_shard_lines_are_those_of_json():
    record = ShardRecord('a "name"\\é\ud800.tar', 1, 2, 3, 4, "a" * 64, "b" * 64)
    assert record.line() == json.dumps(asdict(record))
    assert record.hashed_line() == json.dumps(asdict(record), sort_keys=True, separators=(",", ":"))
    assert ShardRecord.parse(json.loads(record.line())) == record


def test_manifest_has_a_line_a_shard(corpus):
    lines = (corpus.folder / "manifest.json").read_text().splitlines()
    assert sum('"sha256"' in line for line in lines) == sum(1 for _ in corpus.manifest.shards())


@pytest.mark.parametrize("samples", [1, 9, 10, 1000, 123_456])
def test_index_bytes_are_those_of_a_file(samples):
    assert index_bytes(samples) == len(index_to_bytes(np.zeros(samples, dtype=INDEX_DTYPE)))
