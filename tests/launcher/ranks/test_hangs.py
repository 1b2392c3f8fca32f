"""A rank that answers no longer: the others end within the time-out, by a code of their own, with everyone's stacks."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.data_pipelines.order import LostWorkerError
from longstride.launcher.output.exit_codes import HUNG
from longstride.launcher.ranks import hangs
from longstride.launcher.ranks.hangs import Neighbour, PeerFailure, SheetAddress, Watchdog, peer_failure
from longstride.launcher.ranks.processes import Ranks, process_group
from tests.harness.runs import ROOT, free_port, plain_environment, rank_environment, spawn, timeouts

TIMEOUT = 10  # long enough for ranks that start on a busy machine to meet
WITHIN = 40  # seconds behind the time-out
GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
# How torch 2.13 and gloo told each of these faults.
LATE = (
    RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"),
    RuntimeError(f"{GLOO}pair.cc:553] Application timeout caused pair closure"),
    RuntimeError("[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 5000 ms"),
    torch.distributed.DistStoreError("wait timeout after 5000ms, keys: /default_pg/0//1//cpu//0/1"),
    torch.distributed.DistStoreError("Timed out after 6 seconds waiting for clients. 1/2 clients joined."),
    torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1: Watchdog caught collective timeout"),
)
LOST = (
    RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:2181. This is typically caused by"),
    RuntimeError(f"{GLOO}pair.cc:537] Read error [127.0.0.1]:4739: Connection reset by peer. This is typically"),
    torch.distributed.DistNetworkError("Broken pipe"),
    torch.distributed.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote"),
    torch.distributed.DistBackendError("NCCL error in: a.cpp:1, remote process exited\nncclRemoteError: A call failed"),
)
OURS = (
    RuntimeError(f"{GLOO}pair.cc:451] op.preamble.length <= op.nbytes. 16 vs 8"),  # sizes that differ between ranks
    RuntimeError("the size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
    LostWorkerError("loader worker 1 of 2 (process 1) has delivered nothing for 5 s: it timed out"),
    TimeoutError("timed out"),
    torch.distributed.DistNetworkError("The server socket has failed to listen on any address, name: EADDRINUSE"),
    torch.distributed.DistBackendError("NCCL error in: a.cpp:1, invalid usage\nncclInvalidUsage: a bug in the program"),
)


@pytest.mark.parametrize("error", [*LATE, *LOST, *OURS], ids=lambda error: str(error)[:60])
def test_error_of_a_collective_is_told_from_a_mistake_of_ours(error: Exception) -> None:
    found = peer_failure(error)
    if error in OURS:
        assert found is None
    else:
        assert found is not None and found.lost == (error in LOST)
        assert "\n" not in found.reason and "/" not in found.reason.split(" keys")[0].split("clients.")[0]


def test_every_group_has_the_time_out_however_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's clone of the world, and what asks torch in its own way; test_rank_that_halts… asks whole runs."""
    from deepspeed.utils import groups

    from longstride.launcher.engine.device import prepare_accelerator

    prepare_accelerator()
    monkeypatch.setattr(groups, "_WORLD_GROUP", None)  # which an engine of this process has left
    before = torch.distributed.distributed_c10d.default_pg_timeout
    with process_group(Ranks(), 77):
        groups._clone_world_group()
        torch.distributed.new_group([0])
        torch.distributed.new_subgroups(1)
        torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("one", "other"))
        *found, _ = timeouts()  # a process alone has a store of its own, and waits for none
    assert len(found) >= 4 and set(found) == {timedelta(seconds=77)}
    assert torch.distributed.distributed_c10d.default_pg_timeout == before


STUCK = """
import sys, time
from longstride.launcher.ranks.hangs import Sheet
sheet = Sheet(1)
sheet.at("step 7")
def stuck_here():
    print(*sheet.address, sep="\\t", flush=True)
    sys.stdin.read()
stuck_here()
"""


def test_stacks_of_a_stopped_process_are_read_and_wake_it_and_one_that_is_gone_is_let_be() -> None:
    command = [sys.executable, "-c", STUCK]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        rank, host, pid, file, token = process.stdout.readline().rstrip("\n").split("\t")
        address = SheetAddress(int(rank), host, int(pid), int(file), token)
        neighbour = Neighbour(address)
        other = Neighbour(address._replace(token="0" * 16))  # its number went to a process of another run
        other.ask()
        assert other.read() is None
        process.send_signal(signal.SIGSTOP)
        reading = neighbour.read()
        assert reading is not None and (reading.place, reading.stacks) == ("step 7", "")
        neighbour.ask()
        reading = until(lambda: (r := neighbour.read()) is not None and "stuck_here" in r.stacks and r)
        assert reading.place == "step 7" and reading.seconds < 60
        assert Path(f"/proc/{process.pid}/stat").read_text().split(") ")[1][0] != "T"
        process.kill()
    neighbour.ask()
    assert neighbour.read() is None


