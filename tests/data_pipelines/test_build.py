"""Building: the same bytes for the same input, whole or not at all, nothing written over."""

import hashlib
import importlib
import logging
import random
import tarfile
import zlib
from pathlib import Path

import pytest
import webdataset as wds

from data_pipelines import DataError, build, load_manifest, verify
from data_pipelines.shards import load_index


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def numbered_files(count: int, first: int = 0) -> dict[str, bytes]:
    return {f"{number % 4}/f{number}.py": f"content {number}\n".encode() * 9 for number in range(first, first + count)}


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def payloads_of(folder: Path, split: str) -> list[bytes]:
    """The samples of a split, read by the standard library alone."""
    payloads = []
    for shard in load_manifest(folder).splits[split].shards:
        with tarfile.open(folder / shard.name, "r:") as archive:
            payloads += [archive.extractfile(member).read() for member in archive]
    return payloads


def test_build_takes_every_document_once(corpus):
    sources = sorted(path.read_bytes() for path in corpus.source.rglob("*.py"))
    assert sorted(payloads_of(corpus.folder, "train") + payloads_of(corpus.folder, "validation")) == sources
    assert [split.documents for split in corpus.manifest.splits.values()] == [
        len(payloads_of(corpus.folder, split)) for split in ("train", "validation")
    ]


def test_build_is_byte_identical(corpus, tmp_path):
    manifest = build([corpus.source], tmp_path / "again", validation_fraction=0.1, shard_bytes=2500)
    assert manifest == corpus.manifest
    assert folder_bytes(tmp_path / "again") == folder_bytes(corpus.folder)


def test_build_bytes_are_pinned(tmp_path):
    """Over Python, numpy and webdataset versions: a data set rebuilt elsewhere must resume the same run."""
    source = write_files(tmp_path / "source", numbered_files(12))
    build([source], tmp_path / "data", validation_fraction=0.3, shard_bytes=500)
    digest = hashlib.sha256()
    for name, content in sorted(folder_bytes(tmp_path / "data").items()):
        digest.update(name.encode() + b"\0" + content)
    assert digest.hexdigest() == "eba3c71a165da60d7c10b9c870f5f495630655ffd4fbe1d125acb11ff7f5bf28"


def test_build_is_read_by_plain_webdataset(corpus):
    for shard in corpus.manifest.splits["train"].shards:
        with (corpus.folder / shard.name).open("rb") as file:
            source = [{"url": shard.name, "stream": file}]
            samples = list(wds.tariterators.group_by_keys(wds.tariterators.tar_file_expander(source)))
        assert [sample["__key__"] for sample in samples] == [shard.key(number) for number in range(shard.samples)]
        assert sum(len(sample["txt"]) for sample in samples) == shard.payload_bytes


def test_build_index_describes_tar(corpus):
    for shard in corpus.manifest.splits["train"].shards:
        index = load_index(corpus.folder, shard)
        assert index.dtype.itemsize == 24
        with tarfile.open(corpus.folder / shard.name, "r:") as archive:
            for row, member in zip(index.tolist(), archive, strict=True):
                crc32 = zlib.crc32(archive.extractfile(member).read())
                assert row == (member.offset, member.offset_data, member.size, crc32)
                assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")


def test_build_keeps_shards_within_size(corpus):
    shards = corpus.manifest.splits["train"].shards
    assert len(shards) > 10
    assert all(shard.payload_bytes <= 2500 for shard in shards)


def test_build_cuts_long_file_into_samples(tmp_path):
    content = random.Random(1).randbytes(2 * 2**20 + 5)
    source = write_files(tmp_path / "source", {"long.py": content})
    manifest = build([source], tmp_path / "data", validation_fraction=0)
    train = manifest.splits["train"]
    assert (train.documents, train.samples, train.payload_bytes) == (1, 3, len(content))
    assert b"".join(payloads_of(tmp_path / "data", "train")) == content
    assert list(manifest.splits) == ["train"]


def test_build_split_is_stable_when_files_are_added(tmp_path):
    few = write_files(tmp_path / "few", numbered_files(60))
    more = write_files(tmp_path / "more", numbered_files(90))
    for name, source in (("a", few), ("b", more)):
        build([source], tmp_path / name, validation_fraction=0.3)
    for split in ("train", "validation"):
        assert set(payloads_of(tmp_path / "a", split)) < set(payloads_of(tmp_path / "b", split))


def test_build_split_follows_seed_and_fraction(tmp_path):
    source = write_files(tmp_path / "source", numbered_files(400))
    seen = set()
    for seed in (0, 1):
        build([source], tmp_path / str(seed), validation_fraction=0.25, seed=seed)
        validation = payloads_of(tmp_path / str(seed), "validation")
        assert 60 < len(validation) < 140
        seen.add(frozenset(validation))
    assert len(seen) == 2


def test_build_few_files_fill_both_splits(tmp_path):
    source = write_files(tmp_path / "source", numbered_files(2))
    for fraction in (0.0001, 0.9999):
        manifest = build([source], tmp_path / str(fraction), validation_fraction=fraction)
        assert [split.documents for split in manifest.splits.values()] == [1, 1]


def test_build_same_path_in_two_inputs_stays_in_one_split(tmp_path):
    inputs = [write_files(tmp_path / name, numbered_files(40)) for name in ("one", "two")]
    build(inputs, tmp_path / "data", validation_fraction=0.3)
    train, validation = (payloads_of(tmp_path / "data", split) for split in ("train", "validation"))
    assert len(train) + len(validation) == 80
    assert not set(train) & set(validation)


