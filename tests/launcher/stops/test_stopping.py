"""A stop that a signal asks for: saved, told by its own exit code, gone on with to the last bit."""

from __future__ import annotations

import errno
import io
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longstride.launcher.cluster.progress import read_progress
from longstride.launcher.output import exit_codes
from longstride.launcher.output.messages import LastingOutput, lasting_output
from longstride.launcher.stops.ancestors import LauncherGone
from longstride.launcher.stops.stopping import LEAVE_AT_ONCE, StopFile, StopFlag, TimeIsUp
from tests.harness.runs import ROOT, hear_hangups, metrics, plain_environment, spawn

Trained = Callable[..., Path]


@pytest.mark.parametrize("where", ["step", pytest.param("evaluation", marks=pytest.mark.campaign)])
def test_signal_to_one_rank_stops_all_and_nothing_is_lost(
    trained: Trained, config_file: Path, tmp_path: Path, where: str
) -> None:
    """The second of two ranks gets the signal in the middle of step 4's computing, or of its evaluation."""
    whole = trained("two", 2)
    arguments = ["--config", str(config_file), "--resume", "auto", "train.checkpoint_every=3", "data.workers=1"]
    ended = spawn(arguments, 2, {"SIGNAL_RANK_1": f"{signal.SIGUSR1.value},4,{where}"})
    assert ended.codes == [exit_codes.REQUEUE] * 2, ended.stderr
    assert "longstride: stopped by SIGUSR1; --resume auto goes on" in ended.stderr[0]
    assert (tmp_path / "run/checkpoints/step-00000004/manifest.json").exists()
    ended = spawn(arguments, 2)
    assert ended.codes == [exit_codes.DONE] * 2, ended.stderr
    assert metrics(tmp_path / "run") == metrics(whole)


# A process that listens, and whose main thread is then stuck in C code, as in a collective that never ends. Another
# thread tells what the flag knows.
_STUCK = """
import ctypes, sys, threading, time
from contextlib import nullcontext
from longstride.launcher.stops import stopping
stopping._ONE_STOP_SECONDS = 0.5
stop = stopping.StopFlag()
stop.listen()
def tell():
    while not stop.asked():
        time.sleep(0.01)
    print(stop.reason, flush=True)
with stop.held() if sys.argv[1] == "held" else nullcontext():
    threading.Thread(target=tell, daemon=True).start()
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def stuck(how: str) -> subprocess.Popen[str]:
    """A process with a main thread that sees no signal."""
    environment = plain_environment() | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", _STUCK, how],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_hangups,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_second_signal_ends_a_process_that_is_stuck_in_a_collective() -> None:
    with stuck("held") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # of the same stop
        reason = process.stdout.readline()
        assert reason in ("SIGTERM\n", "SIGINT\n")
        time.sleep(0.7)
        assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == exit_codes.STOPPED


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_stop_before_there_is_anything_to_save_ends_at_once(number: signal.Signals) -> None:
    with stuck("not yet") as process:
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == exit_codes.REQUEUE
    assert told == f"longstride: stopped by {number.name}; there was nothing to save\n"


def test_time_is_up_after_so_many_seconds_of_the_process() -> None:
    assert TimeIsUp(60.0, started=time.time())() is None
    assert TimeIsUp(60.0, started=time.time() - 59.0)() is None
    assert TimeIsUp(60.0, started=time.time() - 61.0)() == "train.max_seconds=60"


def test_stop_file_carries_the_reason_and_goes_with_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = StopFile(run / ".stop-1")
    assert file() is None
    StopFile(run / ".stop-2").write("SIGTERM")  # another run's
    assert file() is None
    file.write("SIGINT")
    assert file() == "SIGINT"
    file.write(LEAVE_AT_ONCE)
    assert file() == LEAVE_AT_ONCE
    file.remove()
    assert [path.name for path in run.iterdir()] == [".stop-2"]
    alone = StopFile(tmp_path / "unborn" / ".stop-3")
    alone.write("SIGINT")
    alone.remove()
    assert not (tmp_path / "unborn").exists()


def test_stop_that_the_first_rank_alone_is_told_waits_until_all_have_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("longstride.launcher.stops.stopping.end_now", ended.append)
    monkeypatch.setattr("longstride.launcher.stops.stopping._LOOK_SECONDS", 0.01)
    file, stop, looks = StopFile(tmp_path / ".stop-1"), StopFlag(), threading.Semaphore(0)
    file.write("SIGTERM")
    stop.look(lambda: looks.release(), held_only=True)  # type: ignore[func-returns-value]
    stop.look(file, held_only=True)
    stop.listen()
    try:
        assert all(looks.acquire(timeout=10) for _ in range(3))
        assert not stop.asked()
        with stop.held():
            assert all(looks.acquire(timeout=10) for _ in range(3 + 3))
            assert stop.reason == "SIGTERM"
        assert ended == []
        file.write(LEAVE_AT_ONCE)
        assert all(looks.acquire(timeout=10) for _ in range(6))
    finally:
        stop.close()
    assert exit_codes.STOPPED in ended


def test_process_by_itself_has_no_launcher_to_lose() -> None:
    assert LauncherGone({})._chain == []
    gone = LauncherGone({"RANK": "0"})
    assert gone() is None
    gone._chain = [(child, parent + 1) for child, parent in gone._chain]
    assert gone() == "the end of its launcher"


@pytest.mark.parametrize("number", [5, 32])
def test_output_outlives_its_reader(number: int) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, "gone")

        def flush(self) -> None:
            self.write("")

    output = LastingOutput(Gone())
    assert output.write("x") == 0
    output.flush()
    assert output.encoding is None  # what else is asked of a stream is the stream's


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_costs_a_log_its_lines_and_a_result_its_error(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, "full")

    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", Full())
    with lasting_output():
        print("x", file=sys.stderr, flush=True)
        with pytest.raises(OSError, match="full"):
            print("x")


@pytest.mark.campaign
def test_time_limit_stops_a_run_saved(config_file: Path, tmp_path: Path) -> None:
    arguments = ["--config", str(config_file), "train.steps=100000", "train.max_seconds=20", "train.evaluate_every=0"]
    ended = spawn(arguments, 2)
    assert ended.codes == [exit_codes.REQUEUE] * 2, ended.stderr
    assert "longstride: stopped by train.max_seconds=20; " in ended.stderr[0]
    progress = read_progress(tmp_path / "run")
    assert progress.saved == progress.recorded
