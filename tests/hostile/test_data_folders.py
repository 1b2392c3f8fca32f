"""Data folders, tars, archives and records that lie: one line each, in bounded time and memory, by every data verb."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longstride.data_pipelines.building import build
from tests.harness.data.builds import write_files
from tests.harness.data.published_files import pictures, write_cifar, zipped
from tests.hostile.commands import Commands, Outcome, sampled
from tests.hostile.generators.archives import ARRAYS, BOMBS, NAMES, PICKLES, TARS, gzip_bomb, member, zstd_bomb
from tests.hostile.generators.files import HOSTILE_JSON, NO_FILES, replace, sparse
from tests.hostile.generators.shards import FIELDS, LIES, VALUES, set_field


@pytest.fixture(scope="session")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a data folder of a few shards."""
    base = tmp_path_factory.mktemp("honest")
    write_files(base / "texts", {f"{number}.txt": f"text {number}\n".encode() * 40 for number in range(12)})
    build([base / "texts"], base / "data", validation_fraction=0.2, shard_bytes=1200)
    return base / "data"


@pytest.fixture
def folder(honest: Path, tmp_path: Path) -> Path:
    """Copy the data folder, to be damaged."""
    return shutil.copytree(honest, tmp_path / "data")


@pytest.fixture(scope="session")
def check(commands: Commands, honest: Path) -> Callable[..., None]:
    """Return a function of verbs, a damaged folder and options that checks what the verbs say of the damage.

    A verb refuses the folder in a line, or `verify` prints lines about the damage.
    """
    expected = {verb: commands("data", verb, honest) for verb in ("verify", "show")}
    assert [outcome.code for outcome in expected.values()] == [0, 0], [outcome.err for outcome in expected.values()]

    def run(verb: str, folder: Path, *options: str) -> None:
        outcome = commands("data", verb, folder, *options)
        if outcome.code == 1 and verb == "verify":
            outcome.check_bounded(expected[verb])
            lines = outcome.out.splitlines()
            assert lines and max(map(len, lines)) <= 1000, outcome.out[:2000]
        else:
            outcome.check_refused(expected[verb])

    return run


@pytest.mark.parametrize(("field", "value"), sampled(itertools.product(FIELDS, VALUES), 25), ids=str)
def test_manifest_of_other_types(check: Callable[..., None], folder: Path, field: tuple[Any, ...], value: str) -> None:
    set_field(folder, field, VALUES[value])
    check("show", folder)


@pytest.mark.parametrize("what", sampled(HOSTILE_JSON, 5))
@pytest.mark.parametrize("verb", ["verify", "show"])
def test_manifest_of_other_json(check: Callable[..., None], folder: Path, verb: str, what: str) -> None:
    (folder / "manifest.json").write_bytes(HOSTILE_JSON[what]())
    check(verb, folder)


@pytest.mark.parametrize("kind", sampled(NO_FILES, 4))
@pytest.mark.parametrize("name", ["manifest.json", "train-00000.tar", "train-00000.index.npy"])
def test_no_file_in_the_place_of_one(check: Callable[..., None], folder: Path, name: str, kind: str) -> None:
    replace(folder / name, kind)
    check("verify", folder)
    check("show", folder, "--split", "train")


@pytest.mark.parametrize("what", sampled(LIES, 6))
def test_sealed_folder_that_lies(check: Callable[..., None], folder: Path, what: str) -> None:
    LIES[what](folder)
    check("verify", folder)
    check("show", folder, "--split", "train")


