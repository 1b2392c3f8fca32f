"""Building: the same bytes for the same input, whole or not at all, nothing written over."""

import errno
import hashlib
import importlib
import logging
import os
import random
import resource
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import webdataset as wds

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.building.shard_writer import SAMPLE_BYTES, pack
from longstride.data_pipelines.documents import FileDocument
from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.shards.verify import verify
from longstride.data_pipelines.stores import open_store
from tests.harness.data.builds import folder_bytes, numbered_files, payloads_of, write_files

UNFINISHED = ".data.unfinished"


@pytest.fixture
def source(tmp_path):
    return write_files(tmp_path / "source", numbered_files(10))


def test_build_takes_every_document_once(corpus):
    sources = sorted(path.read_bytes() for path in corpus.source.rglob("*.py"))
    assert sorted(payloads_of(corpus.folder, "train") + payloads_of(corpus.folder, "validation")) == sources
    assert [split.documents for split in corpus.manifest.splits.values()] == [
        len(payloads_of(corpus.folder, split)) for split in ("train", "validation")
    ]


def test_build_bytes_are_pinned(tmp_path):
    """A data set that is rebuilt with other versions of Python, numpy and webdataset must resume the same run."""
    source = write_files(tmp_path / "source", numbered_files(12))
    build([source], tmp_path / "data", validation_fraction=0.3, shard_bytes=500)
    digest, files = hashlib.sha256(), folder_bytes(tmp_path / "data")
    sources = files.pop("sources.jsonl")  # of which the fingerprint knows nothing
    assert hashlib.sha256(sources).hexdigest() == "1a90c7c33013e15d35c0542b3737a25fcb64f66e44e9c1dbce8633df63bfc145"
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + content)
    assert digest.hexdigest() == "5e2dc836b02ea24413a823940c3e76c02c15477c946386dff3e76dc548cb1846"


def test_build_is_read_by_plain_webdataset(corpus):
    for shard in corpus.manifest.splits["train"].shards:
        with (corpus.folder / shard.name).open("rb") as file:
            source = [{"url": shard.name, "stream": file}]
            samples = list(wds.tariterators.group_by_keys(wds.tariterators.tar_file_expander(source)))
        assert [sample["__key__"] for sample in samples] == [shard.key(number) for number in range(shard.samples)]
        assert sum(len(sample["txt"]) for sample in samples) == shard.content_bytes


