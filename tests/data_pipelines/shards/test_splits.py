"""Which split the tars of an index belong to, by words in their names: nothing held out is trained on unasked."""

import gzip
import re
import shlex
import string
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards import index_tars
from longstride.data_pipelines.shards.tars import FoundTar, deal_tars
from longstride.launcher import cli
from tests.harness.data.tars import write_tar
from tests.hostile.generators.http_servers import serving_folder

SPLITS = {
    "train": "train",
    "training": "train",
    "trainset": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "valset": "validation",
    "dev": "validation",
    "eval": "validation",
    "evaluation": "validation",
    "test": "test",
    "testing": "test",
    "testdata": "test",
}
HELD_OUT = re.compile(r"(?<![a-z])(validation|valid|val|dev|eval|test)(?![a-z])", re.IGNORECASE)
OPTION = re.compile(r"--split ((?:[^\s'\"]|'[^']*'|\"[^\"]*\")+)")


def dealt(names, splits=(), fraction=None) -> dict[str, list[str]]:
    """Return the names of the tars of each split."""
    tars = [FoundTar(name, 1) for name in sorted(names)]
    return {split: [tar.source for tar in members] for split, members in deal_tars(tars, splits, fraction).items()}


def advised(message: str) -> list[str]:
    """Extract the rules of a message's options; the first of several alternatives."""
    choices = [re.split(r" or (?=--split|to train)", choice)[0] for choice in message.split(", and --split ")]
    words = [word for choice in choices for word in OPTION.findall(f"--split {choice}")]
    return [shlex.split(word.removesuffix(","))[0] for word in words if "=" in word]


@pytest.mark.parametrize("word", SPLITS)
@pytest.mark.parametrize(
    "form", ["{}-0", "cc12m-{}-0000", "pile_{}_00", "en.{}.0", "x-{}", "{}2017", "a/{}/0", "{}/b/0", "0{}0", "ü {}!"]
)
@pytest.mark.parametrize("letters", [str.lower, str.upper, str.title])
def test_words_between_characters_that_are_no_letters_name_a_split(word, form, letters):
    name, fitting = f"{form.format(letters(word))}.tar", SPLITS[word]
    for ending in ("", ".gz", ".zst"):
        found = dealt([name + ending, "other-train-0.tar", "unnamed.tar"], fraction=0)
        assert set(found["train"]) | {name + ending} == {"other-train-0.tar", *found[fitting]}
        assert name + ending in found[fitting] and found.keys() == {"train", fitting}
    if fitting != "train":
        assert dealt([name, "00000.tar", "1.tar"], fraction=0) == {"train": ["00000.tar", "1.tar"], fitting: [name]}


@pytest.mark.parametrize("name", ["latest", "contest-0", "devil", "value_0", "medieval", "invalid", "ätest", "testé"])
def test_letters_within_other_words_name_nothing(name):
    assert dealt([f"{name}.tar", "0.tar"], fraction=0) == {"train": sorted([f"{name}.tar", "0.tar"])}


def test_names_of_one_kind_are_one_split():
    names = ["train/0.tar", "val/0.tar", "validation/val-1.tar", "VALID_2.tar", "test/0.tar", "other.tar"]
    assert dealt(names) == {
        "test": ["test/0.tar"],
        "train": ["train/0.tar"],
        "validation": ["VALID_2.tar", "val/0.tar", "validation/val-1.tar"],
    }


def test_a_share_of_the_tars_validates_beside_a_test_split():
    found = dealt([f"train-{number}.tar" for number in range(9)] + ["test-0.tar"])
    assert found["test"] == ["test-0.tar"] and len(found["validation"]) == 1 and len(found["train"]) == 8


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["train-val-0.tar", "train-0.tar", "train-1.tar"],
            "split: train-val-0.tar has train and validation in its name; give --split train='train-[0-9]*.tar', "
            "and --split train=train-val-0.tar or --split validation=train-val-0.tar",
        ),
        (
            ["test/dev-0.tar"],
            "split: test/dev-0.tar has dev and test in its name; give --split validation=test/dev-0.tar or --split "
            "test=test/dev-0.tar",
        ),
        (
            ["dev-0.tar", "dev-1.tar", "eval-a.tar", "eval-b.tar", "0.tar", "1.tar"],
            "split: dev-0.tar and eval-a.tar are both named like a validation split; give --split "
            "eval='eval-*.tar' --split train='[0-9]*.tar' --split validation='dev-*.tar', or other names",
        ),
        (
            ["test-00.tar", "test-01.tar"],
            "split: test-00.tar is held out by its name, as all are; give --split test='test-*.tar', or to train on "
            "them --split train='test-*.tar'",
        ),
        (
            ["it's [val]*.tar"],
            "split: it's [val]*.tar is held out by its name, as all are; give --split validation='it'\"'\"'s "
            "[[]val][*].tar', or to train on them --split train='it'\"'\"'s [[]val][*].tar'",
        ),
    ],
)
def test_names_that_leave_open_what_is_held_out_are_refused_with_the_options(names, message):
    with pytest.raises(DataError) as caught:
        dealt(names, fraction=0)
    assert str(caught.value) == message
    assert dealt(names, advised(message))


