"""A reader that never reads holds no run: steps are taken, a stop is handed on and saves, a second one ends all."""

import itertools
import json
import os
import pty
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from longstride.data_pipelines.shards import index_tars
from longstride.launcher.output import exit_codes
from tests.harness.data.tars import write_tar
from tests.harness.processes.tended import deepspeed, longstride, tended
from tests.harness.runs import ROOT, Rank, configuration, free_port, metrics, plain_environment, rank_environment, spawn
from tests.hostile.commands import campaign, sampled

SECONDS = 30.0  # that a stop may take
_STAND_INS = [sys.executable, str(ROOT / "tests/harness/processes/stand_ins.py"), "parent"]
_SAME_STOP_SECONDS = 5.5  # signals to a rank that are nearer together are one stop
# Functions that return two files: one to read from and one to write to.
STALLED: dict[str, Callable[[], tuple[int, int]]] = {"pipe": os.pipe, "terminal": pty.openpty}
STREAMS = {"stdout": (True, False), "stderr": (False, True), "both": (True, True)}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Case(NamedTuple):
    """The process that stalls, the number of ranks, and the source of the stop."""

    kind: str
    streams: str
    world_size: int
    number: signal.Signals

    def __str__(self) -> str:
        return f"{self.kind}-{self.streams}-{self.world_size}-{self.number.name}"


SAMPLE = [Case("pipe", "both", 2, signal.SIGTERM), Case("terminal", "stderr", 1, signal.SIGINT)]
EVERY = [Case(*case) for case in itertools.product(STALLED, STREAMS, (1, 2), SIGNALS)]


