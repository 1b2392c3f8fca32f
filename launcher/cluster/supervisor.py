"""Supervise one launch under `longstride train`: forward stops to the ranks, and leave no process behind.

The deepspeed launcher has no orderly stop. A signal kills it and orphans the ranks, or makes it kill them 30 seconds
later. Therefore it gets no signal: it runs in its own session, which Ctrl-C does not reach. A stop goes directly to the
ranks: by a signal on this host, and by a stop file in the run folder to rank 0 on any host.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from longstride.launcher.cluster import bound_process
from longstride.launcher.output import exit_codes, say
from longstride.launcher.stops import LEAVE_AT_ONCE, SIGNALS, SignalPipe, StopFile

_SAME_STOP_SECONDS = 0.5  # a shell and a scheduler may both send a signal for the same stop
_LAUNCHER_END_SECONDS = 10.0  # for a launcher to end what it started on other hosts
_KILL_SECONDS = 30.0  # for the system to end processes that were killed
_LARGEST_SIGNAL = 64
_SET_CHILD_SUBREAPER = 36  # prctl(2)
# A rank's environment has one of these. SLURM's variables do not count, as its batch scripts have them too.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that starts the ranks, its environment, and the stop file for rank 0."""

    command: list[str]
    environment: dict[str, str]
    stop_file: Path
    elsewhere: bool = False  # on other hosts, where only the launcher can end processes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended."""

    code: int  # one of exit_codes
    description: str
    ended_before_first_step: bool = False  # a stop came before the first step of the launch
    has_begun: bool = field(default=False, compare=False)  # whether the run took steps


