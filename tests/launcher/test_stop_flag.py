"""A stop that a signal asks for: the run is saved, has an exit code of its own, and resumes to the last bit."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longstride.launcher.cluster.start import read_progress
from longstride.launcher.output import exit_codes
from longstride.launcher.stops import LEAVE_AT_ONCE, SignalPipe, StopFile, StopFlag
from tests.harness.runs import ROOT, hear_hangups, metrics, plain_environment, spawn

Trained = Callable[..., Path]


@pytest.mark.parametrize("where", ["step", pytest.param("evaluation", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", ["two", "two-sharing"])
def test_signal_to_one_rank_stops_all_and_nothing_is_lost(
    trained: Trained, config_file: Path, tmp_path: Path, where: str, name: str
) -> None:
    """The second of two ranks gets the signal in the middle of step 4's computing, or of its evaluation.

    Both ranks may share each context: then the step ends with all its exchanges.
    """
    more = ["train.sequence_parallel=2"] if name == "two-sharing" else []
    whole = trained(name, 2, *more)
    arguments = ["--config", str(config_file), "--resume", "auto", "train.checkpoint_every=3", "data.workers=1", *more]
    ended = spawn(arguments, 2, {"SIGNAL_RANK_1": f"{signal.SIGUSR1.value},4,{where}"})
    assert ended.codes == [exit_codes.REQUEUE] * 2, ended.stderr
    assert "longstride: stopped by SIGUSR1; --resume auto continues" in ended.stderr[0]
    assert (tmp_path / "run/checkpoints/step-00000004/manifest.json").exists()
    ended = spawn(arguments, 2)
    assert ended.codes == [exit_codes.DONE] * 2, ended.stderr
    assert metrics(tmp_path / "run") == metrics(whole)


# A process that listens while its main thread is stuck in C code, as in a collective that never ends. Another thread
# prints the flag's reason.
_STUCK = """
import ctypes, sys, threading, time
from contextlib import nullcontext
from longstride.launcher import stops
stops._SAME_STOP_SECONDS = 0.5
stop = stops.StopFlag()
stop.listen()
def show():
    while stop.reason is None:
        time.sleep(0.01)
    print(stop.reason, flush=True)
with stop.handled() if sys.argv[1] == "handled" else nullcontext():
    threading.Thread(target=show, daemon=True).start()
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
    with stuck("handled") as process:
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


def test_signal_that_comes_while_the_pipe_is_made_or_closed_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[int] = []
    original = signal.signal(signal.SIGUSR1, lambda number, frame: before.append(number))
    install = signal.signal

    def install_and_raise(number: signal.Signals, handler: Any) -> Any:
        before_it = install(number, handler)
        signal.raise_signal(number)
        return before_it

    try:
        monkeypatch.setattr(signal, "signal", install_and_raise)
        pipe = SignalPipe([signal.SIGUSR1])
        assert pipe.wait(0) == [signal.SIGUSR1] and not before
        pipe.close()
        assert before == [signal.SIGUSR1]
    finally:
        install(signal.SIGUSR1, original)


def test_closing_does_not_wait_for_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longstride.launcher.stops._POLL_SECONDS", 60.0)
    stop, before = StopFlag(), time.monotonic()
    stop.listen()
    stop.close()
    assert time.monotonic() - before < 30.0


def test_stop_that_the_first_rank_alone_is_told_waits_until_all_have_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("longstride.launcher.stops.end_now", ended.append)
    monkeypatch.setattr("longstride.launcher.stops._POLL_SECONDS", 0.01)
    file, stop, polls = StopFile(tmp_path / ".stop-1"), StopFlag(), threading.Semaphore(0)
    file.write("SIGTERM")
    stop.add_source(lambda: polls.release(), handled_only=True)  # type: ignore[func-returns-value]
    stop.add_source(file, handled_only=True)
    stop.listen()
    try:
        assert all(polls.acquire(timeout=10) for _ in range(3))
        assert stop.reason is None
        with stop.handled():
            assert all(polls.acquire(timeout=10) for _ in range(3 + 3))
            assert stop.reason == "SIGTERM"
        assert ended == []
        file.write(LEAVE_AT_ONCE)
        assert all(polls.acquire(timeout=10) for _ in range(6))
    finally:
        stop.close()
    assert exit_codes.STOPPED in ended


@pytest.mark.campaign
def test_time_limit_stops_a_run_saved(config_file: Path, tmp_path: Path) -> None:
    arguments = ["--config", str(config_file), "train.steps=100000", "train.max_seconds=20", "train.evaluate_every=0"]
    ended = spawn(arguments, 2)
    assert ended.codes == [exit_codes.REQUEUE] * 2, ended.stderr
    assert "longstride: stopped by train.max_seconds=20; " in ended.stderr[0]
    progress = read_progress(tmp_path / "run")
    assert progress.saved == progress.recorded
