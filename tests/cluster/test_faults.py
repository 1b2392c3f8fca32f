"""Two hosts under `longstride train` and pdsh: stopped, killed and cut off from each other, and what becomes of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import exit_codes
from tests.cluster.hosts import Host
from tests.cluster.runs import ENDLESS, wait_for_steps
from tests.cluster.test_launchers import LONGSTRIDE, SECONDS, write_hostfile
from tests.launcher.runs import metrics

STEPS = 40
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_GONE_SECONDS = 60.0


def start_run(
    hosts: list[Host], user: dict[str, str], config_file: Path, tmp_path: Path, *more: str
) -> subprocess.Popen[bytes]:
    """A run of one rank a host, with loader workers; what it says goes to tmp_path / "log"."""
    words = ["--config", str(config_file), "--hostfile", str(write_hostfile(tmp_path, 1)), "--resume", "auto"]
    words += [f"train.steps={STEPS}", "data.workers=1", *more]
    return hosts[0].start([*LONGSTRIDE, *words], user, tmp_path, tmp_path / "log")


def parent_of_all(host: Host) -> int:
    """The process of `longstride train` on a host, as this machine counts."""
    return running_module(host, b"launcher.cli")


def running_module(host: Host, module: bytes) -> int:
    """The process that runs a module on a host, as this machine counts."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            here = (folder / "ns" / "pid").readlink() == Path(f"/proc/{host.pid}/ns/pid").readlink()
        except OSError:
            continue
        if here and words[1:3] == [b"-m", module]:
            return int(folder.name)
    raise AssertionError("it has ended")


def wait_until_gone(hosts: list[Host], seconds: float = _GONE_SECONDS) -> None:
    """Waits until no process of a run is left on any host."""
    deadline = time.monotonic() + seconds
    while left := [line for host in hosts for line in host.processes() if "sshd" not in line]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def moments() -> list[object]:
    """Signals and how many steps go before them; the first of the campaign's is in the sample."""
    drawn = random.Random("pdsh")
    cases = [(_SIGNALS[number % 3], 0 if number == 1 else drawn.randrange(STEPS - 8)) for number in range(20)]
    return [
        pytest.param(
            which, steps, id=f"{number}-{which.name}-{steps}", marks=() if number == 0 else pytest.mark.campaign
        )
        for number, (which, steps) in enumerate(cases)
    ]


@pytest.mark.parametrize(("number", "steps"), moments())
def test_stop_over_two_hosts_loses_nothing(
    number: signal.Signals,
    steps: int,
    hosts: list[Host],
    user: dict[str, str],
    config_file: Path,
    tmp_path: Path,
    on_one_host: Callable,
) -> None:
    running = start_run(hosts, user, config_file, tmp_path)
    if steps:
        wait_for_steps(tmp_path / "run", steps, tmp_path / "log")
    else:  # while they start, and before they have met
        deadline = time.monotonic() + SECONDS
        while not all(host.ranks() for host in hosts):
            assert running.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
    time.sleep(random.Random(steps).uniform(0, 0.2))
    os.kill(parent_of_all(hosts[0]), number)
    assert running.wait(SECONDS) == exit_codes.REQUEUE, (tmp_path / "log").read_text()
    wait_until_gone(hosts)
    assert start_run(hosts, user, config_file, tmp_path).wait(SECONDS) == 0, (tmp_path / "log").read_text()
    assert not list((tmp_path / "run").glob("metrics.before-resume*"))
    assert metrics(tmp_path / "run") == on_one_host(2, STEPS)


@pytest.mark.parametrize(
    ("which", "steps"), [(1, 9), *(pytest.param(n % 2, 3 * n, marks=pytest.mark.campaign) for n in range(1, 10))]
)
def test_killed_rank_on_a_host_is_started_again(
    which: int,
    steps: int,
    hosts: list[Host],
    user: dict[str, str],
    config_file: Path,
    tmp_path: Path,
    on_one_host: Callable,
) -> None:
    running = start_run(hosts, user, config_file, tmp_path, "--max-restarts", "2")
    wait_for_steps(tmp_path / "run", steps, tmp_path / "log")
    os.kill(hosts[which].ranks()[0], signal.SIGKILL)
    assert running.wait(SECONDS) == 0, (tmp_path / "log").read_text()
    assert "with 2 processes on the same hosts" in (tmp_path / "log").read_text()
    wait_until_gone(hosts)
    assert metrics(tmp_path / "run") == on_one_host(2, STEPS)


