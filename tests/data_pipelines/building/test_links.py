"""Links in folders that a person names, such as a hub's cache: those to files are followed, others counted."""

import gzip
import hashlib
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.evaluation import split_bytes
from longstride.data_pipelines.shards import DataFolder, index_tars, verify
from longstride.launcher import cli
from tests.harness.data.builds import picture, sound, write_files
from tests.harness.data.tars import write_tar


def cached(folder: Path, files: dict[str, bytes], revision: str = "0123abcd") -> Path:
    """Create a snapshot as in a hub's cache: links by name to contents by checksum."""
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        link = folder / "snapshots" / revision / name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return folder / "snapshots" / revision


def rows(number: int) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {number}"]}), file)
    return file.getvalue()


def line(number: int) -> bytes:
    return json.dumps({"text": f"line {number}"}).encode() + b"\n"


def text(number: int) -> bytes:
    return b"text %d" % number


KINDS = {
    "texts": ("{}.txt", text, {}),
    "lines": ("data/{}.jsonl", line, {"field": "text"}),
    "rows": ("data/{}.parquet", rows, {"field": "text"}),
    "pictures": ("{}.png", lambda number: picture(np.full((4, 4, 3), number, np.uint8)), {"modality": "image"}),
    "sounds": ("{}.wav", lambda number: sound(np.full(50, 100 * number)), {"modality": "audio"}),
    "other names": ("{}.rs", text, {"suffixes": (".rs",)}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_links_to_files_are_read_as_the_files_are(tmp_path, kind):
    name, content, options = KINDS[kind]
    files = {name.format(number): content(number) for number in range(12)}
    source = cached(tmp_path / "datasets--a--b", files)
    manifest = build([source], tmp_path / "linked", **options)
    assert (
        manifest.fingerprint
        == build([write_files(tmp_path / "plain", files)], tmp_path / "copied", **options).fingerprint
    )
    assert manifest.made["left_out"]["symlinks"] == 0 and verify(tmp_path / "linked") == []
    assert build([source], tmp_path / "linked", **options) == manifest  # compared with what is there
    first = next(iter(files))
    build([source / first], tmp_path / "one", **options, validation_fraction=0)
    assert b"".join(split_bytes(tmp_path / "one", "train"))


def test_a_file_is_taken_once_by_its_own_name_or_else_by_its_first(tmp_path, capsys):
    """Otherwise it could be in both splits."""
    source = write_files(tmp_path / "source", {"m.txt": b"m", "sub/n.txt": b"n"})
    write_files(tmp_path / "else", {"x.txt": b"x"})
    for name, target in (
        ("a.txt", "m.txt"),
        ("z.txt", "sub/n.txt"),
        ("b.txt", "../else/x.txt"),
        ("c.txt", "b.txt"),
        ("d.txt", "../else/../else/x.txt"),
    ):
        (source / name).symlink_to(target)
    output = tmp_path / "data"
    words = ["data", "build", str(source), "--output", str(output), "--validation-fraction", "0"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        f"longstride: followed 1 links to files: 1 in {tmp_path / 'else'}",
        "longstride: left out 4 links: 4 to files that are taken already",
    ]
    assert lines[-1].endswith("of 3 documents; left out 4 symlinks")
    sources = [json.loads(each)["source"] for each in (output / "sources.jsonl").read_text().splitlines()]
    assert sorted(sources) == ["b.txt", "m.txt", "sub/n.txt"]


@pytest.mark.parametrize("inputs", [("links", "files"), ("files", "links"), ("links/a.txt", "again")])
def test_a_file_that_a_link_in_another_input_leads_to_is_taken_once(tmp_path, inputs):
    write_files(tmp_path / "files", {"x.txt": b"x"})
    for folder in ("links", "again"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").symlink_to(tmp_path / "files" / "x.txt")
    manifest = build([tmp_path / each for each in inputs], tmp_path / "data", validation_fraction=0)
    assert manifest.splits["train"].documents == 1 and manifest.made["left_out"]["symlinks"] == 1
    (record,) = (tmp_path / "data" / "sources.jsonl").read_text().splitlines()
    assert json.loads(record)["source"] == ("x.txt" if "files" in inputs else "a.txt")


def test_a_whole_cache_of_several_revisions_is_taken_once(tmp_path):
    files = {f"{number}.txt": text(number) for number in range(5)}
    cached(tmp_path / "hub", files, "old")
    cached(tmp_path / "hub", {**files, "new.txt": b"new"}, "recent")
    manifest = build([tmp_path / "hub"], tmp_path / "data", validation_fraction=0)
    assert manifest.splits["train"].documents == 6 and manifest.made["left_out"]["symlinks"] == 5


def test_links_to_folders_and_to_nothing_are_counted_and_said(tmp_path, capsys):
    source = write_files(tmp_path / "source", {"a.txt": b"a"})
    (source / "circle").symlink_to(".")
    (source / "folder.txt").symlink_to("circle")
    (source / "nowhere.txt").symlink_to("missing")
    (source / "itself.txt").symlink_to("itself.txt")
    (source / "other.rs").symlink_to("missing")  # was not asked for
    os.mkfifo(tmp_path / "pipe")
    (source / "pipe.txt").symlink_to(tmp_path / "pipe")
    words = ["data", "build", str(source), "--validation-fraction", "0", "--output"]
    assert cli.main([*words, str(tmp_path / "data")]) == 0
    lines = capsys.readouterr().err.splitlines()
    said = lines[0].removeprefix("longstride: left out 5 links: ").partition("; ")
    assert set(said[0].split(", ")) - {"sockets or devices"} == {"2 to folders", "2 to nothing", "1 to pipes"}
    assert said[2] == "name a folder itself to take what it holds"
    assert lines[-1].endswith("left out 5 symlinks")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "missing",
            r"no matching file \(.*; left out: 1 links to nothing\); fetch or copy again the files that the links",
        ),
        ("folder", r"no matching file \(.*; left out: 1 links to folders\); name the folders that the links point to$"),
    ],
)
def test_a_folder_of_links_that_lead_to_no_file_is_refused_with_the_way_out(tmp_path, target, message):
    write_files(tmp_path / "folder", {"a.txt": b"a"})
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").symlink_to(tmp_path / target)
    with pytest.raises(DataError, match=message):
        build([tmp_path / "source"], tmp_path / "data")
    if target == "missing":
        with pytest.raises(DataError, match=r"a\.txt: a link to nothing; name an input that exists"):
            build([tmp_path / "source" / "a.txt"], tmp_path / "data")
    else:
        build([tmp_path / "source" / "a.txt"], tmp_path / "data", validation_fraction=0)


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "lines.gz", "LINES", "json", "no suffix", "mixed"])
def test_advice_leads_to_a_data_folder_and_never_in_a_circle(tmp_path, capsys, kind, linked):
    """Follow each advice of a message, and of the messages after it, until there is a data folder."""
    files = {
        "lines.gz": {f"{number}.jsonl.gz": gzip.compress(line(number)) for number in range(9)},
        "LINES": {f"{number}.JSONL": line(number) for number in range(9)},
        "json": {f"{number}.json": line(number) for number in range(9)},
        "no suffix": {f"{number}": text(number) for number in range(9)},
        "mixed": {f"{number}.{end}": line(number) for number in range(9) for end in ("json", "rs", "x")},
    }.get(kind) or {KINDS[kind][0].format(number): KINDS[kind][1](number) for number in range(9)}
    source = (cached if linked else write_files)(tmp_path / "source", files)
    ways: list[tuple[str, ...]] = [()]
    reached = 0
    for number in range(40):
        if not ways:
            break
        options = ways.pop()
        words = ["data", "build", str(source), "--output", str(tmp_path / f"{number}"), *options]
        code = cli.main(words)
        told = capsys.readouterr().err
        if code == 0:
            reached += 1
            continue
        advice = told.rpartition(";")[2]
        more: list[tuple[str, ...]] = []
        more += [("--modality", name) for name in re.findall(r"--modality (\w+)", advice)]
        more += [("--field", "text")] if "--field" in advice else []
        suffixes = re.findall(r"\.[A-Za-z]+(?=[,:])", told.partition("there are ")[2])
        more += [tuple(w for end in suffixes for w in ("--suffix", end))] if "--suffix" in advice else []
        more += [(option,) for option in ("--all-files", "--raw") if option in advice]
        assert more, f"a dead end: {words} {told}"
        assert not [way for way in more if way[0] in options], f"a circle: {words} {told}"
        ways += [(*options, *way) for way in more]
    assert reached and not ways


