"""Two hosts under `longstride train` and pdsh: runs that are stopped, killed, or cut off from a host."""

import os
import random
import signal
import subprocess
import time

import pytest

from longstride.launcher.output import exit_codes
from tests.cluster.hosts import Host, wait_until
from tests.cluster.person import ENDLESS, SECONDS, Lines, Person

STEPS = 40
# Enough that a run still trains when ssh has brought a signal to the other host: a step takes hundredths of a second.
STOPPED_STEPS = 240
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_END_SECONDS = 60.0


def start_run(person: Person, *words: str, steps: int = STEPS) -> subprocess.Popen[bytes]:
    """Start a run of one rank per host, with loader workers, which resumes from the newest checkpoint."""
    return person.start(person.train(1, "--resume", "auto", f"train.steps={steps}", "data.workers=1", *words))


def supervisor_on(host: Host) -> int:
    """Return the pid of `longstride train` on a host, in this machine's namespace."""
    return running_module(host, b"longstride.launcher.cli")


def running_module(host: Host, module: bytes) -> int:
    """Return the pid of the process that runs a module on a host, in this machine's namespace."""
    pids = host.find(lambda words: words[1:3] == [b"-m", module])
    assert pids, "it has ended"
    return pids[0]


def wait_until_ended(hosts: list[Host], seconds: float = _END_SECONDS) -> None:
    """Wait until no process of a run is left on any host."""

    def left() -> list[str]:
        return [line for host in hosts for line in host.processes() if "sshd" not in line]

    wait_until(lambda: not left(), seconds, left)


def moments() -> list[object]:
    """Return signals and the number of steps before each; all but the first are for the campaign."""
    random_numbers = random.Random("pdsh")
    cases = [(_SIGNALS[number % 3], 0 if number == 1 else random_numbers.randrange(32)) for number in range(20)]
    return [
        pytest.param(
            which, steps, id=f"{number}-{which.name}-{steps}", marks=() if number == 0 else pytest.mark.campaign
        )
        for number, (which, steps) in enumerate(cases)
    ]


@pytest.mark.parametrize(("number", "steps"), moments())
def test_stop_over_two_hosts_loses_nothing(
    number: signal.Signals, steps: int, person: Person, on_one_host: Lines
) -> None:
    running = start_run(person, steps=STOPPED_STEPS)
    if steps:
        person.wait_for_steps(steps)
    else:  # while they start, and before they have met
        wait_until(lambda: all(host.ranks() for host in person.hosts), SECONDS, person.said)
    time.sleep(random.Random(steps).uniform(0, 0.2))
    os.kill(supervisor_on(person.hosts[0]), number)
    assert running.wait(SECONDS) == exit_codes.REQUEUE, person.said()
    wait_until_ended(person.hosts)
    assert start_run(person, steps=STOPPED_STEPS).wait(SECONDS) == 0, person.said()
    assert not list(person.run.glob("metrics.before-resume*"))
    assert person.lines() == on_one_host(2, STOPPED_STEPS)


@pytest.mark.parametrize(
    ("which", "steps"), [(1, 9), *(pytest.param(n % 2, 3 * n, marks=pytest.mark.campaign) for n in range(1, 10))]
)
def test_killed_rank_on_a_host_is_started_again(which: int, steps: int, person: Person, on_one_host: Lines) -> None:
    running = start_run(person, "--max-restarts", "2")
    person.wait_for_steps(steps)
    os.kill(person.hosts[which].ranks()[0], signal.SIGKILL)
    assert running.wait(SECONDS) == 0, person.said()
    assert "with 2 processes on the same hosts" in person.said()
    wait_until_ended(person.hosts)
    assert person.lines() == on_one_host(2, STEPS)


def test_host_that_is_cut_off_is_done_without(person: Person, on_one_host: Lines) -> None:
    """Expect both sides to end by their time-out, ssh to notice the loss, and the run to go on with one process."""
    timeout = 10.0
    options = ["--max-restarts", "1", f"train.timeout_seconds={timeout}"]
    running = start_run(person, *options)
    person.wait_for_steps(12)
    before = person.lines()
    set_link(person.hosts[1], "down")
    try:
        began = time.monotonic()
        wait_until(lambda: not person.hosts[1].ranks(), timeout + 40, person.hosts[1].processes)
        left = timeout + 40 + 30 - (time.monotonic() - began)  # as long as ssh is asked whether the host answers
        wait_until(lambda: "continuing from step" in person.said(), left, person.said)
        assert running.wait(SECONDS) == 0, person.said()
    finally:
        set_link(person.hosts[1], "up")
    log = person.said()
    assert "with 1 processes, as node2 does not answer" in log
    assert "was saved by 2 processes in ZeRO 0, fp32; converted for 1 process" in log
    assert len(list((person.run / "stacks").glob("*-rank-*.txt"))) >= 2
    expected = on_one_host(2, STEPS)
    assert before == expected[: len(before)]
    names = ("step", "split", "sample_ids_crc32")
    lines, expected_lines = ([[line.get(name) for name in names] for line in run] for run in (person.lines(), expected))
    assert lines == expected_lines


@pytest.mark.campaign
def test_stuck_rank_of_a_lost_launcher_is_ended_before_the_next_attempt(person: Person, on_one_host: Lines) -> None:
    """Stop rank 0, which holds the run folder: it neither notices the loss of its launcher nor obeys a stop."""
    options = ["--max-restarts", "1", "train.timeout_seconds=10"]
    running = start_run(person, *options)
    person.wait_for_steps(9)
    os.kill(person.hosts[0].ranks()[0], signal.SIGSTOP)
    os.kill(running_module(person.hosts[0], b"longstride.launcher.cluster.deepspeed_runner"), signal.SIGKILL)
    assert running.wait(SECONDS) == 0, person.said()
    assert "the launcher was killed; continuing from" in person.said()
    wait_until_ended(person.hosts)
    assert person.lines() == on_one_host(2, STEPS)


@pytest.mark.campaign
def test_launching_host_that_is_cut_off_for_a_while_goes_on_with_the_run(person: Person) -> None:
    """Let the ranks elsewhere train on meanwhile, then stop them; they lose nothing."""
    running = start_run(person, "--include=node2", "--max-restarts", "5", *ENDLESS)
    person.wait_for_steps(9)
    rank = person.hosts[1].ranks()[0]  # and its loader workers
    set_link(person.hosts[1], "down")
    try:
        person.wait_for_text("no host answers any more; their processes keep running; restarts left: ")
        assert rank in person.hosts[1].ranks()
    finally:
        set_link(person.hosts[1], "up")
    person.wait_for_text("continuing from step")
    wait_until(lambda: (ranks := person.hosts[1].ranks()) and rank not in ranks, SECONDS, person.said)
    os.kill(supervisor_on(person.hosts[0]), signal.SIGTERM)
    assert running.wait(SECONDS) == exit_codes.REQUEUE, person.said()
    wait_until_ended(person.hosts)
    assert not list(person.run.glob("metrics.before-resume*"))
    recorded = [line["step"] for line in person.lines() if line["split"] == "train"]
    assert recorded == list(range(1, len(recorded) + 1))


def set_link(host: Host, state: str) -> None:
    """Take a host's only link down or up."""
    command = ["nsenter", "-t", str(host.pid), "-n", "--", "ip", "link", "set", host.interface, state]
    subprocess.run(command, check=True)