def test_host_that_is_cut_off_is_done_without(
    hosts: list[Host], user: dict[str, str], config_file: Path, tmp_path: Path, on_one_host: Callable
) -> None:
    """Both sides end by the time-out, ssh notices by itself, and the run goes on in a smaller layout."""
    timeout = 10.0
    options = ["--max-restarts", "1", f"train.timeout_seconds={timeout}"]
    running = start_run(hosts, user, config_file, tmp_path, *options)
    wait_for_steps(tmp_path / "run", 12, tmp_path / "log")
    own, _ = metrics(tmp_path / "run"), set_link(hosts[1], "down")
    try:
        began = time.monotonic()
        while hosts[1].ranks():
            assert time.monotonic() - began < timeout + 40, hosts[1].processes()
            time.sleep(0.2)
        while "going on from step" not in (log := (tmp_path / "log").read_text()):
            assert time.monotonic() - began < timeout + 40 + 30, log  # as long as ssh is asked whether the host answers
            time.sleep(0.2)
        assert running.wait(SECONDS) == 0, (tmp_path / "log").read_text()
    finally:
        set_link(hosts[1], "up")
    log = (tmp_path / "log").read_text()
    assert "with 1 processes, as node2 answers no more" in log
    assert "was saved by 2 processes in ZeRO 0, fp32; converted for 1 process" in log
    assert len(list((tmp_path / "run/stacks").glob("*-rank-*.txt"))) >= 2
    whole = on_one_host(2, STEPS)
    assert own == whole[: len(own)]
    names = ("step", "split", "sample_ids_crc32")
    ended = metrics(tmp_path / "run")
    assert [[line.get(name) for name in names] for line in ended] == [
        [line.get(name) for name in names] for line in whole
    ]


@pytest.mark.campaign
def test_stuck_rank_of_a_lost_launcher_is_ended_before_the_next_attempt(
    hosts: list[Host], user: dict[str, str], config_file: Path, tmp_path: Path, on_one_host: Callable
) -> None:
    """The first rank holds the run folder, and neither sees that its launcher is gone nor heeds a stop."""
    options = ["--max-restarts", "1", "train.timeout_seconds=10"]
    running = start_run(hosts, user, config_file, tmp_path, *options)
    wait_for_steps(tmp_path / "run", 9, tmp_path / "log")
    os.kill(hosts[0].ranks()[0], signal.SIGSTOP)
    os.kill(running_module(hosts[0], b"launcher.deepspeed_runner"), signal.SIGKILL)
    assert running.wait(SECONDS) == 0, (tmp_path / "log").read_text()
    assert "the launcher was killed; going on from" in (tmp_path / "log").read_text()
    wait_until_gone(hosts)
    assert metrics(tmp_path / "run") == on_one_host(2, STEPS)


@pytest.mark.campaign
def test_launching_host_that_is_cut_off_for_a_while_goes_on_with_the_run(
    hosts: list[Host], user: dict[str, str], config_file: Path, tmp_path: Path
) -> None:
    """The ranks elsewhere train on meanwhile: they are asked to stop, and lose nothing."""
    running = start_run(hosts, user, config_file, tmp_path, "--include=node2", "--max-restarts", "5", *ENDLESS)
    log = tmp_path / "log"
    wait_for_steps(tmp_path / "run", 9, log)
    rank = hosts[1].ranks()[0]  # and its loader workers
    set_link(hosts[1], "down")
    try:
        wait_for_text(log, "no host answers any more; what runs there runs on; restarts left: ")
        assert rank in hosts[1].ranks()
    finally:
        set_link(hosts[1], "up")
    wait_for_text(log, "going on from step")
    while rank in (ranks := hosts[1].ranks()) or not ranks:
        assert running.poll() is None, log.read_text()
        time.sleep(0.2)
    os.kill(parent_of_all(hosts[0]), signal.SIGTERM)
    assert running.wait(SECONDS) == exit_codes.REQUEUE, log.read_text()
    wait_until_gone(hosts)
    assert not list((tmp_path / "run").glob("metrics.before-resume*"))
    recorded = [line["step"] for line in metrics(tmp_path / "run") if line["split"] == "train"]
    assert recorded == list(range(1, len(recorded) + 1))


def wait_for_text(log: Path, text: str) -> None:
    """Waits until a run has said something."""
    deadline = time.monotonic() + SECONDS
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def set_link(host: Host, state: str) -> None:
    """Takes a host's only link down or up."""
    command = ["nsenter", "-t", str(host.pid), "-n", "--", "ip", "link", "set", host.interface, state]
    subprocess.run(command, check=True)