def check_index(folder: Path, shard, ends: list[int]) -> None:
    """Compares an index with the tar file as the standard library reads it."""
    index = shard.load_index(open_store(folder))
    assert index.dtype.itemsize == 25
    assert index["ends"].tolist() == ends
    content = (folder / shard.name).read_bytes()
    with tarfile.open(folder / shard.name, "r:") as archive:
        members = archive.getmembers()
    for row, member in zip(index.tolist(), members, strict=True):
        end = member.offset_data + -(-member.size // 512) * 512
        crc32 = zlib.crc32(content[member.offset : end])
        assert row[:-1] == (member.offset, member.offset_data, member.size, crc32)
        assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")
    assert content[end:].strip(b"\0") == b""  # of the last member: nothing but the end of the archive follows


def test_build_index_tells_where_documents_end(tmp_path):
    """Sizes vary around the blocks of the tar; documents are complete or divided."""
    sizes = [1, 511, 512, 513, 9728, 9729, 10240, 20480, SAMPLE_BYTES, SAMPLE_BYTES + 1, 2 * SAMPLE_BYTES + 512]
    generator = random.Random(0)
    write_files(tmp_path / "source", {f"{size}.txt": generator.randbytes(size) for size in sizes})
    manifest = build([tmp_path / "source"], tmp_path / "data", validation_fraction=0)
    (shard,) = manifest.splits["train"].shards
    order = [len(payload) for payload in payloads_of(tmp_path / "data", "train")]
    ends = shard.load_index(open_store(tmp_path / "data"))["ends"].tolist()
    whole, parts = [], 0
    for size, end in zip(order, ends, strict=True):
        parts += size
        if end:
            whole.append(parts)
            parts = 0
    assert sorted(whole) == sizes and parts == 0
    check_index(tmp_path / "data", shard, ends)


def documents_of(*sizes: int) -> list[FileDocument]:
    return [FileDocument("folder", b"%d" % number, 0, size, size, 0) for number, size in enumerate(sizes)]


def packed(sizes: list[int], shard_bytes: int, divisible: bool = True) -> list[list[tuple[int, int, int]]]:
    """List each shard's pieces as (document, offset, size)."""
    modality = modality_named("text")
    if not divisible:
        modality = type("Whole", (), {"divisible": False})()
    return [
        [(int(piece.document.relative), piece.offset, piece.size) for piece in pieces]
        for pieces in pack(documents_of(*sizes), shard_bytes, modality)
    ]


def test_pack_keeps_documents_whole_that_cannot_be_divided():
    long = 3 * SAMPLE_BYTES
    assert packed([10, long, 10], SAMPLE_BYTES, divisible=False) == [[(0, 0, 10)], [(1, 0, long)], [(2, 0, 10)]]
    assert packed([3, 7, 3], 5) == [[(0, 0, 3)], [(1, 0, 7)], [(2, 0, 3)]]  # a piece is never smaller than it must be


@pytest.mark.parametrize("seed", range(5))
def test_pack_keeps_its_rule(seed):
    """Every byte occurs once and in order. A shard only ends if the next document or piece would not fit."""
    generator = random.Random(seed)
    sizes = [generator.choice((generator.randrange(1, 4000), generator.randrange(1, 4 * 2**20))) for _ in range(60)]
    shard_bytes = 3 * 2**20
    shards = packed(sizes, shard_bytes)
    assert [piece for pieces in shards for piece in pieces] == [
        (number, offset, min(SAMPLE_BYTES, size - offset))
        for number, size in enumerate(sizes)
        for offset in range(0, size, SAMPLE_BYTES)
    ]
    for pieces, following in zip(shards, [*shards[1:], None], strict=True):
        filled = sum(size for _, _, size in pieces)
        assert 0 < filled <= shard_bytes
        if following is not None:
            number, offset, size = following[0]
            assert offset == 0 or sizes[number] > shard_bytes
            together = sizes[number] if offset == 0 and sizes[number] <= shard_bytes else size
            assert filled + together > shard_bytes


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
        ({}, {"notes/readme": b"no data folder"}, "is not a data folder, and is not overwritten"),
        ({"seed": 1}, None, "other settings; it is not overwritten"),
        ({"suffixes": (".py",)}, None, "other settings; it is not overwritten"),
    ],
    ids=["strange folder", "other seed", "other suffixes"],
)
def test_build_never_writes_over(tmp_path, source, arguments, files, rule):
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


def test_build_never_writes_over_other_files_or_damage(tmp_path, source):
    build([source], tmp_path / "data")
    shard = tmp_path / "data" / "train-00000.tar"
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000.*SHA-256.*it is not overwritten"):
        build([source], tmp_path / "data")
    write_files(source, {"new.py": b"new"})
    with pytest.raises(DataError, match="other files; it is not overwritten"):
        build([source], tmp_path / "data")
    assert shard.read_bytes() == content
    (source / "new.py").unlink()
    (source / "0" / "f0.py").write_bytes((source / "0" / "f0.py").read_bytes().replace(b"0", b"1"))
    with pytest.raises(DataError, match="other files; it is not overwritten"):
        build([source], tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "source"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda path: path.unlink(), r"f\d+\.py: cannot be read \(No such file or directory\)"),
        (lambda path: path.write_bytes(b"longer" * 99), r"f\d+\.py: changed since the build began"),
        (lambda path: path.write_bytes(b""), r"f\d+\.py: changed since the build began"),
        (lambda path: os.utime(path, ns=(1, 1)), r"f\d+\.py: changed since the build began"),
    ],
    ids=["vanishes", "grows", "shrinks", "is written again"],
)
def test_build_reports_file_that_changes(tmp_path, source, monkeypatch, change: Callable[[Path], object], rule):
    module = importlib.import_module("longstride.data_pipelines.building.planning")
    find = module.find_documents

    def find_then_change(*arguments):
        found = find(*arguments)
        change(found[0][3].path)
        return found

    monkeypatch.setattr(module, "find_documents", find_then_change)
    with pytest.raises(DataError, match=rule + "; finished shards are kept in .* remove .* first$") as caught:
        build([source], tmp_path / "data")
    assert "\n" not in str(caught.value) and str(tmp_path / UNFINISHED) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == [UNFINISHED, "source"]


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Make the system refuse to write a file beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_build_that_cannot_write_says_where_and_goes_on(tmp_path):
    """This includes the last bytes of a shard: closing a file flushes its buffer."""
    source = write_files(tmp_path / "source", numbered_files(30))
    build([source], tmp_path / "whole", shard_bytes=1500)
    for limit in (3000, 10239):
        with files_limited_to(limit), pytest.raises(DataError) as caught:
            build([source], tmp_path / "data", shard_bytes=1500)
        assert str(caught.value) == f"{tmp_path / UNFINISHED}/data/train-00000.tar: File too large"
        assert list((tmp_path / UNFINISHED / "partial").iterdir()) == []
    build([source], tmp_path / "data", shard_bytes=1500)
    assert folder_bytes(tmp_path / "data") == folder_bytes(tmp_path / "whole")