@pytest.fixture(scope="session")
def indexed(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return the outcome of `data index` on an intact tar."""
    folder = tmp_path_factory.mktemp("indexed")
    (folder / "train.tar").write_bytes(member("a.txt") + bytes(1024))
    outcome = commands("data", "index", folder / "train.tar", "--output", folder / "out", "--validation-fraction", 0)
    assert outcome.code == 0, outcome.err
    return outcome


def index(commands: Commands, tar: Path, *options: str) -> Outcome:
    output = tar.parent / "out"
    outcome = commands("data", "index", tar, "--output", output, "--validation-fraction", 0, *options)
    assert outcome.code == 0 or not output.exists(), list(output.rglob("*"))
    return outcome


@pytest.mark.parametrize("what", sampled(TARS, 5))
def test_tar_that_lies(commands: Commands, indexed: Outcome, tmp_path: Path, what: str) -> None:
    tar = tmp_path / "train.tar"
    tar.write_bytes(TARS[what]())
    outcome = index(commands, tar)
    if outcome.code == 0:  # what it holds beside
        outcome.check_bounded(indexed)
        manifest = json.loads((tmp_path / "out/manifest.json").read_text())
        shards = manifest["splits"]["train"]["shards"]
        expected = 5001 if what == "a thousand global headers" else 5
        assert [shard["content_bytes"] % expected for shard in shards] == [0]
    else:
        outcome.check_refused(indexed)


@pytest.mark.parametrize("name", sampled(NAMES, 3))
def test_name_of_a_member_leads_nowhere(commands: Commands, indexed: Outcome, tmp_path: Path, name: str) -> None:
    tar = tmp_path / "sub" / "train.tar"
    tar.parent.mkdir()
    tar.write_bytes(member(name) + bytes(1024))
    outcome = index(commands, tar, "--unpack")
    outcome.check_bounded(indexed)
    assert outcome.code == 0, outcome.err
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "train.tar", "manifest.json", "train.index.npy"
    }  # fmt: skip
    shown = commands("data", "show", tar.parent / "out")
    assert shown.code == 0 and "\x1b" not in shown.out + shown.err and "\u202e" not in shown.out + shown.err


@pytest.mark.parametrize("what", BOMBS)
def test_sparse_tar(commands: Commands, indexed: Outcome, tmp_path: Path, what: str) -> None:
    BOMBS[what](tmp_path / "train.tar")
    index(commands, tmp_path / "train.tar").check_refused(indexed)


@pytest.mark.campaign
@pytest.mark.parametrize(("ending", "bomb"), [(".tar.gz", gzip_bomb), (".tar.zst", zstd_bomb)])
def test_bomb(commands: Commands, indexed: Outcome, tmp_path: Path, ending: str, bomb: Callable[[int], bytes]) -> None:
    tar = tmp_path / f"train{ending}"
    tar.write_bytes(bomb(2**40 if ending == ".tar.zst" else 2**36))
    outcome = index(commands, tar, "--unpack")
    assert "unpacks to more than 200 times its size" in outcome.check_refused(indexed)
    path = tmp_path / "a.txt"
    tar.rename(path)
    built = commands("data", "build", path, "--output", tmp_path / "built", "--validation-fraction", 0)
    built.check_refused(indexed)


@pytest.mark.parametrize("kind", sampled([kind for kind in NO_FILES if kind != "folder"], 3))
def test_no_file_among_sources(commands: Commands, indexed: Outcome, tmp_path: Path, kind: str) -> None:
    texts = write_files(tmp_path / "texts", {f"{number}.txt": b"%d\n" % number * 9 for number in range(3)})
    replace(texts / "no.txt", kind)
    outcome = commands("data", "build", texts, "--output", tmp_path / "data")
    outcome.check_bounded(indexed)
    assert outcome.code == 0, outcome.err
    left_out = "1 symlinks" if "link" in kind else "1 pipes sockets and devices"
    assert left_out in outcome.err
    for modality in ("text", "image", "audio"):
        words = ("--modality", modality, "--output", tmp_path / "other", "--validation-fraction", 0)
        commands("data", "build", texts / "no.txt", *words).check_refused(indexed)
    tar = tmp_path / "train.tar"
    replace(tar, kind)
    index(commands, tar).check_refused(indexed)


RECORDS: dict[str, tuple[Callable[[Path], object], bool]] = {  # and whether it is read
    "a line of 10 GB": (lambda path: sparse(path, 10 * 2**30), False),
    "numbers of 5,000 digits": (lambda path: path.write_bytes(b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n"), True),
    "a text of 5,000 digits": (lambda path: path.write_bytes(b'{"text": ' + b"9" * 5000 + b"}\n"), False),
    "100,000 lists deep": (lambda path: path.write_bytes(b'{"text": "a", "n": ' + b"[" * 100_000 + b"\n"), False),
    "30 MB of lists": (lambda path: path.write_bytes(b'{"text": "a", "n": [' + b"[]," * 10_000_000 + b"[]]}\n"), True),
    "30 MB of numbers": (lambda path: path.write_bytes(b'{"text": "a", "n": [' + b"1.5," * 7_500_000 + b"1]}\n"), True),
    "300 MB of a text": (lambda path: path.write_bytes(b'{"text": "' + b"x" * 300_000_000 + b'"}\n'), False),
    "half a character": (lambda path: path.write_bytes(b'{"text": "\\ud800"}\n'), False),
    "zeros": (lambda path: path.write_bytes(bytes(4096)), False),
    "a field of 200 kB": (lambda path: path.write_bytes(b'{"' + b"n" * 200_000 + b'": 1}\n'), False),
}


@pytest.mark.parametrize("what", sampled(RECORDS, 3))
def test_records(commands: Commands, indexed: Outcome, tmp_path: Path, what: str) -> None:
    make, is_read = RECORDS[what]
    make(tmp_path / "a.jsonl")
    words = ("--output", tmp_path / "data", "--field", "text", "--validation-fraction", 0)
    outcome = commands("data", "build", tmp_path / "a.jsonl", *words)
    if is_read:
        outcome.check_bounded(indexed)
        assert outcome.code == 0 and "train 1 bytes of 1 document" in outcome.err, outcome.err
    else:
        outcome.check_refused(indexed)


def test_text_of_a_sparse_petabyte(commands: Commands, indexed: Outcome, tmp_path: Path) -> None:
    sparse(tmp_path / "a.txt", 2**43)
    outcome = commands("data", "build", tmp_path / "a.txt", "--output", tmp_path / "data", "--validation-fraction", 0)
    assert "but the disk holds only" in outcome.check_refused(indexed)


@pytest.fixture
def refuse_dataset(commands: Commands, indexed: Outcome, tmp_path: Path) -> Callable[[str, Path], None]:
    """Return a function that checks that a build refuses a published dataset, and runs nothing of it."""

    def check(dataset: str, source: Path) -> None:
        words = ("--dataset", dataset, "--unpublished", "--input", source, "--output", tmp_path / "data")
        commands("data", "build", *words, folder=tmp_path).check_refused(indexed)
        assert not (tmp_path / "ran").exists()

    return check


@pytest.mark.parametrize("what", sampled(PICKLES, 4))
def test_batch_of_cifar10(refuse_dataset: Callable[[str, Path], None], tmp_path: Path, what: str) -> None:
    folder = write_cifar(tmp_path / "cifar", {"data_batch_2": pictures(3, 32)}, "python3")
    (folder / "data_batch_1").write_bytes(PICKLES[what]())
    refuse_dataset("cifar10", folder)


@pytest.mark.parametrize("what", sampled(ARRAYS, 4))
@pytest.mark.parametrize("is_zipped", sampled([False, True], [False]))
def test_batch_of_imagenet64(
    refuse_dataset: Callable[[str, Path], None], tmp_path: Path, what: str, is_zipped: bool
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    if is_zipped:
        zipped(folder / "Imagenet64_train_part1_npz.zip", {"train_data_batch_1.npz": ARRAYS[what]()})
    else:
        (folder / "train_data_batch_1.npz").write_bytes(ARRAYS[what]())
    refuse_dataset("imagenet64", folder)


@pytest.mark.parametrize("what", sampled(TARS, 6))
def test_archive_of_a_dataset(refuse_dataset: Callable[[str, Path], None], tmp_path: Path, what: str) -> None:
    (tmp_path / "cifar.tar").write_bytes(TARS[what]())
    refuse_dataset("cifar10", tmp_path / "cifar.tar")
