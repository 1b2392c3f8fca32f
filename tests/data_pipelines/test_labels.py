"""Classes of documents: from `.cls` members and files and from CIFAR-10, as WebDataset itself reads them."""

import hashlib
import json
import random
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds

from longstride.data_pipelines.building import build, build_dataset
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.shards import DataFolder, DataManifest, index_tars, verify
from longstride.launcher import cli
from tests.harness.data.builds import folder_bytes, stop_half_way, write_files
from tests.harness.data.published_files import CIFAR_BATCHES, pictures, write_cifar
from tests.harness.data.tars import write_tar

LONG = 200_000  # bytes of a document of several samples, and with SHARDS of several shards
SHARDS = {"shard_bytes": 70_000, "validation_fraction": 0.3}
SPLITS = {"train": 3, "val": 1}  # tars of each
Pairs = list[tuple[bytes, int]]


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tars whose samples have a text and a class, in either order, and an empty text without a class."""
    folder, draw = tmp_path_factory.mktemp("tars"), random.Random(0)
    for split, count in SPLITS.items():
        for shard in range(count):
            members = [(f"{split}{shard}-none.txt", b"")]
            for number in range(9):
                key, size = f"{split}{shard}-{number}", LONG if number == 4 and shard == 1 else draw.randrange(1, 90)
                pair = [(f"{key}.seg.txt", b"other"), (f"{key}.txt", b"%c" % (97 + number) * size)]
                members += draw.sample([*pair, (f"{key}.cls", b"%d\n" % (number * 7))], 3)
            write_tar(folder / f"{split}-{shard}.tar", members)
    return folder


@pytest.fixture(scope="module")
def files(tars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the tars."""
    folder = tmp_path_factory.mktemp("files")
    for path in tars.iterdir():
        with tarfile.open(path) as archive:
            archive.extractall(folder, [member for member in archive if ".seg" not in member.name], filter="data")
    return folder


def pairs_of(folder: Path, split: str, most_bytes: int | None = None) -> Pairs:
    pairs = DataFolder(folder).split(split).labelled_documents(most_bytes)
    return [(content.tobytes(), label) for content, label in pairs]


def read_by_webdataset(tars: Path, split: str) -> Pairs:
    """Read the samples with content as WebDataset does, which parses `.cls` by itself."""
    decode = wds.autodecode.Decoder([wds.autodecode.basichandlers])
    pairs = []
    for path in sorted(tars.glob(f"{split}-*.tar")):
        with path.open("rb") as stream:  # `WebDataset` itself leaves its files open
            members = wds.tariterators.tar_file_expander([{"url": str(path), "stream": stream}])
            samples = map(decode, wds.tariterators.group_by_keys(members))
            pairs += [(sample["txt"].encode(), sample["cls"]) for sample in samples if sample["txt"]]
    return pairs


def test_index_has_the_pairs_of_webdataset(tars: Path, tmp_path: Path) -> None:
    manifest = index_tars([str(tars)], tmp_path / "data", labels=True)
    assert verify(tmp_path / "data") == []
    for split, name in (("train", "train"), ("validation", "val")):
        expected = read_by_webdataset(tars, name)
        assert pairs_of(tmp_path / "data", split) == expected and len(expected) == 9 * SPLITS[name]
        assert pairs_of(tmp_path / "data", split, 5) == [(text[:5], label) for text, label in expected]
    plain = index_tars([str(tars)], tmp_path / "plain")
    labelled, unlabelled = folder_bytes(tmp_path / "data"), folder_bytes(tmp_path / "plain")
    assert labelled.keys() - unlabelled.keys() == {"labels.npy"} and plain.labels is None
    assert all(labelled[name] == unlabelled[name] for name in unlabelled if name != "manifest.json")
    assert np.load(tmp_path / "data" / "labels.npy").tolist() == [
        label for split in ("train", "validation") for _, label in pairs_of(tmp_path / "data", split)
    ]
    left_out = plain.made["left_out"]["members_of_other_extensions"]
    assert manifest.made["left_out"]["members_of_other_extensions"] == left_out - 36


def test_build_keeps_the_class_of_each_file(tars: Path, files: Path, tmp_path: Path) -> None:
    """A document of several samples and shards has one class; shards are those of a build without classes."""
    manifest = build([files], tmp_path / "data", labels=True, **SHARDS)
    assert verify(tmp_path / "data") == []
    pairs = [pair for split in manifest.splits for pair in pairs_of(tmp_path / "data", split)]
    assert sorted(pairs) == sorted(read_by_webdataset(tars, "train") + read_by_webdataset(tars, "val"))
    assert any(not shard.documents for shard in manifest.shards())  # the long one begins before it and ends after it
    assert [len(content) for content, _ in pairs_of(tmp_path / "data", "train", 3)].count(3) > 9
    build([files], tmp_path / "plain", **SHARDS)
    labelled, plain = folder_bytes(tmp_path / "data"), folder_bytes(tmp_path / "plain")
    del labelled["labels.npy"], labelled["manifest.json"], plain["manifest.json"]
    assert labelled == plain