class StopRequest:
    """A stop by the user or a scheduler: the first signal, and whether another one asked to leave without saving."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.at_once = False
        self._signals = SignalPipe((*SIGNALS, signal.SIGCHLD))  # SIGCHLD ends the wait when a child ends
        self._since = 0.0
        self._is_announced = False

    def listen(self, seconds: float) -> bool:
        """Wait for a signal for at most so long; return whether the request is new or has changed."""
        changed = False
        for number in self._signals.wait(seconds):
            now = time.monotonic()
            if number == signal.SIGCHLD:
                continue
            if self.signal is None:
                self.signal, self._since, changed = number, now, True
            elif not self.at_once and now - self._since > _SAME_STOP_SECONDS:
                self.at_once = changed = True
        return changed

    def tell(self) -> None:
        """Tell the user once that a stop has come. Call it after forwarding the stop: the terminal may be slow."""
        if self.signal is not None and not self._is_announced:
            self._is_announced = True
            say("stopping at the next step; interrupt again to leave at once")

    def close(self) -> None:
        """Restore the former signal handlers."""
        self._signals.close()


def supervise(launch: Launch, request: StopRequest, timeout_seconds: float, is_done: Callable[[], bool]) -> Outcome:
    """Run a launch to its end; return once none of its processes is left on this host.

    ``timeout_seconds`` is that of the run's collectives. ``is_done`` says whether the run folder has the last step: a
    launcher also exits with 0 if the part of it that watches the ranks was killed.
    """
    if sys.platform == "linux":  # orphaned descendants become children of this process, not of process 1
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    file = StopFile(launch.stop_file)
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-I", str(bound_process.__file__), str(os.getpid()), *launch.command]
    child = subprocess.Popen(command, env=launch.environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while child.poll() is None and not request.at_once:
            if _attend(1.0, request, file, child.pid):
                return _end_unbegun(launch, child, file)
        if request.at_once:
            _end_launcher(child, file, "leaving at once")
            return Outcome(exit_codes.STOPPED, "left at once")
        # With an exit code above 0 the launcher itself has ended its ranks.
        orphaned = child.returncode <= 0 and bool(local_ranks())
        if orphaned:
            say("the launcher was killed; the processes save and end by themselves")
            end = time.monotonic() + orphan_seconds(timeout_seconds)
            while local_ranks() and time.monotonic() < end and not request.at_once:
                if _attend(0.5, request, file, child.pid):
                    return _end_unbegun(launch, child, file)
        if request.at_once:
            return Outcome(exit_codes.STOPPED, "left at once")
        done = not orphaned and is_done()
        ended = outcome_of(child.returncode, request.signal, is_done=done, orphaned=orphaned)
        return replace(ended, has_begun=file.has_begun())
    finally:
        end = time.monotonic() + _KILL_SECONDS
        while (alive := _descendants()) and time.monotonic() < end:  # also those that they start meanwhile
            for process in alive:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.02)
            _reap_adopted(child.pid)
        child.wait()
        file.remove()


def orphan_seconds(timeout_seconds: float) -> float:
    """Return how long ranks without a launcher may take to save and end, for a time-out of their collectives."""
    return 2 * timeout_seconds + 60.0


def outcome_of(code: int, stopped_by: signal.Signals | None, *, is_done: bool, orphaned: bool = False) -> Outcome:
    """Interpret a launcher's exit code, which is negative if a signal ended it; ``orphaned`` if it left ranks behind.

    DeepSpeed's launcher reports a rank that signal n killed as 256 - n, shells and mpirun as 128 + n.
    """
    if orphaned or code < 0:
        return Outcome(exit_codes.REQUEUE if stopped_by else exit_codes.HUNG, "the launcher was killed")
    if code == exit_codes.DONE:
        if is_done:
            return Outcome(exit_codes.DONE, "done")
        return Outcome(exit_codes.HUNG, "the launcher ended before the run had")
    if code == exit_codes.HUNG:
        return Outcome(code, "a process was lost, or a collective took too long")
    if code in exit_codes.DOCUMENTED:
        return Outcome(code, f"code {code}")
    if code == exit_codes.SSH_FAILED:  # 256 - 1, for SIGHUP, is the same number
        return Outcome(exit_codes.HUNG, f"code {code}: a host was lost, or a process was ended by SIGHUP")
    killed_by = next((number for number in (256 - code, code - 128) if 0 < number <= _LARGEST_SIGNAL), None)
    if killed_by is None:
        return Outcome(exit_codes.UNFORESEEN, f"code {code}")
    if stopped_by is not None and killed_by in (stopped_by, signal.SIGTERM):
        return Outcome(exit_codes.REQUEUE, "stopped before it could listen; there was nothing to save")
    name = {number.value: number.name for number in signal.Signals}.get(killed_by, f"signal {killed_by}")
    return Outcome(exit_codes.HUNG, f"code {code}: a process was ended by {name}")


def _attend(seconds: float, request: StopRequest, file: StopFile, child_pid: int) -> bool:
    """Wait for a signal and forward a stop to the ranks; a stop at once is left to ``_end_launcher``.

    Returns whether a stop came before the first step. It is not forwarded, as no rank has anything to save.
    """
    if request.listen(seconds) and request.signal is not None and not request.at_once:
        if not file.has_begun():
            return True
        file.write(request.signal.name)
        for rank in local_ranks():
            with suppress(psutil.Error):
                rank.send_signal(request.signal)
        request.tell()
    _reap_adopted(child_pid)
    return False


def _end_unbegun(launch: Launch, child: subprocess.Popen[bytes], file: StopFile) -> Outcome:
    """End a launch before its first step. Imports and compilers do not react to a stop, and a kill loses nothing."""
    if launch.elsewhere:
        _end_launcher(child, file, "stopping before the first step")
    return Outcome(exit_codes.REQUEUE, "stopped before the first step", ended_before_first_step=True)


def _end_launcher(child: subprocess.Popen[bytes], file: StopFile, message: str) -> None:
    """Make all ranks leave without saving: rank 0 by the stop file, those on other hosts by the launcher."""
    file.write(LEAVE_AT_ONCE)
    ranks = {rank.pid for rank in local_ranks()}
    for process in _descendants():
        if process.pid not in ranks:
            with suppress(psutil.Error):
                process.terminate()
    say(message)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_LAUNCHER_END_SECONDS)


def local_ranks() -> list[psutil.Process]:
    """Return the ranks among this process's descendants, without the processes that they have started."""
    ranks: dict[int, psutil.Process] = {}
    parents: dict[int, int] = {}
    for process in _descendants():
        with suppress(psutil.Error):
            if not {*process.environ()}.isdisjoint(_RANK_VARIABLES) and not _ignores_stops(process.pid):
                ranks[process.pid], parents[process.pid] = process, process.ppid()
    return [process for pid, process in ranks.items() if parents[pid] not in ranks]


def _ignores_stops(pid: int) -> bool:
    """Whether a process ignores SIGTERM. Loader workers do; they inherit the environment of their rank."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    ignored = next((int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")), 0)
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


def _descendants() -> list[psutil.Process]:
    """Return every process below this one that has not ended; on Linux also those whose parents have ended."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                alive.append(process)
    return alive


def _reap_adopted(child_pid: int) -> None:
    """Collect adopted processes that have ended. The launcher's own status is left for ``Popen`` to read."""
    while sys.platform == "linux":
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == child_pid:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)
