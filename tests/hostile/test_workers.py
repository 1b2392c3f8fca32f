"""A loader worker that is killed or stopped, while its rank waits for it or computes: saved, one line, code 77."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from longstride.launcher.output import exit_codes
from tests.harness.runs import ROOT, Rank, configuration, metrics, plain_environment, spawn, start_ranks

SECONDS = 60.0  # for anything that a test waits for
STEPS = 150
SETTINGS = [
    f"train.steps={STEPS}",
    "train.evaluate_every=50",
    "train.checkpoint_every=0",
    "data.workers=2",
    "data.timeout_seconds=2",
]
CASES = list(itertools.product(["killed", "stopped"], ["waiting", "computing"], [1, 2]))
SAMPLE = [("killed", "waiting", 2), ("killed", "computing", 1), ("stopped", "computing", 2)]


def of_sample(case: tuple[str, str, int]) -> object:
    return pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.campaign)


def wait_for(what: Callable[[], object], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def steps_of(run: Path) -> int:
    """Training steps that a run has recorded."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"train"') if path.exists() else 0


def disturb(rank: Rank, how: str, when: str) -> list[int]:
    """Kills or stops a worker of a rank; returns the ids of all that it had."""
    workers = psutil.Process(rank.pid).children()
    assert len(workers) == 2
    victim = workers[1]
    if when == "waiting":  # it has nothing more to take once the victim stands still
        victim.suspend()
        time.sleep(0.5)
    else:  # wherever it is, its next steps are there already
        os.kill(rank.pid, signal.SIGSTOP)
        victim.suspend()
    if how == "killed":
        victim.kill()
    if when == "computing":
        os.kill(rank.pid, signal.SIGCONT)
    return [worker.pid for worker in workers]


def undisturbed(trained: Callable[..., Path], world_size: int) -> list[dict[str, object]]:
    return metrics(trained(f"workers-{world_size}", world_size, *SETTINGS, "data.workers=0"))


@pytest.mark.parametrize(("how", "when", "world_size"), [of_sample(case) for case in CASES])
def test_a_lost_worker_costs_no_step(
    tmp_path: Path, data: Path, trained: Callable[..., Path], how: str, when: str, world_size: int
) -> None:
    config, run = tmp_path / "run.json", tmp_path / "run"
    config.write_text(json.dumps(configuration(data, run)))
    ranks = start_ranks(["--config", str(config), *SETTINGS], world_size)
    try:
        wait_for(lambda: steps_of(run) >= 3)
        workers = disturb(ranks[-1], how, when)
        codes = [rank.wait(SECONDS) for rank in ranks]
    finally:
        outputs = [rank.end() for rank in ranks]
    assert codes == [exit_codes.HUNG] * world_size, outputs
    assert not any("Traceback" in err for _, err in outputs), outputs
    line = outputs[0][1].splitlines()[-1]
    what = "was ended by SIGKILL" if how == "killed" else "sent nothing for 2 s"
    assert (
        f"longstride: rank {world_size - 1} on " in line and f": loader worker 1 (process {workers[1]}) {what}" in line
    )
    assert not any(map(psutil.pid_exists, workers))
    reached = steps_of(run)
    assert 3 <= reached < STEPS
    assert (run / "checkpoints/latest").read_text().strip() == f"step-{reached:08d}"
    ended = spawn(["--config", str(config), *SETTINGS, "--resume", "auto"], world_size)
    assert ended.codes == [0] * world_size, ended.stderr
    assert metrics(run) == undisturbed(trained, world_size)


@pytest.mark.campaign
def test_a_run_that_lost_a_worker_is_started_again(tmp_path: Path, data: Path, trained: Callable[..., Path]) -> None:
    config, run = tmp_path / "run.json", tmp_path / "run"
    config.write_text(json.dumps(configuration(data, run)))
    words = ["train", "--config", str(config), "--processes", "2", "--max-restarts", "1", *SETTINGS]
    command = [sys.executable, "-m", "longstride.launcher.cli", *words]
    environment = {**plain_environment(), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as going:
        wait_for(lambda: steps_of(run) >= 3)
        started = psutil.Process(going.pid).children(recursive=True)
        victim = next(each for each in started if each.name() and is_worker(each, started))
        victim.kill()
        _, err = going.communicate(timeout=3 * SECONDS)
    assert going.returncode == 0, err
    assert "was ended by SIGKILL" in err
    assert metrics(run) == undisturbed(trained, 2)
    assert not any(each.is_running() for each in started)


def is_worker(process: psutil.Process, all_of_them: Sequence[psutil.Process]) -> bool:
    """Whether a process was forked from a rank: it has the same command line, and no children."""
    parent = process.parent()
    return parent in all_of_them and parent is not None and parent.cmdline() == process.cmdline()
