"""Processes that share each context, on two hosts of two: placed, lost, and refused."""

import sys

import pytest

from longstride.launcher.output import exit_codes
from tests.cluster.person import Lines, Person
from tests.cluster.slurm import Slurm
from tests.cluster.test_faults import wait_until_ended
from tests.harness.runs import ROOT

_OVER_HOSTS = ("train.sequence_parallel=4", "model.heads=4")
_ROUNDING = 1e-6  # relative, of losses in fp32 whose sums were taken in another order


def test_group_over_two_hosts_trains_as_one_process(person: Person, on_one_host: Lines) -> None:
    assert person.ends(person.train(2, *_OVER_HOSTS)) == 0, person.said()
    lines = person.lines()
    assert lines == on_one_host(4, 8, *_OVER_HOSTS)
    alone = on_one_host(1, 8, "train.sequence_parallel=1", "model.heads=4")  # with the same dropout
    for line, same in zip(lines, alone, strict=True):
        assert line.get("sample_ids_crc32") == same.get("sample_ids_crc32")
        assert line["loss_nats"] == pytest.approx(same["loss_nats"], rel=_ROUNDING)


def test_rank_killed_in_an_exchange_ends_both_hosts_and_the_run_goes_on(person: Person, on_one_host: Lines) -> None:
    """Kill the last rank in the backward pass: its neighbour waits in the exchange, the other host after it."""
    train = person.train(2, "--resume", "auto", "train.sequence_parallel=2")
    variables = person.folder / ".deepspeed_env"
    variables.write_text("HALT=backward,6,killed\n")
    halted = [sys.executable, str(ROOT / "tests/harness/processes/supervised.py"), *train[3:]]
    assert person.ends(halted) == exit_codes.HUNG, person.said()
    wait_until_ended(person.hosts)
    log = person.said()
    assert all(f"on node{host} lost another process (step 6, after" in log for host in (1, 2)), log
    assert "ended: code 247: a process was ended by SIGKILL" in log, log
    stacks = {int(path.stem[-5:]): path.read_text() for path in (person.run / "stacks").iterdir()}
    assert stacks.keys() == {0, 1, 2} and " in swap" in stacks[2]
    variables.unlink()
    assert person.ends(train) == 0, person.said()
    assert person.lines() == on_one_host(4, 8, "train.sequence_parallel=2")


@pytest.mark.parametrize("launcher", ["srun", "openmpi"])
def test_ranks_that_are_dealt_to_hosts_in_turn_are_refused(
    launcher: str, person: Person, request: pytest.FixtureRequest
) -> None:
    if launcher == "srun":
        slurm: Slurm = request.getfixturevalue("slurm")
        person.environment |= slurm.variables
        command = ["srun", "--nodes=2", "--ntasks-per-node=2", "--distribution=cyclic", sys.executable, "-u"]
        command += [str(ROOT / "launcher" / "train.py"), "--config", str(person.config)]
    else:
        words = "--allow-run-as-root --map-by node"
        command = person.train(2, "--launcher", "openmpi", f"--launcher-args={words}")
    assert person.ends([*command, "train.sequence_parallel=2"]) == exit_codes.WRONG_INPUT, person.said()
    [line] = [line for line in person.said().splitlines() if "longstride: error: " in line]
    assert "train.sequence_parallel=2: " in line and "node1 has ranks 0, 2; start ranks host by host, by " in line
    assert not list(person.run.glob("*.jsonl"))