def test_build_names_the_path_where_the_system_names_none(tmp_path):
    full = pytest.raises(DataError, match=rf"^{tmp_path}/shard: No space left on device$")
    with full, as_data_error(tmp_path / "shard", None):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_build_under_a_file_is_refused(tmp_path, source):
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "deep" / "data"
    rule = f"^{output}: cannot be created \\({tmp_path}/file is not a folder\\); name an output where you may write, "
    with pytest.raises(DataError, match=rule):
        build([source], output)


def test_build_into_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(DataError, match=rf"^{tmp_path}/data: cannot be created \({tmp_path} cannot be written to\)"):
        build([tmp_path / "is not looked for"], tmp_path / "data")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a folder in which nobody can make one")
def test_build_where_no_folder_can_be_made_names_the_output(source, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    with pytest.raises(DataError, match=r"^/proc/data: cannot be created \(.+\); name an output where you may write"):
        build([source], Path("/proc/data"))


def test_build_names_what_lies_in_a_closed_folder(tmp_path, monkeypatch):
    stat = Path.stat

    def refuse(path, **options):
        if "closed" in path.parent.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    closed = tmp_path / "closed" / "folder"
    with pytest.raises(DataError, match=rf"^{closed}/data: cannot be created \(Permission denied\); name an output"):
        build([tmp_path / "is not looked for"], closed / "data")
    with pytest.raises(DataError, match=rf"^{closed}/texts: cannot be accessed \(Permission denied\); allow access"):
        build([closed / "texts"], tmp_path / "data")


def test_build_into_link_that_leads_in_a_circle_is_refused(tmp_path, source):
    (tmp_path / "data").symlink_to(tmp_path / "data")
    with pytest.raises(DataError, match="already exists, is not a data folder"):
        build([source], tmp_path / "data")


def test_build_into_linked_folder_lies_where_the_link_leads(tmp_path, source):
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk" / "data")
    build([source], tmp_path / "data")
    assert verify(tmp_path / "disk" / "data") == [] and (tmp_path / "data").is_symlink()


def test_build_into_whole_file_system_is_refused_at_once(tmp_path):
    for output in (Path("/"), Path("/dev")):
        with pytest.raises(DataError, match=r"is a mount point.*name a folder in it"):
            build([tmp_path / "is not looked for"], output)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"inputs": []}, "none given"),
        ({"inputs": ["missing"]}, "missing: no such file or folder"),
        ({"suffixes": (".rs",)}, r"no matching file \(suffixes: \.rs"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1\.0"),
        ({"validation_fraction": -0.1}, r"validation_fraction=-0\.1"),
        ({"shard_bytes": 0}, "shard_bytes=0: must be at least 1, such as 16777216"),
        ({"shard_bytes": 2**63}, "shard_bytes=9223372036854775808: must be at most 9223372036854775807, such as"),
        ({"seed": -1}, r"seed=-1: must be from 0 to 2\*\*63 - 1, such as 0"),
        ({"seed": 10**40}, f"seed={10**40}: must be from 0 to "),
        ({"exclude": ["d0/"]}, "exclude=d0/: must be a plain name, such as d0"),
        ({"exclude": ["*.py"]}, r"exclude=\*\.py: must be a plain name, such as py"),
        ({"exclude": [""]}, "exclude=: must be a plain name, such as vendor"),
        ({"suffixes": ["*.txt"]}, r"suffixes=\*\.txt: must begin with a dot, such as \.txt"),
        ({"suffixes": [""]}, r"suffixes=: must begin with a dot, such as \.txt"),
        ({"suffixes": [".a.txt.gz"]}, r"suffixes=\.a\.txt\.gz: must be the ending of a file .* such as \.txt\.gz$"),
        ({"modality": "smell"}, "modality='smell'"),
        ({"hold_out_end": True, "validation_fraction": 0.0}, r"validation_fraction=0\.0: must be more than 0 when"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_build_refuses_arguments_that_do_not_fit(tmp_path, arguments, rule):
    write_files(tmp_path / "source", numbered_files(10))
    inputs = [tmp_path / name for name in arguments.pop("inputs", ["source"])]
    with pytest.raises(DataError, match=rule):
        build(inputs, tmp_path / "data", **arguments)
    assert not (tmp_path / "data").exists()
