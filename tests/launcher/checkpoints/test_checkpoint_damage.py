"""Whatever becomes of a checkpoint's files is found before a byte of them is used."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.checkpoint import checkpoint_folder, list_checkpoints
from longstride.launcher.checkpoints.manifest import (
    MANIFEST,
    CheckpointManifest,
    FileRecord,
    add_digest,
    read_manifest,
    write_json,
    write_manifest,
)
from longstride.launcher.ranks.processes import Ranks
from tests.launcher.training.test_training import RUNS

Trained = Callable[..., Path]
STEP = 8
FLIPS = ("bit", "byte", "cut", "cut to nothing", "grow", "remove", "swap", "add", "empty a page")


@pytest.fixture
def run_copy(trained: Trained, tmp_path: Path) -> Path:
    """A finished run of two processes, to be spoilt."""
    return Path(shutil.copytree(trained("zero2-fp16", 2, *RUNS["zero2-fp16"]), tmp_path / "run"))


def found_whole(run: Path) -> list[int]:
    """The steps that a resume would take, by what a resume calls."""
    found, _ = list_checkpoints(run)
    return [each.manifest.step for each in found if not each.find_damage(Ranks())]


def spoil(folder: Path, dice: random.Random, kind: str) -> str:
    """Damages one file of a checkpoint; returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = dice.choice(files)
    content = bytearray(path.read_bytes())
    place = dice.randrange(len(content))
    if kind == "bit":
        content[place] ^= 1 << dice.randrange(8)
    elif kind == "byte":
        content[place] = (content[place] + dice.randrange(1, 256)) % 256
    elif kind == "empty a page":
        end = min(len(content), place + 4096)
        content[place:end] = bytes(255 - value for value in content[place:end])
    elif kind == "cut":
        del content[place:]
    elif kind == "cut to nothing":
        content.clear()
    elif kind == "grow":
        content += dice.randbytes(dice.randrange(1, 64))
    if kind == "remove":
        path.unlink()
    elif kind == "add":
        path = dice.choice(["deepspeed/zero_pp_rank_9_mp_rank_00_optim_states.pt", "random-00009.pt", "deepspeed/x/y"])
        (folder / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(dice.choice(files), folder / path)
    elif kind == "swap":
        other = dice.choice([each for each in files if each.read_bytes() != content])
        other_content = other.read_bytes()
        other.write_bytes(content)
        path.write_bytes(other_content)
    else:
        path.write_bytes(content)
    return f"{kind}: {path}, byte {place}"


@pytest.mark.parametrize("cases", [45, pytest.param(900, marks=pytest.mark.campaign)])
def test_random_damage_is_always_found(run_copy: Path, tmp_path: Path, cases: int) -> None:
    folder, whole = checkpoint_folder(run_copy, STEP), tmp_path / "whole"
    folder.rename(whole)
    assert read_manifest(whole).step == STEP
    dice = random.Random(20)
    for number in range(cases):
        shutil.copytree(whole, folder)
        done = spoil(folder, dice, FLIPS[number % len(FLIPS)])
        assert found_whole(run_copy) == [4], done
        shutil.rmtree(folder)
    shutil.copytree(whole, folder)
    assert found_whole(run_copy) == [STEP, 4]


def test_links_in_a_checkpoint_are_foreign(run_copy: Path, tmp_path: Path) -> None:
    folder = checkpoint_folder(run_copy, STEP)
    file, outside = folder / "random-00000.pt", tmp_path / "outside"
    file.rename(outside)
    file.symlink_to(outside)
    (checkpoint,) = [each for each in list_checkpoints(run_copy)[0] if each.manifest.step == STEP]
    assert checkpoint.find_damage(Ranks()) == [f"{file}: cannot be read: is a link, not a plain file"]
    file.unlink()
    outside.rename(file)
    (folder / "deepspeed").rename(tmp_path / "deepspeed")
    (folder / "deepspeed").symlink_to(tmp_path / "deepspeed")
    assert checkpoint.find_damage(Ranks()) == [f"{folder}/deepspeed: is a link, which a checkpoint may not contain"]


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../other/x", "a/../../x", "a/..", ".", "", "a//b", "./a", "a/", "a\\b", "a\0b", MANIFEST]
)
def test_manifest_that_names_what_is_not_within_is_refused(run_copy: Path, name: str) -> None:
    folder = checkpoint_folder(run_copy, STEP)
    manifest = read_manifest(folder)
    files = manifest.files | {name: FileRecord(bytes=0, sha256="0" * 64)}
    write_manifest(folder, manifest.model_copy(update={"files": files}))
    with pytest.raises(ConfigError, match="which is not a plain path within its folder"):
        read_manifest(folder)
    assert [each.manifest.step for each in list_checkpoints(run_copy)[0]] == [4]


def test_older_format_is_read_and_a_newer_one_named(run_copy: Path) -> None:
    folder = checkpoint_folder(run_copy, STEP)
    content = read_manifest(folder).model_dump(mode="json")
    del content["probe"]
    write_json(folder / MANIFEST, add_digest(content | {"format_version": 1}))
    assert read_manifest(folder) == CheckpointManifest.model_validate(content | {"format_version": 1})
    assert found_whole(run_copy) == [STEP, 4]
    write_json(folder / MANIFEST, add_digest(content | {"format_version": 3, "other": 1}))
    with pytest.raises(ConfigError, match="format_version=3: this Longstride reads 1 to 2, and is older"):
        read_manifest(folder)
    for version in (0, True, "2", None):
        write_json(folder / MANIFEST, add_digest(content | {"format_version": version}))
        with pytest.raises(ConfigError, match=r"this Longstride reads 1 to 2$"):
            read_manifest(folder)


def test_wrong_pointer_misleads_no_resume(run_copy: Path) -> None:
    """`latest` is for people: what counts is what is whole."""
    pointer = run_copy / "checkpoints/latest"
    assert pointer.read_text() == f"step-{STEP:08d}\n"
    for spoilt in ("step-00000004\n", "../../elsewhere", ""):
        pointer.write_text(spoilt)
        assert found_whole(run_copy) == [STEP, 4]
    pointer.unlink()
    assert found_whole(run_copy) == [STEP, 4]
