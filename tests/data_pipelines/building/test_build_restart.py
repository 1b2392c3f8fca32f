"""Builds that are killed, and how the same command goes on from what they left."""

import errno
import fcntl
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.building.planning import FileSettings
from longstride.data_pipelines.errors import DataError
from tests.harness.data.builds import (
    PATIENCE_SECONDS,
    ended,
    folder_bytes,
    kill_session,
    numbered_files,
    start,
    stop_half_way,
    worker_words,
    write_files,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc")
ARGUMENTS = {"validation_fraction": 0.1, "shard_bytes": 1200}


@pytest.fixture
def source(tmp_path):
    return write_files(tmp_path / "source", numbered_files(60))


def finished_shards(output: Path) -> dict[str, tuple[int, int]]:
    """Return inode and modification time of every shard and index that must not be written again."""
    place = output.parent / f".{output.name}.unfinished"
    if output.exists():
        files = list(output.iterdir())
    else:
        names = [path.stem for path in place.glob("records/*.json")]
        files = [place / "data" / f"{name}{end}" for name in names for end in (".tar", ".index.npy")]
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("ranks", [(1, 3), (2, 1)], ids=str)
def test_build_goes_on_after_a_kill_with_another_number_of_ranks(ranks, tmp_path):
    source = write_files(tmp_path / "source", numbered_files(300))
    build([source], tmp_path / "undisturbed", **ARGUMENTS)
    words, place = worker_words(source, tmp_path / "data", ARGUMENTS), tmp_path / ".data.unfinished"
    killed, deadline = start(words, ranks=ranks[0]), time.monotonic() + PATIENCE_SECONDS
    while len(list(place.glob("records/*.json"))) < 10:
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.0005)
    kill_session(killed)
    assert not (tmp_path / "data").exists()
    finished = finished_shards(tmp_path / "data")
    code, _, errors = ended(start(words, ranks=ranks[1]))
    assert (code, errors) == (0, []) and len(finished) >= 2 * 10
    assert folder_bytes(tmp_path / "data") == folder_bytes(tmp_path / "undisturbed")
    assert finished_shards(tmp_path / "data").items() >= finished.items()
    assert not place.exists()


def die_everywhere(tmp_path: Path, source: Path, arguments: dict[str, Any]) -> int:
    """Builds that end at every moment at which they touch a file. Returns the number of moments."""
    build([source], tmp_path / "undisturbed" / "data", **arguments)
    (tmp_path / "killed").mkdir()
    words = worker_words(
        source,
        tmp_path / "killed" / "data",
        arguments,
        die_everywhere=True,
        undisturbed=str(tmp_path / "undisturbed" / "data"),
    )
    code, out, _ = ended(process := start(words))
    assert code == 0, process
    return int(out)


def test_build_that_ends_at_any_moment_leaves_all_or_nothing(tmp_path):
    source = write_files(tmp_path / "source", {**numbered_files(5), "long.py": "ß日".encode() * 14_000})  # two samples
    assert die_everywhere(tmp_path, source, {"validation_fraction": 0, "shard_bytes": 400}) > 30


@pytest.mark.campaign
def test_build_that_ends_at_any_of_many_moments_leaves_all_or_nothing(tmp_path, source):
    assert die_everywhere(tmp_path, source, {"validation_fraction": 0.2, "shard_bytes": 600}) > 100


def begin_build(source: Path, output: Path, **arguments: Any) -> dict[str, bytes]:
    """Stop a build half way, and return the content of its folder."""
    stop_half_way(build, [source], output, **arguments)
    return everything(output.parent / f".{output.name}.unfinished")


def everything(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"seed": 1}, "other settings"),
        ({"validation_fraction": 0.5}, "other settings"),
        ({"files": {"new.py": b"new"}}, "other files, or files that changed since"),
        ({"files": {"0/f0.py": b"content 1\n" * 9}}, "other files, or files that changed since"),
    ],
    ids=["seed", "fraction", "new file", "changed file"],
)
def test_build_of_another_plan_is_refused(tmp_path, source, change, what):
    left = begin_build(source, tmp_path / "data", **ARGUMENTS)
    write_files(source, change.pop("files", {}))
    unfinished = tmp_path / ".data.unfinished"
    rule = rf"^{unfinished}: holds an unfinished build of {what}; remove that folder to start over"
    with pytest.raises(DataError, match=rule) as caught:
        build([source], tmp_path / "data", **{**ARGUMENTS, **change})
    assert "\n" not in str(caught.value)
    assert everything(unfinished) == left


def test_build_that_fails_half_way_tells_what_may_not_change(tmp_path, source):
    """Without the broken file it is another build, so the folder has to be removed, as the message says."""

    def vanish(done: int, total: int) -> None:
        if done > total // 2:
            for path in source.rglob("*.py"):
                path.unlink()

    kept = tmp_path / ".data.unfinished"
    with pytest.raises(DataError) as caught:
        build([source], tmp_path / "data", progress=vanish, **ARGUMENTS)
    assert str(caught.value).endswith(
        f"; finished shards are kept in {kept} for the same command with the same files and options; "
        f"where a file or an option has to change, remove {kept} first"
    )
    write_files(source, numbered_files(59))
    with pytest.raises(DataError, match="an unfinished build of other files"):
        build([source], tmp_path / "data", **ARGUMENTS)
    shutil.rmtree(kept)
    build([source], tmp_path / "data", **ARGUMENTS)