@contextmanager
def stalled(kind: str) -> Iterator[int]:
    """Yield the writing end of one of STALLED. A writer waits until the block ends."""
    reader, writer = STALLED[kind]()
    os.set_blocking(writer, False)
    room = select.poll()
    room.register(writer, select.POLLOUT)
    while room.poll(100):  # a terminal makes room when it has moved what was written
        with suppress(BlockingIOError):
            os.write(writer, b"x" * 512)
    os.set_blocking(writer, True)
    try:
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a small data folder."""
    folder = tmp_path_factory.mktemp("stalled")
    (folder / "tars").mkdir()
    for split in ("train", "validation"):
        write_tar(folder / "tars" / f"{split}-0.tar", [("text.txt", b"sparse dense stride " * 400)])
    index_tars([str(folder / "tars")], folder / "data", unpack=True)
    return folder / "data"


def config_file(data: Path, folder: Path, **train: object) -> Path:
    """Write the configuration of a run that goes on until it is stopped, and prints at every step."""
    content = configuration(data, folder / "run")
    content["train"] |= {"steps": 1_000_000, "checkpoint_every": 0, "evaluate_every": 0} | train
    content["train"]["guards"] = {"spike": {"deviations": 1e-6, "window": 2, "policy": "skip"}}
    content["train"]["guards"]["max_skips_in_a_row"] = 1_000_000
    path = folder / "run.json"
    path.write_text(json.dumps(content))
    return path


@contextmanager
def started(arguments: list[str], case: Case, folder: Path) -> Iterator[list[Rank]]:
    """Start the ranks of a run whose readers stall; end all of them with the block."""
    with stalled(case.kind) as out, stalled(case.kind) as err:
        out_stalls, err_stalls = STREAMS[case.streams]
        outputs = (out if out_stalls else None, err if err_stalls else None)
        port, ranks = free_port(), []
        shared = plain_environment() | {"MARKS": str(folder / "marks"), "MARK_SECONDS": "0"}
        for rank in range(case.world_size):
            place = rank_environment(rank, case.world_size, port) if case.world_size > 1 else {}
            ranks.append(Rank(arguments, shared | place, outputs))
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.end()


def wait_for_steps(folder: Path, count: int) -> None:
    """Waits until a run has begun so many steps."""
    end = time.monotonic() + 60
    marks = folder / "marks"
    while not marks.exists() or marks.read_text().count("step") < count:
        assert time.monotonic() < end, f"{marks.read_text().split() if marks.exists() else 'not begun'}"
        time.sleep(0.02)


def check_saved(run: Path) -> None:
    """Check that the last step taken is saved."""
    steps = [line["step"] for line in metrics(run)]
    assert steps == [*range(1, len(steps) + 1)]
    assert (run / "checkpoints" / f"step-{steps[-1]:08d}" / "manifest.json").exists()


@pytest.mark.parametrize("case", sampled(EVERY, SAMPLE), ids=str)
def test_ranks_go_on_and_a_stop_saves(data: Path, tmp_path: Path, case: Case) -> None:
    with started(["--config", str(config_file(data, tmp_path))], case, tmp_path) as ranks:
        wait_for_steps(tmp_path, 20)
        start = time.monotonic()
        os.kill(ranks[-1].pid, case.number)
        codes = [rank.wait(SECONDS) for rank in ranks]
        assert codes == [exit_codes.REQUEUE] * case.world_size
        assert time.monotonic() - start < SECONDS
    check_saved(tmp_path / "run")


@pytest.mark.campaign
@pytest.mark.parametrize("streams", STREAMS)
def test_second_stop_ends_a_rank_that_waits(data: Path, tmp_path: Path, streams: str) -> None:
    """Stop the peer by SIGSTOP, so that the rank never reaches its next step."""
    case = Case("pipe", streams, 2, signal.SIGTERM)
    with started(["--config", str(config_file(data, tmp_path))], case, tmp_path) as (first, second):
        wait_for_steps(tmp_path, 3)
        os.kill(second.pid, signal.SIGSTOP)
        os.kill(first.pid, signal.SIGTERM)
        time.sleep(_SAME_STOP_SECONDS)
        os.kill(first.pid, signal.SIGTERM)
        assert first.wait(SECONDS) == exit_codes.STOPPED


def test_reader_that_is_slow_sees_every_line_in_order(data: Path, tmp_path: Path) -> None:
    arguments = ["--config", str(config_file(data, tmp_path, steps=60))]
    reader, writer = os.pipe()
    pieces: list[bytes] = []

    def read() -> None:
        while piece := os.read(reader, 64):
            pieces.append(piece)
            time.sleep(0.002)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    rank = Rank(arguments, plain_environment(), (None, writer))
    os.close(writer)
    try:
        assert rank.wait(SECONDS) == exit_codes.DONE
    finally:
        rank.end()
    reading.join(SECONDS)
    os.close(reader)
    shown = b"".join(pieces).decode().splitlines()
    again = spawn([*arguments, f"train.output={tmp_path / 'again'}"], 1)
    assert again.codes == [exit_codes.DONE]

    def words(lines: list[str]) -> list[str]:
        return [re.split(r"·| in \d", line)[0] for line in lines]  # before what takes its time

    assert words(shown) == words(again.stderr[0].replace(str(tmp_path / "again"), str(tmp_path / "run")).splitlines())


@pytest.mark.parametrize(
    ("kind", "twice"),
    [("pipe", False), ("terminal", True), *campaign([("pipe", True), ("terminal", False)])],
)
def test_stop_is_handed_on_before_it_is_told(tmp_path: Path, kind: str, twice: bool) -> None:
    """Run `longstride train` with stand-ins for the parts that take seconds to start."""
    with stalled(kind) as file:
        saving = {"SAVE_SECONDS": "600" if twice else "0"}
        with tended([*_STAND_INS, str(tmp_path)], tmp_path, saving, stdout=file, stderr=file) as going:
            assert going.wait_for(2)
            start = time.monotonic()
            going.process.send_signal(signal.SIGTERM)
            if twice:
                while not list(tmp_path.glob(".stop-*")):  # the stop is handed on
                    assert time.monotonic() < start + SECONDS
                    time.sleep(0.01)
                time.sleep(0.6)  # one stop may send several signals
                going.process.send_signal(signal.SIGTERM)
            assert going.end() == (exit_codes.STOPPED if twice else exit_codes.REQUEUE)
            assert time.monotonic() - start < SECONDS
            assert not going.processes()
    assert len(list(tmp_path.glob("saved-*"))) == (0 if twice else 2)


@pytest.mark.campaign
@pytest.mark.parametrize("case", [case for case in EVERY if case.kind == "pipe"], ids=str)
def test_stop_of_longstride_train(data: Path, tmp_path: Path, case: Case) -> None:
    """Test the full chain from the command to the ranks."""
    command = longstride(["--config", str(config_file(data, tmp_path))], case.world_size)
    with stalled(case.kind) as file:
        stdout, stderr = (file if stalls else None for stalls in STREAMS[case.streams])
        with tended(command, tmp_path, stdout=stdout, stderr=stderr) as going:
            wait_for_steps(tmp_path, 20)
            start = time.monotonic()
            going.process.send_signal(case.number)
            assert going.end() == exit_codes.REQUEUE, going.output
            assert time.monotonic() - start < SECONDS
            assert not going.processes()
    check_saved(tmp_path / "run")


@pytest.mark.campaign
def test_stop_of_the_deepspeed_launcher(data: Path, tmp_path: Path) -> None:
    """Send the launcher a signal, of which it dies: its ranks notice, save and end. Its standard output is read."""
    with stalled("pipe") as file:
        command = deepspeed(["--config", str(config_file(data, tmp_path))])
        with tended(command, tmp_path, stderr=file) as going:
            wait_for_steps(tmp_path, 20)
            going.process.send_signal(signal.SIGTERM)
            going.end()
            assert going.all_ended(SECONDS), going.processes()
    check_saved(tmp_path / "run")