part = st.sampled_from([*SPLITS, "shard", "a", "b", "0", "17", "it's", "[x]"])
names = st.lists(part, min_size=1, max_size=3).flatmap(
    lambda parts: st.lists(st.sampled_from("-_./ 4"), min_size=len(parts) - 1, max_size=len(parts) - 1).map(
        lambda between: "".join(a + b for a, b in zip(parts, [*between, ".tar"], strict=True))
    )
)


@given(names=st.lists(names, min_size=1, max_size=9, unique=True))
@example(names=["validation.tar", "train/validation.tar"])
@example(names=["train-validation.tar", "train-dev.tar"])
def test_nothing_that_is_named_as_held_out_is_trained_on_unasked(names):
    """If it is rejected, the options in the message assign each tar with such a word to a split."""
    try:
        found = dealt(names, fraction=0)
    except DataError as error:
        if "…" in str(error):  # more than a line can name
            return
        found = dealt(names, advised(str(error)))
        placed = {name for members in found.values() for name in members}
        assert placed >= {name for name in names if HELD_OUT.search(name)}
        assert "or --split" in str(error) or not any(map(HELD_OUT.search, found.get("train", ())))
    else:
        assert "train" in found and not any(map(HELD_OUT.search, found["train"]))
        placed = {name for members in found.values() for name in members}
        assert placed >= {name for name in names if HELD_OUT.search(name)}


# Wherever the tars lie.

TARS = {
    "cc12m-train-0000.tar": "train",
    "cc12m-train-0001.tar": "train",
    "pile_val_00.tar": "validation",
    "val/00000.tar": "validation",
    "a/b/Validation (2)/x,val.tar": "validation",
    "en.test.00.tar": "test",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in TARS:
        write_tar(tmp_path / "tars" / name, [("x.txt", name.encode())])
    return tmp_path / "tars"


@pytest.mark.parametrize("place", ["folder", "pattern", "unpack", "web", "fsspec"])
def test_local_packed_and_remote_tars_are_dealt_alike(folder, tmp_path, quick_servers, place):
    options = {"remote": RemoteSettings(cache=str(tmp_path / "cache")), "unpack": place == "unpack"}
    if place == "unpack":
        for path in list(folder.rglob("*.tar")):
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    if place == "web":
        with serving_folder(folder) as url:
            manifest = index_tars([f"{url}/"], tmp_path / "index", **options)
    elif place == "fsspec":
        import fsspec

        for name in TARS:
            fsspec.filesystem("memory").pipe(f"/dealing/{name}", (folder / name).read_bytes())
        manifest = index_tars(["memory://dealing"], tmp_path / "index", **options)
    else:
        places = {"folder": str(folder), "pattern": f"{folder}/**/*.tar", "unpack": str(folder)}
        manifest = index_tars([places[place]], tmp_path / "index", **options)
    splits = {shard.name: name for name, split in manifest.splits.items() for shard in split.shards}
    assert sorted(splits.values()) == sorted(TARS.values())
    assert {name: split for name, split in splits.items() if "%" not in name and "(" not in name} == {
        name: split for name, split in TARS.items() if "(" not in name
    }


def test_the_verb_says_what_it_takes_as_what(folder, tmp_path, capsys):
    assert cli.main(["data", "index", str(folder), "--output", str(tmp_path / "index")]) == 0
    assert capsys.readouterr().err.splitlines()[:-1] == [
        "longstride: test: 1 tar, en.test.00.tar",
        "longstride: train: 2 tars, cc12m-train-0000.tar to cc12m-train-0001.tar",
        "longstride: validation: 3 tars, a/b/Validation (2)/x,val.tar to val/00000.tar",
    ]
    write_tar(folder / "x-dev.tar", [("x.txt", b"x")])
    words = ["data", "index", str(folder), "--output", str(tmp_path / "other")]
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not (tmp_path / "other").exists()
    options = [word for rule in advised(line.removeprefix("longstride: error: ")) for word in ("--split", rule)]
    assert cli.main([*words, *options]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "longstride: dev: 1 tar, x-dev.tar" and "train: 2 tars" in lines[2]


def test_given_splits_decide_whatever_the_names_say(folder, tmp_path):
    manifest = index_tars([str(folder)], tmp_path / "index", splits=["train=*.tar"])
    assert {name: len(split.shards) for name, split in manifest.splits.items()} == {"train": len(TARS)}


def test_letters_of_any_case_and_alphabet_are_letters():
    for letter in (*string.ascii_letters, "ß", "é", "щ", "中"):
        assert dealt([f"{letter}dev.tar", f"dev{letter}.tar"], fraction=0).keys() == {"train"}