def test_build_goes_on_where_the_input_was_moved(tmp_path):
    """A document is identified by its path under the input, so another mount point is the same input."""
    write_files(tmp_path / "before", numbered_files(60))
    begin_build(tmp_path / "before", tmp_path / "data", **ARGUMENTS)
    (tmp_path / "before").rename(tmp_path / "after")
    kept = {path.stem for path in (tmp_path / ".data.unfinished" / "records").iterdir()}
    before = finished_shards(tmp_path / "data")
    calls: list[int] = []
    build(
        [tmp_path / "after"],
        tmp_path / "data",
        progress=lambda done, total: calls.append(3 * done // total),
        **ARGUMENTS,
    )
    assert calls[0] >= 1 and calls[-1] == 3  # what was finished counts
    assert kept and finished_shards(tmp_path / "data").items() >= before.items()


def test_build_with_nothing_finished_begins_anew(tmp_path, source):
    """Nothing is lost if no shard is finished, so another plan may begin."""
    left = begin_build(source, tmp_path / "data")  # of one shard, which is not finished
    assert not any(name.startswith("records") for name in left)
    build([source], tmp_path / "data", **ARGUMENTS)
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.parametrize("damage", ["shard cut short", "index lost", "record cut short"])
def test_build_makes_shard_again_that_is_not_whole(tmp_path, source, damage):
    build([source], tmp_path / "whole", **ARGUMENTS)
    begin_build(source, tmp_path / "data", **ARGUMENTS)
    place = tmp_path / ".data.unfinished"
    if damage == "index lost":
        (place / "data" / "train-00001.index.npy").unlink()
    else:
        path = place / ("data/train-00001.tar" if damage == "shard cut short" else "records/train-00001.json")
        path.write_bytes(path.read_bytes()[:-1])
    build([source], tmp_path / "data", **ARGUMENTS)
    assert folder_bytes(tmp_path / "data") == folder_bytes(tmp_path / "whole")


def test_build_refuses_damaged_plan(tmp_path, source):
    begin_build(source, tmp_path / "data", **ARGUMENTS)
    (tmp_path / ".data.unfinished" / "plan.json").write_text("{")
    with pytest.raises(DataError, match=r"plan\.json: damaged .*remove .*\.data\.unfinished to start over"):
        build([source], tmp_path / "data", **ARGUMENTS)


def test_build_is_refused_while_another_is_under_way(tmp_path, source):
    refusals: list[str] = []

    def build_too(done: int, total: int) -> None:
        with pytest.raises(DataError) as caught:
            build([source], tmp_path / "data", **ARGUMENTS)
        refusals.append(str(caught.value))

    build([source], tmp_path / "data", progress=build_too, **ARGUMENTS)
    place = tmp_path / ".data.unfinished"
    assert set(refusals) == {f"{place}: another build into the same output is running; wait until it has finished"}
    assert not place.exists()


def test_build_never_holds_a_lock_that_was_removed(tmp_path, monkeypatch):
    """A build that ends removes its lock file. Another build that had opened that file must lock a new one."""
    module = importlib.import_module("longstride.data_pipelines.building.folders")
    folder = tmp_path / ".data.unfinished"
    flock = fcntl.flock
    calls: list[int] = []

    def flock_late(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) < 3:
            shutil.rmtree(folder)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    held = module.UnfinishedBuild(tmp_path / "data", None)
    with pytest.raises(DataError, match="another build into the same output"):
        module.UnfinishedBuild(tmp_path / "data", None)
    held.close()
    assert len(calls) == 4


@pytest.mark.parametrize(("number", "refused"), [(errno.ENOTSUP, False), (errno.EACCES, True)])
def test_build_where_locks_cannot_be_had(tmp_path, source, monkeypatch, caplog, number, refused):
    """A file system without locks only causes a warning. Other failures end the build."""

    def fail(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    if refused:
        with pytest.raises(DataError, match=r"unfinished/lock: cannot be locked \(Permission denied\)"):
            build([source], tmp_path / "data", **ARGUMENTS)
    else:
        build([source], tmp_path / "data", **ARGUMENTS)
        assert "the file system does not support locks" in caplog.text and (tmp_path / "data").is_dir()


def meanwhile(monkeypatch, other_build: Callable[[], object]) -> None:
    """Makes another build end while the next one looks for files."""
    module = importlib.import_module("longstride.data_pipelines.building.folders")
    make_plan = FileSettings.plan

    def plan_and_lose(*arguments):
        monkeypatch.setattr(FileSettings, "plan", make_plan)
        plan = make_plan(*arguments)
        monkeypatch.setattr(module, "is_occupied", second_look)
        return plan

    is_occupied = module.is_occupied
    looks: list[Path] = []

    def second_look(output: Path) -> bool:
        looks.append(output)
        if len(looks) == 1:  # before this build has the lock
            found = is_occupied(output)
            monkeypatch.setattr(module, "is_occupied", is_occupied)
            other_build()
            return found
        raise AssertionError

    monkeypatch.setattr(FileSettings, "plan", plan_and_lose)


def test_build_compares_with_what_a_build_made_meanwhile(tmp_path, source, monkeypatch):
    meanwhile(monkeypatch, lambda: build([source], tmp_path / "data", **ARGUMENTS))
    build([source], tmp_path / "data", **ARGUMENTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "source"]


def test_build_refuses_what_another_build_made_meanwhile(tmp_path, source, monkeypatch):
    meanwhile(monkeypatch, lambda: build([source], tmp_path / "data", seed=1, **ARGUMENTS))
    with pytest.raises(DataError, match="other settings; it is not overwritten"):
        build([source], tmp_path / "data", **ARGUMENTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "source"]


def test_build_tidies_up_after_one_killed_at_its_very_end(tmp_path, source):
    build([source], tmp_path / "data", **ARGUMENTS)
    place = tmp_path / ".data.unfinished"
    write_files(place, {"lock": b"", "plan.json": json.dumps({}).encode(), "records/train-00000.json": b"{}"})
    build([source], tmp_path / "data", **ARGUMENTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "source"]
