"""The manifest and what it refuses; verification of a folder."""

import json
import shutil

import pytest

from data_pipelines import DataError, load_manifest, verify


@pytest.fixture
def copy(corpus, tmp_path):
    """A data folder that may be damaged."""
    return shutil.copytree(corpus.folder, tmp_path / "data")


def edit_manifest(folder, change):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_manifest_round_trips(corpus):
    assert load_manifest(corpus.folder) == corpus.manifest
    assert corpus.manifest.to_json() == (corpus.folder / "manifest.json").read_text()


def test_manifest_counts_agree(corpus):
    for split, record in corpus.manifest.splits.items():
        assert record.payload_bytes == sum(map(len, corpus.shard_payloads(split)))
        assert record.samples == record.documents  # none of them is long enough to be cut


def test_manifest_missing_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: no such folder"):
        load_manifest(tmp_path / "nowhere")


def test_manifest_empty_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"the folder is empty"):
        load_manifest(tmp_path)


def test_manifest_missing_is_refused(copy):
    (copy / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"lacks manifest\.json"):
        load_manifest(copy)


@pytest.mark.parametrize("content", ["", "{", "\xff", "[]", "{}", '{"format": "other"}'])
def test_manifest_that_is_none_is_refused(copy, content):
    (copy / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"manifest\.json"):
        load_manifest(copy)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda content: content.update(format_version=2), "format_version=2, and this version reads 1"),
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
        load_manifest(copy)


@pytest.mark.parametrize("name", ["train-00003.tar", "train-00003.index.npy"])
def test_manifest_names_missing_file(copy, name):
    (copy / name).unlink()
    with pytest.raises(DataError, match=f"{name}: missing"):
        load_manifest(copy)
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
        "train-00001.tar: sample train-00001-0000000.txt is damaged",
        "train-00002.tar: its SHA-256",
        "train-00002.tar: cannot be read",
        "train-00005.index.npy: the index is damaged",
        "validation-00099.tar: manifest.json does not list it",
    ):
        assert any(finding in line for line in findings), finding
    assert any("train-00004.tar: " in line and "cut short" in line for line in findings)
    assert not any("train-00003" in line for line in findings)


def test_verify_reports_manifest(tmp_path):
    assert len(verify(tmp_path)) == 1
