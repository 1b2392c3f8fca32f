"""Every launcher on two hosts with one and two processes each: trains, saves, goes on, as one host would have."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import exit_codes
from tests.cluster.hosts import Host
from tests.cluster.runs import ENDLESS, wait_for_steps
from tests.cluster.slurm import Slurm
from tests.launcher.runs import ROOT, metrics

LONGSTRIDE = [sys.executable, "-m", "launcher.cli", "train"]
SECONDS = 300  # of a start and four steps, on a machine that is busy
# Of root, as which the hosts' programs run.
ARGUMENTS = {"pdsh": [], "openmpi": ["--launcher-args=--allow-run-as-root"], "mpich": [], "slurm": []}


def write_hostfile(tmp_path: Path, slots: int) -> Path:
    path = tmp_path / "hostfile"
    path.write_text(f"# two hosts\nnode1 slots={slots}\nnode2 slots={slots}\n")
    return path


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("launcher", ARGUMENTS)
def test_run_on_two_hosts_is_that_of_one_and_goes_on(
    launcher: str,
    processes: int,
    hosts: list[Host],
    user: dict[str, str],
    config_file: Path,
    tmp_path: Path,
    on_one_host: Callable,
    request: pytest.FixtureRequest,
) -> None:
    if launcher == "slurm":
        user |= {"SLURM_CONF": request.getfixturevalue("slurm").environment["SLURM_CONF"]}
    log = tmp_path / "log"
    words = ["--config", str(config_file), "--hostfile", str(write_hostfile(tmp_path, processes))]
    words += ["--launcher", launcher, *ARGUMENTS[launcher], "--resume", "auto"]
    for steps in (4, 8):
        code = hosts[0].run([*LONGSTRIDE, *words, f"train.steps={steps}"], user, tmp_path, log, SECONDS)
        assert code == 0, log.read_text()
    # As many ranks add the same numbers in the same order, wherever they are: every digit is the same.
    assert metrics(tmp_path / "run") == on_one_host(2 * processes)
    assert sorted(path.name for path in (tmp_path / "run").glob("hosts-*.env")) == ["hosts-1.env", "hosts-2.env"]
    assert [host.processes() for host in hosts] == [[], []] or launcher == "slurm"  # whose daemons wind up steps


@pytest.mark.parametrize("launcher", ARGUMENTS)
def test_exit_code_of_the_ranks_comes_through(
    launcher: str,
    hosts: list[Host],
    user: dict[str, str],
    config_file: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Of a run that one rank is told to save, and of a start that the ranks alone can refuse."""
    if launcher == "slurm":
        user |= {"SLURM_CONF": request.getfixturevalue("slurm").environment["SLURM_CONF"]}
    log = tmp_path / "log"
    words = ["--config", str(config_file), "--hostfile", str(write_hostfile(tmp_path, 1)), "--launcher", launcher]
    words += ARGUMENTS[launcher]
    running = hosts[0].start([*LONGSTRIDE, *words, *ENDLESS], user, tmp_path, log)
    wait_for_steps(tmp_path / "run", 2, log)
    [rank] = hosts[1].ranks()
    os.kill(rank, signal.SIGUSR1)
    assert running.wait(SECONDS) == exit_codes.REQUEUE, log.read_text()
    assert log.read_text().count("stopped by") == 1, log.read_text()
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-*")
    words += ["--resume", str(int(saved.name.removeprefix("step-")) + 1), *ENDLESS]
    assert hosts[0].run([*LONGSTRIDE, *words], user, tmp_path, log, SECONDS) == exit_codes.WRONG_INPUT, log.read_text()


@pytest.mark.parametrize("launcher", ARGUMENTS)
def test_deepspeed_itself_starts_the_same_run(
    launcher: str,
    hosts: list[Host],
    user: dict[str, str],
    config_file: Path,
    tmp_path: Path,
    on_one_host: Callable,
    request: pytest.FixtureRequest,
) -> None:
    """As docs/clusters.md says that it must be called."""
    told = {name: user[name] for name in ("PATH", "OMP_NUM_THREADS")}
    words = []
    if launcher == "openmpi":
        told |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "20011"}
        words = ["--launcher_args=--allow-run-as-root"]
    if launcher == "mpich":  # it takes the first mpirun on PATH, and the virtual environment holds Open MPI's
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "mpirun").write_text('#!/bin/sh\nexec mpirun.mpich "$@"\n')
        (tmp_path / "bin" / "mpirun").chmod(0o755)
        user["PATH"] = f"{tmp_path}/bin:{user['PATH']}"
    if launcher == "slurm":
        user |= {"SLURM_CONF": request.getfixturevalue("slurm").environment["SLURM_CONF"]}
        words = ["--launcher_args=--ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60"]
    (tmp_path / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in told.items()))
    log = tmp_path / "log"
    command = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(write_hostfile(tmp_path, 1))]
    command += ["--launcher", launcher, *words, str(ROOT / "launcher" / "train.py"), "--config", str(config_file)]
    assert hosts[0].run(command, user, tmp_path, log, SECONDS) == 0, log.read_text()
    assert metrics(tmp_path / "run") == on_one_host(2)


def test_srun_alone_starts_the_same_run(
    slurm: Slurm, user: dict[str, str], config_file: Path, tmp_path: Path, on_one_host: Callable
) -> None:
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-u", str(ROOT / "launcher" / "train.py")]
    user |= {"SLURM_CONF": slurm.environment["SLURM_CONF"]}
    log = tmp_path / "log"
    code = slurm.hosts[0].run([*command, "--config", str(config_file)], user, tmp_path, log, SECONDS)
    assert code == 0, log.read_text()
    assert metrics(tmp_path / "run") == on_one_host(2)


def test_host_that_cannot_be_reached_is_told_before_anything_starts(
    hosts: list[Host], user: dict[str, str], config_file: Path, tmp_path: Path
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node1 slots=1\nnode2 slots=1\n10.73.0.9 slots=1\n")
    log = tmp_path / "log"
    words = ["--config", str(config_file), "--hostfile", str(hostfile), "train.global_batch=6"]
    assert hosts[0].run([*LONGSTRIDE, *words], user, tmp_path, log, SECONDS) == 2
    [line] = log.read_text().splitlines()
    assert "10.73.0.9" in line and "must work without a password" in line
    assert not (tmp_path / "run").exists()