def test_classes_that_are_not_kept_change_nothing(files: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "alone", {path.name: path.read_bytes() for path in files.glob("*.txt")})
    for source, output in ((files, "with"), (tmp_path / "alone", "without")):
        build([source], tmp_path / output, **SHARDS)
    assert folder_bytes(tmp_path / "with") == folder_bytes(tmp_path / "without")
    with pytest.raises(DataError, match=r"^.*manifest\.json: has no classes of documents; make .* with --labels$"):
        pairs_of(tmp_path / "with", "train")


def test_build_resumes_with_the_same_classes_only(files: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "data"
    write_files(source, {path.name: path.read_bytes() for path in files.iterdir()})
    build([source], tmp_path / "undisturbed", labels=True, **SHARDS)
    stop_half_way(build, [source], output, labels=True, **SHARDS)
    label, changed = source / "train0-3.cls", "holds an unfinished build of other files, or files that changed since"
    before = label.read_bytes()
    label.write_bytes(b"4")
    with pytest.raises(DataError, match=changed):
        build([source], output, labels=True, **SHARDS)
    with pytest.raises(DataError, match="holds an unfinished build of other settings"):
        build([source], output, **SHARDS)
    label.write_bytes(before)
    build([source], output, labels=True, **SHARDS)
    assert folder_bytes(output) == folder_bytes(tmp_path / "undisturbed")
    build([source], output, labels=True, **SHARDS)  # it is there already
    label.write_bytes(b"4")
    with pytest.raises(DataError, match="holds a data set made from other files"):
        build([source], output, labels=True, **SHARDS)


RULE = "must be a class as digits, from 0 to 2147483647, such as 3; correct it, or leave out --labels"
WRONG = {
    "cat": rf"='cat': {RULE}$",
    "-1": rf"='-1': {RULE}$",
    "1.0": rf"='1\.0': {RULE}$",
    "": rf"='': {RULE}$",
    "2147483648": rf"='2147483648': {RULE}$",
    "3" + " " * 70: rf"='3 +': {RULE}$",
    "٣": rf"='٣': {RULE}$",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_class_gets_one_line(text: str, tmp_path: Path) -> None:
    members = {"a.txt": b"one", "b.txt": b"two", "a.cls": b" 2147483647 ", "b.cls": text.encode()}
    source = write_files(tmp_path / "source", members)
    with pytest.raises(DataError, match=rf"^{source}/b\.cls{WRONG[text]}"):
        build([source], tmp_path / "data", labels=True)
    tar = write_tar(tmp_path / "t.tar", list(members.items()))
    with pytest.raises(DataError, match=rf"^{tar}: member b\.cls{WRONG[text]}"):
        index_tars([str(tar)], tmp_path / "data", labels=True, validation_fraction=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "t.tar"]


def test_missing_class_gets_one_line(tmp_path: Path) -> None:
    members = {"a.txt": b"one", "b.txt": b"two", "a.cls": b"1"}
    source = write_files(tmp_path / "source", members)
    with pytest.raises(DataError, match=rf"^{source}/b\.txt: has no b\.cls with its class; add it, or leave out "):
        build([source], tmp_path / "data", labels=True)
    tar = write_tar(tmp_path / "t.tar", list(members.items()))
    with pytest.raises(DataError, match=rf"^{tar}: sample b has no member \.cls with its class; add it, or leave "):
        index_tars([str(tar)], tmp_path / "data", labels=True, validation_fraction=0)
    twice = write_tar(tmp_path / "twice.tar", [*members.items(), ("a.cls", b"2")])
    with pytest.raises(DataError, match=r": member a\.cls occurs twice in this tar"):
        index_tars([str(twice)], tmp_path / "data", labels=True, validation_fraction=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"field": "text"}, "field=text: records have no .cls files; leave out --labels, or build from files"),
        ({"suffixes": []}, "suffixes=any: would take the .cls files of --labels as documents; name the documents' suf"),
        ({"suffixes": [".cls"]}, "suffixes=.cls: would take the .cls files of --labels as documents; name the docum"),
    ],
)
def test_options_without_classes_are_refused(options: dict, message: str, files: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        build([files], tmp_path / "data", labels=True, **options)
    assert str(error.value).startswith(message)


def test_index_overwrites_no_list_of_classes(tars: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "data", {"labels.npy": b"mine"})
    with pytest.raises(DataError, match=r"labels\.npy: already exists and is not overwritten"):
        index_tars([str(tars)], tmp_path / "data", labels=True)
    index_tars([str(tars)], tmp_path / "data")
    assert (tmp_path / "data" / "labels.npy").read_bytes() == b"mine"


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("damage", [flipped, lambda content: content[:-4], None], ids=["flipped", "short", "missing"])
def test_damaged_classes_are_noticed(damage: Callable[[bytes], bytes] | None, tars: Path, tmp_path: Path) -> None:
    index_tars([str(tars)], tmp_path / "data", labels=True)
    path = tmp_path / "data" / "labels.npy"
    content = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(content))
    (finding,) = verify(tmp_path / "data")
    assert finding.startswith(f"{path}: ")
    with pytest.raises(DataError, match=r"labels\.npy: "):
        pairs_of(tmp_path / "data", "train")


