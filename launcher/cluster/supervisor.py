"""One launch under `longstride train`: the wish to stop is handed on, and no process of it is left behind.

The deepspeed launcher cannot be asked to stop: told by a signal, it dies and leaves the ranks alone, or kills them 30
seconds later. So it is not told. It runs in a session of its own, where Ctrl-C does not reach it, and the wish goes
past it: to the ranks on this host as a signal, and to the first rank, wherever it is, by a file in the run folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from longstride.launcher.cluster import bound_process
from longstride.launcher.cluster.process_tree import adopt_orphans, descendants, kill_all, local_ranks, reap_adopted
from longstride.launcher.output import exit_codes
from longstride.launcher.stops import LEAVE_AT_ONCE, SIGNALS, SignalPipe, StopFile

_SAME_PRESS_SECONDS = 0.5  # signals within it are one: a shell and a scheduler may both send theirs
_ENDING_SECONDS = 10.0  # that a launcher may take to end what it started on other hosts
_ALONE_FACTOR, _ALONE_SECONDS = 2.0, 60.0  # a collective's time-outs that ranks may take to save without a launcher
_LARGEST = 64  # number of a signal
_SSH_FAILED = 255  # or lost its host


@dataclass(frozen=True, slots=True)
class Launch:
    """What starts the ranks."""

    command: list[str]
    environment: dict[str, str]
    stop_file: Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended."""

    code: int  # of launcher/exit_codes.py
    told: str  # in words


class Wish:
    """What this process has been asked by signals, and hands on to whatever it runs."""

    def __init__(self, signals: SignalPipe) -> None:
        self._signals = signals
        self.asked: signal.Signals | None = None
        self.at_once = False
        self._since = 0.0

    def listen(self, seconds: float) -> bool:
        """Waits for a signal so long; whether the wish is new or has changed."""
        changed = False
        for number in self._signals.wait(seconds):
            now = time.monotonic()
            if number == signal.SIGCHLD:
                continue
            if self.asked is None:
                self.asked, self._since, changed = number, now, True
                _say("stopping at the next step; again to leave at once")
            elif not self.at_once and now - self._since > _SAME_PRESS_SECONDS:
                self.at_once = changed = True
        return changed


@contextmanager
def supervised_signals() -> Iterator[SignalPipe]:
    """Those that ask for a stop, and that of a child that has ended."""
    signals = SignalPipe((*SIGNALS, signal.SIGCHLD))
    try:
        yield signals
    finally:
        signals.close()


def supervise(launch: Launch, wish: Wish, timeout_seconds: float, is_done: Callable[[], bool]) -> Outcome:
    """Runs a launch to its end, and returns once no process of it is left on this host.

    ``is_done``: whether the run folder holds all that the run was to do; a launcher that was killed says nothing else.
    """
    adopt_orphans()
    file = StopFile(launch.stop_file)
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-I", str(bound_process.__file__), str(os.getpid()), *launch.command]
    child = subprocess.Popen(command, env=launch.environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while child.poll() is None and not wish.at_once:
            if wish.listen(1.0):
                _hand_on(wish, file)
            reap_adopted(child.pid)
        if wish.at_once:
            _end(child, file)
            return Outcome(exit_codes.STOPPED, "left at once")
        # Above 0 is what the part that watches the ranks says, which has ended them.
        left_alone = child.returncode <= 0 and bool(local_ranks())
        if left_alone:
            _say("the launcher was killed; the processes save and end by themselves")
            _wait_alone(child, wish, file, alone_seconds(timeout_seconds))
        if wish.at_once:
            return Outcome(exit_codes.STOPPED, "left at once")
        return outcome(child.returncode, wish.asked, whole=not left_alone and is_done(), left_alone=left_alone)
    finally:
        kill_all(child.pid)
        child.wait()
        file.remove()


def alone_seconds(timeout_seconds: float) -> float:
    """How long ranks that have lost their launcher may take to save and end, for a time-out of their collectives."""
    return _ALONE_FACTOR * timeout_seconds + _ALONE_SECONDS


def outcome(code: int, asked: signal.Signals | None, *, whole: bool, left_alone: bool = False) -> Outcome:
    """What the launcher's exit code means. ``code``: negative where a signal ended it; ``asked``: to stop by one.

    DeepSpeed's launcher turns a rank killed by signal n into 256 - n, shells and mpirun into 128 + n; and it ends by 0
    where the part of it that watches the ranks was killed.
    """
    if left_alone or code < 0:
        return Outcome(exit_codes.REQUEUE if asked else exit_codes.HUNG, "the launcher was killed")
    if code == exit_codes.DONE:
        if whole:
            return Outcome(exit_codes.DONE, "done")
        return Outcome(exit_codes.HUNG, "the launcher ended before the run had")
    if code == exit_codes.HUNG:
        return Outcome(code, "a process was lost, or a collective took too long")
    if code in exit_codes.DOCUMENTED:
        return Outcome(code, f"code {code}")
    if code == _SSH_FAILED:  # also 256 - 1, which cannot be told from it
        return Outcome(exit_codes.HUNG, f"code {code}: a host was lost, or a process was ended by SIGHUP")
    killed_by = next((n for n in (256 - code, code - 128) if 0 < n <= _LARGEST), None)
    if killed_by is None:
        return Outcome(exit_codes.UNFORESEEN, f"code {code}")
    if asked is not None and killed_by in (asked, signal.SIGTERM):
        return Outcome(exit_codes.REQUEUE, "stopped before it could listen; there was nothing to save")
    return Outcome(exit_codes.HUNG, f"code {code}: a process was ended by {_signal_name(killed_by)}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _hand_on(wish: Wish, file: StopFile) -> None:
    """Tells the ranks, once."""
    if wish.at_once or wish.asked is None:
        return
    file.write(wish.asked.name)
    for rank in local_ranks():
        with suppress(psutil.Error):
            rank.send_signal(wish.asked)


def _end(child: subprocess.Popen[bytes], file: StopFile) -> None:
    """Ends everything now; what runs elsewhere by the launcher's own means, and by the first rank's leaving."""
    _say("leaving at once")
    file.write(LEAVE_AT_ONCE)
    ranks = {each.pid for each in local_ranks()}
    for each in descendants():
        if each.pid not in ranks:
            with suppress(psutil.Error):
                each.terminate()
    end = time.monotonic() + _ENDING_SECONDS
    while child.poll() is None and time.monotonic() < end:
        time.sleep(0.05)


def _wait_alone(child: subprocess.Popen[bytes], wish: Wish, file: StopFile, seconds: float) -> None:
    """Lets ranks that have lost their launcher save and end."""
    end = time.monotonic() + seconds
    while local_ranks() and time.monotonic() < end and not wish.at_once:
        if wish.listen(0.5):
            _hand_on(wish, file)
        reap_adopted(child.pid)


def _say(line: str) -> None:
    print(f"longstride: {line}", file=sys.stderr, flush=True)
