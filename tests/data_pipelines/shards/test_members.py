"""Which members of a tar are content: those that WebDataset takes; every other one is counted, with the reason."""

import os
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.shards import DataFolder, index_tars
from longstride.data_pipelines.shards.verify import sample_documents
from longstride.launcher import cli
from tests.harness.data.tars import add, write_tar

KINDS = {
    "file": tarfile.REGTYPE,
    "folder": tarfile.DIRTYPE,
    "symlink": tarfile.SYMTYPE,
    "hard link": tarfile.LNKTYPE,
    "pipe": tarfile.FIFOTYPE,
    "device": tarfile.CHRTYPE,
}


def left_out_of(folder: Path) -> dict[str, int]:
    """Return the number of members that were left out, by reason."""
    left_out = DataFolder(folder).manifest.made["left_out"]
    return {name: count for name, count in left_out.items() if "members" in name or name == "empty_samples"}


def keys_of_webdataset(tar: Path) -> set[str]:
    """List key and extension of every text that WebDataset yields."""
    with tar.open("rb") as file:
        samples = group_by_keys(tar_file_expander([{"url": str(tar), "stream": file}]))
        return {f"{sample['__key__']}.txt" for sample in samples if "txt" in sample}


part = st.sampled_from(
    ["a", "b.c", "__tests__", "__mocks__", "__x.y__", "__", "____", "_a_", ".", "..", ".h", "l\nf", "d.\n", "\n", "ü"]
)  # fmt: skip
base = st.sampled_from(
    ["x.txt", "y.TXT", "x.txt.gz", "y.json", "README", ".txt", ".h.txt", "__x__.txt", "__x__", "__x.txt__", "\n.txt",
     "z.", "z.tx\nt", "l\nf.txt", "x.txt\n", "__x.txt__\n"]
)  # fmt: skip
names = st.tuples(st.lists(part, max_size=3), base).map(lambda parts: "/".join([*parts[0], parts[1]]))


@given(
    members=st.lists(
        st.tuples(names, st.sampled_from(["file", *KINDS])),
        min_size=1,
        max_size=12,
        unique_by=lambda member: os.path.splitext(member[0].lower()),  # noqa: PTH122
    )
)
@settings(max_examples=300)
def test_texts_are_those_that_webdataset_takes_and_all_others_are_counted(members):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(folder / "train.tar", "w") as archive:
            add(archive, "sample.txt", b"first")
            for member, kind in members:
                fields = {"linkname": "sample.txt"} if kind.endswith("link") else {}
                add(archive, member, member.encode() if kind == "file" else b"", type=KINDS[kind], **fields)
        try:
            index_tars([str(folder / "train.tar")], folder / "index", validation_fraction=0)
        except DataError as error:
            assert "is a link or a special file" in str(error)
            assert any(kind not in ("file", "folder") and member.lower().endswith("txt") for member, kind in members)
            return
        taken = {sample.key for sample in sample_documents(folder / "index", "train", 99)}
        theirs = keys_of_webdataset(folder / "train.tar")
        hidden = {key for key in theirs if Path(key).name.startswith(".") or key.endswith("/.txt")}
        assert {key[:-3] + key[-3:].lower() for key in taken} == theirs - hidden
        assert len(taken) + sum(left_out_of(folder / "index").values()) == 1 + len(members)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("src/__tests__/a.txt", None),
        ("./__mocks__/a.txt", None),
        ("a/__x__.txt", None),
        ("__x__.txt", None),
        ("folder\nof two lines/a.txt", None),
        ("a.b/c.txt", None),
        ("__tests__/a.txt", "meta_members"),
        ("__a.txt__", "meta_members"),
        (".a.txt", "hidden_members"),
        ("a\nb/.txt", "hidden_members"),
        ("LICENSE", "members_without_extension"),
        ("a.b\nc/d.txt", "members_without_extension"),
        ("a.txt\n", "members_of_other_extensions"),
        ("a.json", "members_of_other_extensions"),
    ],
)
def test_names_decide_as_they_do_for_webdataset(tmp_path, name, reason):
    tar = write_tar(tmp_path / "train.tar", [("0.txt", b"0"), (name, b"text")])
    index_tars([str(tar)], tmp_path / "index", validation_fraction=0)
    keys = {sample.key for sample in sample_documents(tmp_path / "index", "train", 9)}
    assert keys == ({"0.txt", name} if reason is None else {"0.txt"})
    assert left_out_of(tmp_path / "index") == {"empty_samples": 0, **({reason: 1} if reason else {})}
    assert reason == "hidden_members" or keys == keys_of_webdataset(tar)


def test_the_verb_says_how_many_were_left_out_and_why(tmp_path, capsys):
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for name, kind in (
            ("a", "folder"),
            ("a/__tests__/b.txt", "file"),
            ("a/b.json", "file"),
            ("a/c.md", "symlink"),
            ("a/d", "pipe"),
            ("a/NOTICE", "file"),
            ("__meta__/x.txt", "file"),
            ("a/.DS_Store", "file"),
        ):
            fields = {"linkname": "x"} if kind == "symlink" else {}
            add(archive, name, b"text" if kind == "file" else b"", type=KINDS[kind], **fields)
    words = ["data", "index", str(tmp_path / "train.tar"), "--output", str(tmp_path / "index"), "--complete"]
    assert cli.main([*words, "--validation-fraction", "0"]) == 2  # a/b has no text
    assert cli.main([*words[:-1], "--validation-fraction", "0"]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(
        "train 4 bytes of 1 document; left out 1 samples without txt, 1 folder members, 1 members of other "
        "extensions, 1 link members, 1 special members, 1 members without extension, 1 meta members, 1 hidden members"
    )


def test_a_tar_of_nothing_but_meta_members_is_refused_with_the_way_out(tmp_path):
    write_tar(tmp_path / "train.tar", [("__tests__/a.txt", b"text")])
    with pytest.raises(DataError, match=r"members are named __…__/; rename them, as WebDataset skips such names"):
        index_tars([str(tmp_path)], tmp_path / "index", validation_fraction=0)


def test_a_tar_that_claims_more_than_an_index_may_hold_is_refused_at_its_header(tmp_path: Path) -> None:
    """It is a sparse file of a terabyte of zeros, none of which is read."""
    header = tarfile.TarInfo("a.txt")
    header.size = 2**40
    path = tmp_path / "train.tar"
    path.write_bytes(header.tobuf())
    os.truncate(path, 2**40 + 2048)
    with pytest.raises(DataError, match=r"a tar has more than 8,388,608 samples or pieces; split the tar"):
        index_tars([str(path)], tmp_path / "index", modality="text", validation_fraction=0)
    assert not (tmp_path / "index").exists()