def test_list_of_another_length_is_refused(tars: Path, tmp_path: Path) -> None:
    """The manifest may be sound and list a file that does not fit it."""
    index_tars([str(tars)], tmp_path / "data", labels=True)
    manifest = DataFolder(tmp_path / "data").manifest
    np.save(tmp_path / "data" / "labels.npy", np.zeros(7, dtype="<i4"))
    content = (tmp_path / "data" / "labels.npy").read_bytes()
    manifest.made["labels"].update(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(DataError, match=r"labels\.npy: is not a list of 36 classes, one for each document; "):
        pairs = DataFolder(tmp_path / "data", manifest=manifest).split("train").labelled_documents()
        next(pairs)


@pytest.mark.parametrize("change", [{"size": 2**40}, {"size": -1}, {"name": "../labels.npy"}, {"sha256": "0"}], ids=str)
def test_manifest_with_an_impossible_list_is_refused(change: dict[str, Any], tars: Path, tmp_path: Path) -> None:
    manifest = index_tars([str(tars)], tmp_path / "data", labels=True)
    manifest = replace(manifest, made={**manifest.made, "labels": manifest.made["labels"] | change})
    with pytest.raises(DataError, match=r"^m: incomplete or misspelt \((labels\.npy|made\.labels\..*): "):
        DataManifest.parse("m", manifest.to_json().encode())


@pytest.mark.parametrize("version", ["binary", "python2"])
def test_cifar10_keeps_its_labels(version: str, tmp_path: Path) -> None:
    batches = {name: pictures(25, 32, seed) for seed, name in enumerate(CIFAR_BATCHES)}
    source = write_cifar(tmp_path / "source", batches, version)
    build_dataset("cifar10", source, tmp_path / "data", unpublished=True, labels=True)
    build_dataset("cifar10", source, tmp_path / "plain", unpublished=True)
    assert verify(tmp_path / "data") == []
    rows = np.concatenate([batches[name] for name in CIFAR_BATCHES[:5]]).reshape(125, -1)
    expected = [(row.tobytes(), number % 25 % 10) for number, row in enumerate(rows)]
    assert pairs_of(tmp_path / "data", "train") == expected[:120]
    assert pairs_of(tmp_path / "data", "validation") == expected[120:]
    assert [label for _, label in pairs_of(tmp_path / "data", "test")] == [number % 10 for number in range(25)]
    assert json.loads((tmp_path / "plain" / "manifest.json").read_text())["made"].keys() == {"settings", "left_out"}


def test_dataset_without_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^dataset=text8: has no classes of documents; leave out --labels$"):
        build_dataset("text8", tmp_path, tmp_path / "data", labels=True)


def test_command_line_keeps_and_shows_classes(
    tars: Path, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(tmp_path / "built")
    assert cli.main(["data", "build", str(files), "--labels", "--output", data]) == 0
    log = capsys.readouterr().err
    assert ", with classes; left out 4 empty files" in log and ".cls" not in log
    assert cli.main(["data", "index", str(tars), "--labels", "--output", str(tmp_path / "indexed")]) == 0
    assert ", with classes; left out" in capsys.readouterr().err
    assert cli.main(["data", "show", data, "--count", "9"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("===") and " of train" in line]
    for head in heads:
        name, label = head.partition("from ")[2].split(":")[0].split(", class ")
        assert (files / name).with_suffix(".cls").read_text() == f"{label}\n"
    assert len(heads) == 9