# Tars.


def test_tars_of_a_cache_are_indexed_by_their_links(tmp_path):
    names = ["data/train-0.tar", "data/train-1.tar", "data/val-0.tar", "test/0.tar"]
    tars = {}
    for name in names:
        tars[name] = write_tar(tmp_path / "one.tar", [("x.txt", name.encode())]).read_bytes()
    source = cached(tmp_path / "hub", tars)
    (source / "more").symlink_to(tmp_path)
    manifest = index_tars([str(source)], tmp_path / "index")
    assert sorted(shard.name for shard in manifest.shards()) == names
    assert manifest.made["left_out"]["links_to_folders"] == 1 and verify(tmp_path / "index") == []
    assert b"".join(split_bytes(tmp_path / "index", "validation")) == b"data/val-0.tar"
    copied = index_tars([str(source)], tmp_path / "unpacked", unpack=True)
    assert copied.fingerprint == manifest.fingerprint
    assert not any(path.is_symlink() for path in (tmp_path / "unpacked").rglob("*"))
    single = index_tars([str(source / names[0])], tmp_path / "single", validation_fraction=0)
    assert DataFolder(tmp_path / "single").manifest.fingerprint == single.fingerprint


def test_one_tar_by_two_names_is_refused(tmp_path):
    tar = write_tar(tmp_path / "tars" / "a" / "0.tar", [("x.txt", b"x")])
    (tmp_path / "tars" / "1.tar").symlink_to(tar)
    (tmp_path / "again").symlink_to(tmp_path / "tars")
    rule = r"are links to the same tar; name one of them, or its folder$"
    with pytest.raises(DataError, match=rf"^(1\.tar and a/0\.tar|a/0\.tar and 1\.tar): {rule}"):
        index_tars([str(tmp_path / "tars")], tmp_path / "index")
    with pytest.raises(DataError, match=rule):
        index_tars([str(tmp_path / "tars" / "a"), str(tmp_path / "again" / "a")], tmp_path / "index")
    index_tars([str(tmp_path / "tars" / "a")], tmp_path / "index", validation_fraction=0)


def test_links_to_folders_of_tars_are_named_as_the_way_out(tmp_path):
    write_tar(tmp_path / "tars" / "0.tar", [("x.txt", b"x")])
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "tars").symlink_to(tmp_path / "tars")
    with pytest.raises(DataError, match=r"contains no tar .*; name a folder that one of the 1 links leads to$"):
        index_tars([str(tmp_path / "links")], tmp_path / "index")
    index_tars([str(tmp_path / "links" / "tars")], tmp_path / "index", validation_fraction=0)
