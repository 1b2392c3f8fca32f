"""`longstride slurm` on a real SLURM: submitted, told to stop, queued again by itself, finished."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.runs import ENDLESS, wait_for_steps
from tests.cluster.slurm import Slurm
from tests.launcher.runs import metrics

SECONDS = 300


def submit(slurm: Slurm, user: dict[str, str], config: Path, folder: Path, processes: int, *overrides: str) -> str:
    """Writes the script and hands it to sbatch, as a person would; returns the job's number."""
    words = ["slurm", "--config", str(config), "--nodes=2", f"--processes-per-node={processes}", "--time=1:00:00"]
    command = [sys.executable, "-m", "launcher.cli", *words, "--job-name=run", "--submit", *overrides]
    log = folder / "submit.log"
    told = user | {"SLURM_CONF": slurm.environment["SLURM_CONF"]}
    assert slurm.hosts[0].run(command, told, folder, log, SECONDS) == 0, log.read_text()
    found = re.search(r"Submitted batch job (\d+)", log.read_text())
    assert found is not None, log.read_text()
    return found[1]


@pytest.mark.parametrize("processes", [1, 2])
def test_job_that_is_told_to_stop_is_queued_again_and_finishes(
    processes: int, slurm: Slurm, user: dict[str, str], config_file: Path, tmp_path: Path, on_one_host: Callable
) -> None:
    steps = ["train.steps=200", "train.checkpoint_every=0", "train.evaluate_every=0"]
    number = submit(slurm, user, config_file, tmp_path, processes, *steps)
    log = tmp_path / "run" / f"slurm-{number}.log"
    wait_for_steps(tmp_path / "run", 5, log)
    slurm.command("scancel", "--batch", "--signal=USR1", number)  # as --signal=B:USR1@120 does by itself
    ended = slurm.wait_for(number, ["COMPLETED"], SECONDS, log, restarts=1)
    assert (ended["Restarts"], ended["ExitCode"]) == ("1", "0:0")
    text = log.read_text()
    assert text.count("longstride: told to save and stop") == 1, text
    assert text.count("longstride: stopped by SIGUSR1") == 1, text
    lines = [line for line in metrics(tmp_path / "run") if line["split"] == "train"]
    assert lines == [line for line in on_one_host(2 * processes, 200) if line["split"] == "train"]


def test_job_that_is_cancelled_is_saved_and_stays_cancelled(
    slurm: Slurm, user: dict[str, str], config_file: Path, tmp_path: Path
) -> None:
    number = submit(slurm, user, config_file, tmp_path, 1, *ENDLESS)
    log = tmp_path / "run" / f"slurm-{number}.log"
    wait_for_steps(tmp_path / "run", 5, log)
    slurm.command("scancel", number)
    slurm.wait_for(number, ["CANCELLED"], SECONDS, log)
    deadline = time.monotonic() + SECONDS
    while any(host.ranks() for host in slurm.hosts):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.3)
    time.sleep(3)  # for what the script does last
    ended = slurm.job(number)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    text = log.read_text()
    assert text.count("longstride: stopped by SIGTERM") == 1 and "waits for its next turn" not in text, text
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


@pytest.mark.campaign
def test_time_limit_of_slurm_saves_and_queues_again(
    slurm: Slurm, user: dict[str, str], config_file: Path, tmp_path: Path
) -> None:
    """Two minutes, of which SLURM takes what is left when it looks at the clock: each of its rounds is a minute."""
    number = submit(slurm, user, config_file, tmp_path, 1, *ENDLESS, "--time=2", "--stop-seconds=30")
    log = tmp_path / "run" / f"slurm-{number}.log"
    assert slurm.wait_for(number, ["RUNNING"], SECONDS, log, restarts=1)["Restarts"] == "1"
    text = log.read_text()
    assert text.count("longstride: told to save and stop") == 1, text
    assert text.count("longstride: stopped by SIGUSR1") == 1, text
    slurm.command("scancel", number)
    slurm.wait_for(number, ["CANCELLED"], SECONDS, log)
