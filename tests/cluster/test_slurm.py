"""`longstride slurm` on a real SLURM: the job is submitted, stopped, requeued by its script, and finished."""

import re
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.person import ENDLESS, LONGSTRIDE, SECONDS, Lines, Person
from tests.cluster.slurm import Slurm


def submit(slurm: Slurm, person: Person, processes: int, *overrides: str) -> tuple[str, Path]:
    """Write the script and submit it by sbatch; return the job's number and log."""
    words = ["slurm", "--config", str(person.config), "--nodes=2", f"--processes-per-node={processes}"]
    person.environment |= slurm.variables
    code = person.ends([*LONGSTRIDE, *words, "--time=1:00:00", "--job-name=run", "--submit", *overrides])
    assert code == 0, person.said()
    match = re.search(r"Submitted batch job (\d+)", person.said())
    assert match is not None, person.said()
    return match[1], person.run / f"slurm-{match[1]}.log"


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_job_that_is_stopped_is_requeued_and_finishes(
    processes: int, slurm: Slurm, person: Person, on_one_host: Lines
) -> None:
    steps = ["train.steps=200", "train.checkpoint_every=0", "train.evaluate_every=0"]
    number, log = submit(slurm, person, processes, *steps)
    person.wait_for_steps(5, log)
    slurm.command("scancel", "--batch", "--signal=USR1", number)  # as --signal=B:USR1@120 does by itself
    ended = slurm.wait_for(number, ["COMPLETED"], SECONDS, log, restarts=1)
    assert (ended["Restarts"], ended["ExitCode"]) == ("1", "0:0")
    text = log.read_text()
    assert text.count("longstride: told to save and stop") == 1, text
    assert text.count("longstride: stopped by SIGUSR1") == 1, text
    lines = [line for line in person.lines() if line["split"] == "train"]
    assert lines == [line for line in on_one_host(2 * processes, 200) if line["split"] == "train"]


def test_job_that_is_cancelled_is_saved_and_stays_cancelled(slurm: Slurm, person: Person) -> None:
    number, log = submit(slurm, person, 1, *ENDLESS)
    person.wait_for_steps(5, log)
    slurm.command("scancel", number)
    slurm.wait_for(number, ["CANCELLED"], SECONDS, log)
    wait_until(lambda: not any(host.ranks() for host in slurm.hosts), SECONDS, log.read_text)
    time.sleep(3)  # for what the script does last
    ended = slurm.job(number)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    text = log.read_text()
    assert text.count("longstride: stopped by SIGTERM") == 1 and "waits for its next turn" not in text, text
    assert len(list((person.run / "checkpoints").glob("step-*"))) == 1


@pytest.mark.campaign
def test_time_limit_of_slurm_saves_and_queues_again(slurm: Slurm, person: Person) -> None:
    """Set a limit of two minutes, as SLURM checks it once per minute."""
    number, log = submit(slurm, person, 1, *ENDLESS, "--time=2", "--stop-seconds=30")
    assert slurm.wait_for(number, ["RUNNING"], SECONDS, log, restarts=1)["Restarts"] == "1"
    text = log.read_text()
    assert text.count("longstride: told to save and stop") == 1, text
    assert text.count("longstride: stopped by SIGUSR1") == 1, text
    slurm.command("scancel", number)
    slurm.wait_for(number, ["CANCELLED"], SECONDS, log)
