"""Every launcher on two hosts with one and two processes each: trains, saves and resumes as one host does."""

import os
import signal
import sys
from pathlib import Path

import pytest

from longstride.launcher.output import exit_codes
from tests.cluster.person import ENDLESS, LONGSTRIDE, SECONDS, Lines, Person
from tests.cluster.slurm import Slurm
from tests.harness.runs import ROOT

# The hosts' programs run as root.
ARGUMENTS = {"pdsh": [], "openmpi": ["--launcher-args=--allow-run-as-root"], "mpich": [], "slurm": []}


@pytest.fixture(params=ARGUMENTS)
def launcher(person: Person, request: pytest.FixtureRequest) -> str:
    """Return the name of a launcher that the person can use."""
    name: str = request.param
    if name == "slurm":
        person.environment |= request.getfixturevalue("slurm").variables
    return name


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_run_on_two_hosts_is_that_of_one_and_goes_on(
    launcher: str, processes: int, person: Person, on_one_host: Lines
) -> None:
    """Let the processes of a host share each context, which refuses a launcher that deals ranks to hosts in turn."""
    command = person.train(processes, "--launcher", launcher, *ARGUMENTS[launcher], "--resume", "auto")
    sharing = f"train.sequence_parallel={processes}"
    for steps in (4, 8):
        assert person.ends([*command, sharing, f"train.steps={steps}"]) == 0, person.said()
    # The same number of ranks adds the same numbers in the same order on any hosts: every digit is the same.
    assert person.lines() == on_one_host(2 * processes, 8, sharing)
    assert sorted(path.name for path in person.run.glob("hosts-*.env")) == ["hosts-1.env", "hosts-2.env"]
    if launcher != "slurm":  # SLURM's daemons wind up steps later
        assert [host.processes() for host in person.hosts] == [[], []]


def test_exit_code_of_the_ranks_comes_through(launcher: str, person: Person) -> None:
    """Check the code of a run after a signal to one rank, and of a start that only the ranks can refuse."""
    command = [*person.train(1, "--launcher", launcher, *ARGUMENTS[launcher]), *ENDLESS]
    running = person.start(command)
    person.wait_for_steps(2)
    [rank] = person.hosts[1].ranks()
    os.kill(rank, signal.SIGUSR1)
    assert running.wait(SECONDS) == exit_codes.REQUEUE, person.said()
    assert person.said().count("stopped by") == 1, person.said()
    [saved] = (person.run / "checkpoints").glob("step-*")
    beyond = int(saved.name.removeprefix("step-")) + 1
    assert person.ends([*command, "--resume", str(beyond)]) == exit_codes.WRONG_INPUT, person.said()


def test_deepspeed_itself_starts_the_same_run(launcher: str, person: Person, on_one_host: Lines) -> None:
    """Run the command of docs/clusters.md."""
    variables = {name: person.environment[name] for name in ("PATH", "OMP_NUM_THREADS")}
    words = []
    if launcher == "openmpi":
        variables |= {"MASTER_ADDR": person.hosts[0].address, "MASTER_PORT": "20011"}
        words = ["--launcher_args=--allow-run-as-root"]
    if launcher == "mpich":  # it takes the first mpirun on PATH, and the virtual environment holds Open MPI's
        programs = person.folder / "bin"
        programs.mkdir()
        (programs / "mpirun").write_text('#!/bin/sh\nexec mpirun.mpich "$@"\n')
        (programs / "mpirun").chmod(0o755)
        person.environment["PATH"] = f"{programs}:{person.environment['PATH']}"
    if launcher == "slurm":
        words = ["--launcher_args=--ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60"]
    (person.folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    command = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(person.hostfile(1))]
    command += ["--launcher", launcher, *words, str(ROOT / "launcher" / "train.py"), "--config", str(person.config)]
    assert person.ends(command) == 0, person.said()
    assert person.lines() == on_one_host(2)


def test_srun_alone_starts_the_same_run(slurm: Slurm, person: Person, on_one_host: Lines) -> None:
    person.environment |= slurm.variables
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-u", str(ROOT / "launcher" / "train.py")]
    assert person.ends([*command, "--config", str(person.config)]) == 0, person.said()
    assert person.lines() == on_one_host(2)


def test_host_that_cannot_be_reached_is_told_before_anything_starts(person: Person) -> None:
    hostfile = person.hostfile(1)
    hostfile.write_text(f"{hostfile.read_text()}10.73.0.9 slots=1\n")
    command = [*LONGSTRIDE, "train", "--config", str(person.config), "--hostfile", str(hostfile)]
    assert person.ends([*command, "train.global_batch=6"]) == exit_codes.WRONG_INPUT
    [line] = person.said().splitlines()
    assert "10.73.0.9" in line and "must work without a password" in line
    assert not person.run.exists()
