"""A disk that is full, or a folder that has gone, costs the save that meets it and nothing else."""

import contextlib
import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longstride.launcher.checkpoints.checkpoint import list_checkpoints
from longstride.launcher.checkpoints.pickles import write_pickle
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.training.recorder import LineFile
from tests.harness.runs import complete, metrics, spawn
from tests.launcher.conftest import chunks
from tests.launcher.training.test_training import RUNS

Trained = Callable[..., Path]
BYTES = 30_000  # that a shard of these runs does not fit into


@contextlib.contextmanager
def short_files(most_bytes: int) -> Iterator[None]:
    """No file of this process gets longer, inside; SIGXFSZ is ignored by Python. Outside, pytest writes its report."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def steps_of(run: Path) -> list[int]:
    """The steps of a run's whole checkpoints; whatever else lies there is wrong."""
    found, refused = list_checkpoints(run)
    assert not refused
    assert not any(each.find_damage(Ranks()) for each in found)
    hidden = [path.name for path in (run / "checkpoints").glob(".*")]
    assert not hidden, hidden
    return [each.manifest.step for each in reversed(found)]


CASES: dict[str, tuple[dict[str, Any], list[int], int]] = {
    # name: what fails, the steps that are whole at the end, the exit code
    "second rank": ({"rank": 1, "steps": [4]}, [2, 6, 8], 0),
    "last step": ({"rank": 0, "steps": [8]}, [2, 4, 6], 1),
    "first rank": ({"rank": 0, "steps": [2, 4]}, [6, 8], 0),
    "stop": ({"rank": 1, "steps": [5], "stop": 5}, [2, 4], 1),
    "stopped, saved": ({"rank": 0, "steps": [4], "stop": 5}, [2, 5], 75),
    "second rank, background": ({"rank": 1, "steps": [4]}, [2, 6, 8], 0),
    "last step, background": ({"rank": 0, "steps": [8]}, [2, 4, 6], 1),
    "stopped, saved, background": ({"rank": 0, "steps": [4], "stop": 5}, [2, 5], 75),
}
DEFAULT = ("second rank", "last step")


@pytest.mark.parametrize("names", [DEFAULT, pytest.param(tuple(CASES), marks=pytest.mark.campaign)])
def test_full_disk_costs_one_save_and_the_run_goes_on(
    trained: Trained, config_file: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    whole = metrics(trained("zero2-fp16", 2, *RUNS["zero2-fp16"]))
    rows = chunks("zero2-fp16")
    for name in names:
        failing, kept, code = CASES[name]
        run = tmp_path / name.replace(" ", "-")
        arguments = ["--config", str(config_file), *RUNS["zero2-fp16"], f"train.output={run}"]
        arguments += ["train.checkpoint_every=2", "--resume", "auto"]
        arguments += ["train.checkpoint_in_background=true"] if "background" in name else []
        failing = {"bytes": BYTES, "folder": "", "stop": None} | failing
        ended = spawn(arguments, 2, rows | {"FAILING": json.dumps(failing)})
        told = ended.stderr[0]
        assert ended.codes == [code, code], (name, told)
        for step in failing["steps"]:
            assert f"step {step} was not saved: rank {failing['rank']}: {run}/checkpoints/.step-{step:08d}" in told, (
                told
            )
        assert f": {os.strerror(errno.EFBIG)}" in told
        assert "Traceback" not in "".join(ended.stderr)
        assert steps_of(run) == kept, name
        if code == 1:
            assert f"; the newest checkpoint is step {kept[-1]}" in told
            assert "longstride: error: " in told.splitlines()[-1] and "unsaved" in told.splitlines()[-1]
        assert ("saved before the run ends" in told) == (code == 75)
        if code:
            complete(arguments, 2, rows)
        assert metrics(run) == whole, name


@pytest.mark.campaign
def test_folder_that_has_gone_is_told_and_not_made_anew(config_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints"
    failing = {"rank": 0, "steps": [4], "bytes": None, "folder": str(folder), "stop": None}
    arguments = ["--config", str(config_file), "train.checkpoint_every=2"]
    ended = spawn(arguments, 2, {"FAILING": json.dumps(failing)})
    told = ended.stderr[0]
    assert ended.codes == [1, 1], told
    for step in (4, 6, 8):
        line = f"step {step} was not saved: rank 0: {folder}/.step-{step:08d}.partial: {os.strerror(errno.ENOENT)}"
        assert f"{line}; there is no checkpoint yet\n" in told
    assert not folder.exists()
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]


def test_error_of_a_disk_is_told_with_its_path(tmp_path: Path) -> None:
    import torch

    with short_files(4096), pytest.raises(OSError) as caught:
        write_pickle({"weights": torch.zeros(100_000)}, tmp_path / "x.pt")
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "x.pt"))
    record = write_pickle({"weights": torch.zeros(100_000)}, tmp_path / "y.pt")
    assert record.bytes == (tmp_path / "y.pt").stat().st_size


def test_lines_that_a_disk_has_no_room_for_wait(tmp_path: Path) -> None:
    path, said = tmp_path / "lines", list[str]()
    lines = LineFile(path, said.append)
    lines.append("a" * 10, "step 1")
    with short_files(15):  # the next line fits by a part, which must not stay
        lines.append("b" * 10, "step 2")
        lines.append("c" * 10, "step 3")
    assert path.read_text() == "a" * 10 + "\n"
    assert said == [f"{path}: {os.strerror(errno.ENOSPC)}; lines from step 2 on wait in memory until there is room"]
    lines.append("d" * 10, "step 4")
    assert path.read_text().split() == [letter * 10 for letter in "abcd"]
    assert said[1:] == [f"{path}: 2 lines from step 2 on have been made up for"]
    with short_files(50):
        lines.append("e" * 10, "step 5")
        lines.close()
    assert said[-1] == f"{path}: 1 line from step 5 on are lost"
    assert path.read_text().split() == [letter * 10 for letter in "abcd"]