def until(found: Callable[[], Any], seconds: float = 60) -> Any:
    """What a function returns once it is true."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[PeerFailure]:
    """What a watch found, which then only stops watching, instead of ending this process; all of it soon."""
    found: list[PeerFailure] = []

    def end(self: Watchdog, one: PeerFailure, _: BaseException | None = None) -> None:
        found.append(one)
        self._over.set()

    monkeypatch.setattr(Watchdog, "end", end)
    for name, seconds in (("_LOOK_SECONDS", 0.01), ("_SURE_SECONDS", 0.05), ("_LATE_SECONDS", 0.05)):
        monkeypatch.setattr(hangs, name, seconds)
    return found


@pytest.mark.parametrize("waiting", [True, False])
def test_watch_ends_a_wait_that_no_time_out_ends_and_no_work(
    waiting: bool, ends: list[PeerFailure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "barrier", lambda: time.sleep(0.6))
    watch = Watchdog(None, 0, 2, 0.2, orphaned=lambda: False)
    with contextlib.closing(watch):
        if waiting:
            Ranks(0, 0, 2).barrier()
        else:
            time.sleep(0.6)  # as long, and in none of our collectives
    assert [each.lost for each in ends] == [False] * waiting


def test_watch_lets_many_short_waits_be(ends: list[PeerFailure], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is looked at while it waits, at the same place of the program."""
    monkeypatch.setattr(torch.distributed, "barrier", lambda: time.sleep(0.1))
    with contextlib.closing(Watchdog(None, 0, 2, 0.2, orphaned=lambda: False)):
        for _ in range(8):
            Ranks(0, 0, 2).barrier()
    assert not ends


