"""Compressed tars are copied uncompressed where that is asked for, and refused by name where not; and members."""

import bz2
import gzip
import itertools
import lzma

import pytest
import webdataset as wds
import zstandard

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards import DataFolder, index_tars, verify
from tests.data_pipelines.shards.test_indexing import documents
from tests.harness.data.tars import peak_of_indexing, write_shards, write_tar
from tests.hostile.generators.http_servers import FaultyServer

ALL = {"validation_fraction": 0}
PACK = {
    "tar.gz": gzip.compress,
    "tgz": lambda content: gzip.compress(content[:700]) + gzip.compress(content[700:]),  # as pigz and bgzip write
    "tar.bz2": bz2.compress,
    "tar.xz": lzma.compress,
    "tar.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.fixture
def packed(tmp_path):
    """Write five tars with members in folders, each compressed in another way; also plain tars and their documents."""
    texts = write_shards(tmp_path / "plain" / "sub")
    for path, ending in zip(sorted((tmp_path / "plain" / "sub").iterdir()), PACK, strict=True):
        target = tmp_path / "packed" / "sub" / f"{path.stem}.{ending}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(PACK[ending](path.read_bytes()))
    return tmp_path / "packed", tmp_path / "plain", list(itertools.chain(*texts))


def names(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_compressed_tars_are_copied_as_plain_ones_and_are_the_same_data(packed, tmp_path):
    """Another folder gets all of them, and is a complete data set that can be moved."""
    folder, plain, texts = packed
    (folder / "sub" / "train-000.tar.gz").unlink()
    (folder / "sub" / "train-000.tar").write_bytes((plain / "sub" / "train-000.tar").read_bytes())
    manifest = index_tars([str(folder)], tmp_path / "data", unpack=True, **ALL)
    (tmp_path / "data").rename(tmp_path / "moved")
    assert verify(tmp_path / "moved") == [] and documents(tmp_path / "moved") == texts
    for number in range(5):
        name = f"sub/train-00{number}.tar"
        assert (tmp_path / "moved" / name).read_bytes() == (plain / name).read_bytes()
    assert manifest.tars == "." and len(names(tmp_path / "moved")) == 11
    assert manifest.fingerprint == index_tars([str(plain)], tmp_path / "index", **ALL).fingerprint


def test_beside_themselves_only_compressed_tars_are_copied(packed):
    folder, plain, texts = packed
    (folder / "sub" / "train-000.tar.gz").unlink()
    kept = folder / "sub" / "train-000.tar"
    kept.write_bytes((plain / "sub" / "train-000.tar").read_bytes())
    number = kept.stat().st_ino
    index_tars([str(folder)], folder, unpack=True, **ALL)
    assert verify(folder) == [] and documents(folder) == texts and kept.stat().st_ino == number
    with pytest.raises(DataError, match=r"train-001\.tar and sub/train-001\.tgz: are the same tar") as caught:
        index_tars([str(folder)], folder.parent / "again", unpack=True, **ALL)
    assert "name one of them" in str(caught.value)


def test_compressed_tars_behind_a_url_are_copied(packed, tmp_path, quick_servers):
    folder, _, texts = packed
    with FaultyServer(folder / "sub") as url:
        place, settings = f"{url}/train-000.tar.gz", RemoteSettings(cache=str(tmp_path / "cache"))
        index_tars([place], tmp_path / "data", unpack=True, remote=settings, **ALL)
    assert documents(tmp_path / "data") == texts[:1]


def test_splits_are_told_by_compressed_names_too(packed, tmp_path):
    folder, _, _ = packed
    manifest = index_tars([str(folder)], tmp_path / "data", splits=["train=*.tgz", "dev=train-000.tar.gz"], unpack=True)
    assert {name: [shard.name for shard in split.shards] for name, split in manifest.splits.items()} == {
        "train": ["sub/train-001.tar"],
        "dev": ["sub/train-000.tar"],
    }
    assert "sub/train-002.tar" not in names(tmp_path / "data")  # what is of no split is not copied


def test_shards_that_webdataset_compresses_under_plain_names_are_told_by_their_bytes(tmp_path):
    (tmp_path / "tars").mkdir()
    for number in range(2):
        with wds.TarWriter(str(tmp_path / "tars" / f"{number}.tar"), compress=True) as writer:
            writer.write({"__key__": "a/b/c", "txt": b"text %d" % number, "seg.png": b"x"})
    with pytest.raises(DataError, match=r"0\.tar: is compressed by gzip, and cannot be read from the middle; use --un"):
        index_tars([str(tmp_path / "tars")], tmp_path / "data", **ALL)
    index_tars([str(tmp_path / "tars")], tmp_path / "data", unpack=True, **ALL)
    assert documents(tmp_path / "data") == [b"text 0", b"text 1"]
    with pytest.raises(
        DataError, match=r"0\.tar: is compressed by gzip.* into another folder"
    ):  # no place beside itself
        index_tars([str(tmp_path / "tars")], tmp_path / "tars", unpack=True, **ALL)
    assert names(tmp_path / "tars") == {"0.tar", "1.tar"}


@pytest.mark.parametrize("ending", PACK)
def test_compressed_tars_that_are_damaged_leave_nothing(packed, tmp_path, ending):
    folder, _, _ = packed
    (path,) = folder.rglob(f"*.{ending}")
    content = path.read_bytes()
    for harm in (content[:-1], content[: len(content) // 2], content[:-30] + bytes(20) + content[-10:]):
        path.write_bytes(harm)
        with pytest.raises(DataError, match=rf"{path}: .*(cut short|invalid( tar)? header|continues|ends after)"):
            index_tars([str(folder)], tmp_path / "data", unpack=True, **ALL)
        assert not (tmp_path / "data").exists()


def test_compressed_tars_are_refused_before_anything_is_read_where_no_copy_is_asked_for(packed, tmp_path):
    rule = r"^sub/train-000\.tar\.gz: a compressed tar cannot be read from the middle; use --unpack .*"
    with pytest.raises(DataError, match=rule):
        index_tars([str(packed[0])], tmp_path / "data", **ALL)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        (
            "a.txt.gz",
            gzip.compress(b"text", mtime=0),
            "is compressed by gzip, not text; unpack the tars, .* as they are with --raw$",
        ),
        ("a.txt.zst", zstandard.compress(b"text"), "is compressed by zstd, not text"),
        (
            "a.parquet",
            b"PAR1\x15\0PAR1",
            "is a Parquet file, not text; name the member that holds the text with --ext",
        ),
    ],
)
def test_members_that_are_no_text_are_refused(tmp_path, name, content, rule):
    write_tar(tmp_path / "train.tar", [("b.json", b"{}"), (name, content)])
    with pytest.raises(DataError, match=rf"train\.tar: member {name} {rule}"):
        index_tars([str(tmp_path)], tmp_path / "data", extension=name.partition(".")[2], **ALL)
    index_tars([str(tmp_path)], tmp_path / "data", extension=name.partition(".")[2], properties={"raw": 1}, **ALL)
    assert documents(tmp_path / "data") == [content]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("{00..02}", "00 01 02"), ("{2..0}", "2 1 0"), ("{8..010}", "008 009 010"), ("{0..10}", "0 1 2 3 4 5 6 7 8 9 10"),
     ("{a,b}{1..2}", "a1 a2 b1 b2")],
)  # fmt: skip
def test_numbered_names_are_what_a_shell_makes_of_them(tmp_path, pattern, expected):
    for name in expected.split():
        write_tar(tmp_path / f"{name}.tar", [("a.txt", b"x")])
    manifest = index_tars([f"{tmp_path}/{pattern}.tar"], tmp_path / "data", **ALL)
    assert {shard.name for shard in manifest.shards()} == {f"{name}.tar" for name in expected.split()}


def test_no_more_than_a_block_of_a_compressed_tar_is_held(tmp_path):
    peak = peak_of_indexing(tmp_path / "train.tar.gz", "w:gz", tmp_path / "data", unpack=True, **ALL)
    assert peak < 2**23 and DataFolder(tmp_path / "data").manifest.splits["train"].content_bytes == 2**26