def test_build_leaves_out_what_it_should(tmp_path):
    source = write_files(
        tmp_path / "source",
        {
            "a.py": b"a",
            "b.txt": b"b",
            "sub/c.py": b"c",
            "sub/d.bin": b"d",
            ".hidden.py": b"e",
            ".git/f.py": b"f",
            "__pycache__/g.py": b"g",
            "vendor/h.py": b"h",
            "empty.py": b"",
        },
    )
    (source / "link.py").symlink_to(source / "a.py")
    (source / "linked").symlink_to(source / "sub")
    manifest = build([source], tmp_path / "all", exclude=("vendor",), validation_fraction=0)
    assert sorted(payloads_of(tmp_path / "all", "train")) == [b"a", b"b", b"c"]
    assert manifest.made["left_out"] == {"empty_files": 1, "symlinks": 2}
    build([source], tmp_path / "py", exclude=("vendor",), suffixes=(".py",), validation_fraction=0)
    assert sorted(payloads_of(tmp_path / "py", "train")) == [b"a", b"c"]
    build([source / "sub" / "d.bin"], tmp_path / "file", validation_fraction=0)
    assert payloads_of(tmp_path / "file", "train") == [b"d"]


def test_build_names_with_odd_bytes(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in (b"caf\xc3\xa9.py", b"\xff\xfe.py", b"with space.py"):
        Path(str(source) + "/" + name.decode("utf-8", "surrogateescape")).write_bytes(name)
    build([source], tmp_path / "data", validation_fraction=0)
    assert len(payloads_of(tmp_path / "data", "train")) == 3


def test_build_again_leaves_identical_folder(corpus, tmp_path, caplog):
    output = tmp_path / "data"
    build([corpus.source], output, validation_fraction=0.1, shard_bytes=2500)
    before = {path.name: path.stat().st_mtime_ns for path in output.iterdir()}
    with caplog.at_level(logging.INFO):
        build([corpus.source], output, validation_fraction=0.1, shard_bytes=2500)
    assert "already there" in caplog.text
    assert {path.name: path.stat().st_mtime_ns for path in output.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_build_into_empty_folder(tmp_path):
    source = write_files(tmp_path / "source", numbered_files(4))
    (tmp_path / "data").mkdir()
    build([source], tmp_path / "data")
    assert verify(tmp_path / "data") == []


def test_build_reports_progress(tmp_path):
    source = write_files(tmp_path / "source", numbered_files(20))
    calls = []
    build([source], tmp_path / "data", progress=lambda done, total: calls.append((done, total)))
    total = sum(path.stat().st_size for path in source.rglob("*.py"))
    assert len(calls) == 20 and calls == sorted(calls) and calls[-1] == (total, total)


@pytest.mark.parametrize(
    ("arguments", "files", "rule"),
    [
        ({}, {"notes/readme": b"no data folder"}, "no data folder; nothing is overwritten"),
        ({"seed": 1}, None, "other settings; nothing is overwritten"),
        ({"suffixes": (".py",)}, None, "other settings; nothing is overwritten"),
    ],
    ids=["strange folder", "other seed", "other suffixes"],
)
def test_build_never_writes_over(tmp_path, arguments, files, rule):
    source = write_files(tmp_path / "source", numbered_files(10))
    output = tmp_path / "data"
    if files is None:
        build([source], output)
    else:
        write_files(output, files)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(DataError, match=rule):
        build([source], output, **arguments)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "source"]


def test_build_never_writes_over_other_files_or_damage(tmp_path):
    source = write_files(tmp_path / "source", numbered_files(10))
    build([source], tmp_path / "data")
    shard = tmp_path / "data" / "train-00000.tar"
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000.*SHA-256.*nothing is overwritten"):
        build([source], tmp_path / "data")
    write_files(source, {"new.py": b"new"})
    with pytest.raises(DataError, match="other files; nothing is overwritten"):
        build([source], tmp_path / "data")
    assert shard.read_bytes() == content


def test_build_that_fails_leaves_nothing(tmp_path):
    source = write_files(tmp_path / "source", numbered_files(10))

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([source], tmp_path / "data", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda path: path.unlink(), r"f\d+\.py: No such file.*nothing was built"),
        (lambda path: path.write_bytes(b"longer" * 99), r"f\d+\.py: changed size while it was read"),
        (lambda path: path.write_bytes(b""), r"f\d+\.py: changed size while it was read"),
    ],
    ids=["vanishes", "grows", "shrinks"],
)
def test_build_reports_file_that_changes(tmp_path, monkeypatch, change, rule):
    source = write_files(tmp_path / "source", numbered_files(10))
    module = importlib.import_module("data_pipelines.build")
    find = module.find_documents

    def find_then_change(*arguments):
        found = find(*arguments)
        change(found[0][3].path)
        return found

    monkeypatch.setattr(module, "find_documents", find_then_change)
    with pytest.raises(DataError, match=rule):
        build([source], tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"inputs": []}, "none given"),
        ({"inputs": ["missing"]}, "missing: no such file or folder"),
        ({"suffixes": (".rs",)}, r"no file to take \(suffixes: \.rs"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1\.0"),
        ({"validation_fraction": -0.1}, r"validation_fraction=-0\.1"),
        ({"shard_bytes": 0}, "shard_bytes=0"),
        ({"modality": "smell"}, "modality='smell'"),
        ({"inputs": ["source/0/f0.py"]}, "the only file.*cannot be in both splits"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_build_refuses_arguments_that_do_not_fit(tmp_path, arguments, rule):
    write_files(tmp_path / "source", numbered_files(10))
    inputs = [tmp_path / name for name in arguments.pop("inputs", ["source"])]
    with pytest.raises(DataError, match=rule):
        build(inputs, tmp_path / "data", **arguments)
    assert not (tmp_path / "data").exists()