def test_watch_lets_long_work_of_the_first_rank_be(ends: list[PeerFailure], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two meetings the ranks sleep for longer than the time-out, and in no collective."""
    monkeypatch.setattr(Ranks, "gather_objects", lambda ranks, value: [value, None])
    with contextlib.closing(Watchdog(None, 0, 2, 0.2, orphaned=lambda: False)):
        Ranks(0, 0, 2).run_on_first(lambda: time.sleep(1.5))
    assert not ends


@pytest.mark.parametrize("orphaned", [True, False])
def test_watch_ends_what_stands_still_without_a_launcher(orphaned: bool, ends: list[PeerFailure]) -> None:
    with contextlib.closing(Watchdog(None, 0, 1, 0.2, orphaned=lambda: orphaned)):
        time.sleep(0.6)
    assert ["launcher is gone" in each.reason for each in ends] == [True] * orphaned


def ended_within_seconds(run: Path) -> float:
    """How long ago the run wrote its last line, right before it halted."""
    seconds = time.time() - (run / "metrics.jsonl").stat().st_mtime
    print(f"ended {seconds - TIMEOUT:.1f} s behind the time-out")
    return seconds


CASES = [("zero0_fp32", "step", "stopped")]
CASES += [(f"zero{s}_fp32", where, "stopped") for s in range(4) for where in ("step", "evaluation", "save")]
CASES += [("zero1_fp32", where, "endless") for where in ("step", "evaluation", "save")]
SAMPLE = [CASES[0], *(pytest.param(*case, marks=pytest.mark.campaign) for case in CASES[2:])]


@pytest.mark.parametrize(("preset", "where", "how"), SAMPLE)
def test_rank_that_halts_ends_the_run_with_everyones_stacks(
    preset: str, where: str, how: str, config_file: Path, tmp_path: Path
) -> None:
    arguments = ["--config", str(config_file), f"deepspeed={preset}", f"train.timeout_seconds={TIMEOUT}"]
    ended = spawn(arguments, 2, {"HALT": f"{where},4,{how}"})
    assert ended_within_seconds(tmp_path / "run") < TIMEOUT + WITHIN
    assert ended.codes == [HUNG, HUNG]  # the one that was stopped too
    groups = [line for line in ended.stdout[1].splitlines() if line.startswith("time-outs of groups and store: ")]
    assert len(groups) == 1 and set(groups[0].split(": ")[1].split()) == {str(TIMEOUT)}
    assert len(groups[0].split(": ")[1].split()) > 2  # torch's world, DeepSpeed's, and the store
    told = [line for text in ended.stderr for line in text.splitlines() if line.startswith("longstride")]
    assert len(told) == 1 and "imed out" in told[0] and str(tmp_path / "run/stacks") in told[0]
    assert "Traceback" not in "".join(ended.stderr)
    first, second = (path.read_text() for path in sorted((tmp_path / "run/stacks").iterdir()))
    place = {"step": "step 4", "evaluation": "evaluation after step 4", "save": "saving step 4"}[where]
    for number, text in enumerate((first, second)):
        assert text.startswith(f"rank {number} of 2 on ")
        assert text.splitlines()[1].startswith(f"{place}, for ")
    assert "Timed out waiting" in first and "work_and_halt" in second  # where each of them was


ENDS = {"killed": -signal.SIGKILL, "raises": 1, "stopped": HUNG}
IN_TWO = "train.sequence_parallel=2"
EXCHANGES = {  # the first one of a forward pass
    "heads": (IN_TWO, "train.sequence_exchange=heads"),
    "keys": (IN_TWO, "train.sequence_exchange=keys"),
    "rows before": (IN_TWO, "model.convolution=3"),
    "experts": ("train.expert_parallel=2", 'model.feed_forward={"type": "experts", "count": 4}'),
}
LOST_IN = [(name, where, how) for name in EXCHANGES for where in ("backward", "forward") for how in ENDS]


@pytest.mark.parametrize(
    ("name", "where", "how"),
    [pytest.param(*each, marks=() if each in (LOST_IN[0], LOST_IN[-6]) else pytest.mark.campaign) for each in LOST_IN],
)
def test_rank_lost_in_an_exchange_of_its_group_ends_the_run(
    name: str, where: str, how: str, config_file: Path, tmp_path: Path
) -> None:
    """Of two groups of two: the other group waits for all at the step's end, or comes there while it is asked."""
    timeout = TIMEOUT if how == "stopped" else 3 * WITHIN
    arguments = ["--config", str(config_file), f"train.timeout_seconds={timeout}"]
    ended = spawn([*arguments, *EXCHANGES[name]], 4, {"HALT": f"{where},4,{how}"})
    assert ended_within_seconds(tmp_path / "run") < WITHIN + (TIMEOUT if how == "stopped" else 0)
    assert ended.codes == [HUNG, HUNG, HUNG, ENDS[how]], ended.stderr
    [groups] = [line for line in ended.stdout[3].splitlines() if line.startswith("time-outs of groups and store: ")]
    seconds = groups.split(": ")[1].split()
    assert set(seconds) == {str(timeout)} and len(seconds) > 3  # torch's world, DeepSpeed's, the group, and the store
    [told] = [line for text in ended.stderr for line in text.splitlines() if line.startswith("longstride")]
    assert "(step 4, after " in told and ("lost another process" in told) == (how != "stopped")
    assert ("Traceback" in "".join(ended.stderr)) == (how == "raises")
    stacks = {int(path.stem[-5:]): path.read_text() for path in (tmp_path / "run/stacks").iterdir()}
    assert stacks.keys() >= {0, 1, 2}
    assert "step 4, for " in stacks[2].splitlines()[1] and " in swap" in stacks[2]


STARTS = {
    "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "2", str(ROOT / "launcher/train.py")],
    "longstride": ["longstride.launcher.cli", "train", "--processes", "2"],
}


@pytest.mark.campaign
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("halted", [1, 0])
def test_launcher_ends_with_all_its_processes_where_a_rank_is_stopped(
    start: str, halted: int, config_file: Path, tmp_path: Path
) -> None:
    mark = f"LONGSTRIDE_TEST={tmp_path}"
    command = [sys.executable, "-m", *STARTS[start], "--config", str(config_file), f"train.timeout_seconds={TIMEOUT}"]
    command[3:3] = ["--master_port", str(free_port())] if start == "deepspeed" else []
    command += ["train.steps=100000", "train.checkpoint_every=0", "train.evaluate_every=0", "data.workers=1"]
    environment = plain_environment() | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), **dict([mark.split("=")])}
    metrics = tmp_path / "run/metrics.jsonl"
    with subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, 120)
            ranks = [pid for pid, its in marked(mark).items() if f"RANK={halted}" in its]
            os.kill(min(ranks), signal.SIGSTOP)
            stopped = time.monotonic()
            _, stderr = process.communicate(timeout=120)
            seconds = time.monotonic() - stopped
            print(f"ended {seconds - TIMEOUT:.1f} s behind the time-out")
            assert seconds < TIMEOUT + WITHIN
            assert process.returncode == HUNG, stderr
            until(lambda: not marked(mark), 10)
            assert len(list((tmp_path / "run/stacks").iterdir())) == 2
        finally:
            for pid in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> dict[int, list[str]]:
    """The processes whose environment holds a mark, with their environments."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            its = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            if mark in its and int(folder.name) != os.getpid():
                found[int(folder.name)] = its
    return found


@pytest.mark.campaign
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_never_comes_ends_the_other_within_the_time_out(rank: int, config_file: Path) -> None:
    start = time.monotonic()
    environment = plain_environment() | rank_environment(rank, 2, free_port())
    command = [sys.executable, str(ROOT / "tests/harness/processes/worker.py"), "--config", str(config_file)]
    command.append(f"train.timeout_seconds={TIMEOUT}")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert time.monotonic() - start < TIMEOUT + WITHIN
    assert ended.returncode == HUNG
    said = [line for line in ended.stderr.splitlines() if line.startswith("longstride")]
    # The first rank reports what takes more than 5 seconds, and the wait is such: half of the time-out.
    assert ("longstride: waiting for the other processes …" in said) == (rank == 0)
    [line] = [line for line in said if not line.endswith(" …")]
    assert "waiting for 2 processes at 127.0.0.1:" in line
    assert ("1/2 clients joined" in line) == (rank == 0)
