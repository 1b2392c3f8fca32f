"""Stopping a run: signals, time limits, stop files and a dead launcher ask for it, and all ranks stop together.

A stop travels to all ranks with the next batch. No signal handler saves anything: signals reach the ranks at different
moments, or reach only one of them. This module imports neither torch nor DeepSpeed nor NumPy, because a rank listens
for signals while it imports those.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from longstride.data_pipelines.durable import write_over
from longstride.data_pipelines.plain_files import open_plain, read_plain
from longstride.launcher.output import exit_codes, say

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_SAME_STOP_SECONDS = 5.0  # one stop may send several signals: from the terminal, and from the launcher that got it too
_POLL_SECONDS = 0.5
LEAVE_AT_ONCE = "leave at once"  # the reason in a stop file by which ranks leave without saving
_MOST_REASON_BYTES = 1000
_LAUNCH = "deepspeed.launcher.launch"
_RUNNERS = ("deepspeed", "sshd")  # in the command line of the process that started launch
_MOST_LINKS = 4  # launch, a shell or two, the runner


class StopRequestedError(Exception):
    """Raised on every rank at the step after which the run stops, to be resumed later."""


class StopFlag:
    """Records whether and why this process should stop; a thread polls signals and other sources.

    ``reason`` is None until a stop is requested. The first reason stays.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._sources: list[tuple[Callable[[], str | None], bool]] = []
        self._signals: SignalPipe | None = None
        self._first_signal: float | None = None
        self._handled = self._closed = False
        self._lock = threading.Lock()

    def listen(self) -> None:
        """Catch ``SIGNALS`` from now on. Call it in the main thread; a second call does nothing."""
        if self._signals is None:
            self._signals = SignalPipe(SIGNALS)
            self._thread = threading.Thread(target=self._watch, args=(self._signals,), daemon=True, name="stop")
            self._thread.start()

    def close(self) -> None:
        """End the thread and restore the signal handlers."""
        if self._signals is not None:
            self._closed = True
            self._signals.wake()
            self._thread.join()
            self._signals.close()
            self._signals = None

    def add_source(self, source: Callable[[], str | None], *, handled_only: bool = False) -> None:
        """Poll a function that returns a reason to stop, or None; the listening thread calls it.

        With ``handled_only`` a reason has no effect until the run is inside ``handled``. Use it for a reason that only
        this rank sees: if it left before the ranks have met, the others would wait for it until their time-out.
        """
        self._sources.append((source, handled_only))

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Mark the block in which the training loop handles stops. Elsewhere a stop exits with code 75 at once."""
        with self._lock:
            self._handled = True
        try:
            yield
        except BaseException:
            with self._lock:
                self._handled = False
            raise

    def ask(self, reason: str) -> None:
        """Request a stop of this process. It ends at once if there is nothing to save yet."""
        with self._lock:
            if self.reason is None:
                self.reason = reason
            if not self._handled:
                if os.environ.get("RANK", "0") == "0":
                    say(f"stopped by {self.reason}; there was nothing to save")
                end_now(exit_codes.REQUEUE)

    def _watch(self, signals: SignalPipe) -> None:
        while not self._closed:
            for number in signals.wait(_POLL_SECONDS):
                if self._first_signal is None:
                    self._first_signal = time.monotonic()
                elif time.monotonic() - self._first_signal > _SAME_STOP_SECONDS:
                    end_now(exit_codes.STOPPED)
                self.ask(number.name)
            for source, handled_only in self._sources:
                reason = source()
                if reason == LEAVE_AT_ONCE:
                    end_now(exit_codes.STOPPED)
                if reason is not None and self.reason is None and (self._handled or not handled_only):
                    self.ask(reason)


class SignalPipe:
    """Catches signals and passes them to a thread through a pipe. Create and close it in the main thread.

    Python runs its handlers between two bytecodes of the main thread, so never while that waits in a collective. But
    it writes a signal's number to the wake-up pipe at once.
    """

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._numbers = {number for number in numbers if not _stays_ignored(number)}
        # The pipe comes before the handlers: a signal that is handled before there is a pipe would be lost.
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # The handlers do nothing, but Python writes only handled signals to the pipe.
        self._handlers_before = {number: signal.signal(number, lambda *_: None) for number in self._numbers}

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Wait for signals and return them in order; empty after ``seconds``. Only one thread may wait at a time."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        received = os.read(self._reader, 4096) if ready else b""
        # Signals that other code handles are written to the same pipe.
        return [signal.Signals(number) for number in received if number in self._numbers]

    def wake(self) -> None:
        """End ``wait`` in another thread."""
        os.write(self._writer, b"\0")  # no signal has this number

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reader)
        os.close(self._writer)


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Exit with code 75 if a stop signal arrives inside the block: no run has been started yet."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        say(f"stopped by {signal.Signals(number).name}; there was nothing to save")
        sys.exit(exit_codes.REQUEUE)

    previous = {number: signal.signal(number, leave) for number in SIGNALS if not _stays_ignored(number)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_now(code: int) -> NoReturn:
    """End this process and its children, whatever their threads are doing."""
    for child in psutil.Process().children(recursive=True):  # loader workers ignore stop signals
        with suppress(psutil.Error):
            child.kill()
    os._exit(code)


def _stays_ignored(number: signal.Signals) -> bool:
    """Whether this process was started with the signal ignored, as nohup does with SIGHUP."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def time_is_up(max_seconds: float, started: float | None) -> Callable[[], str | None]:
    """Return a stop source for a run that may last for ``train.max_seconds``.

    ``started`` is its start by ``time.time()``; None means that of this process.
    """
    started = started or psutil.Process().create_time()
    end = time.monotonic() + started + max_seconds - time.time()  # setting the system's clock must not move it
    return lambda: f"train.max_seconds={max_seconds:g}" if time.monotonic() >= end else None


class StopFile:
    """Stop source: a file in the run folder that holds the reason. It reaches rank 0 on hosts that no signal reaches.

    Its name belongs to one launch, so that a leftover file stops no other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun = path.with_name(f"{path.name}.begun")
        self._made_folder = False

    def __call__(self) -> str | None:
        """Return the reason in the file, or None."""
        try:
            if self.path not in self.path.parent.iterdir():  # NFS caches a look-up of one file, but not a listing
                return None
            return read_plain(self.path, _MOST_REASON_BYTES, follow_links=False).decode().strip() or None
        except (OSError, UnicodeDecodeError):
            return None

    def write(self, reason: str) -> None:
        """Request a stop; print a line if the file cannot be written."""
        try:
            self._made_folder = self._made_folder or not self.path.parent.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_over(self.path, reason.encode())
        except OSError as error:
            say(f"{self.path}: {error.strerror}; only processes on this host can be stopped")

    def mark_begun(self) -> None:
        """Show the launcher that the run now takes steps, so that a stop has something to save."""
        with suppress(OSError):  # on a full disk a stop may lose the steps since the last checkpoint
            open_plain(self._begun, "ab", follow_links=False).close()

    def has_begun(self) -> bool:
        """Whether the run has called ``mark_begun``, on whatever host."""
        try:
            return self._begun in self.path.parent.iterdir()  # a listing, as above
        except OSError:
            return False

    def remove(self) -> None:
        """Remove the file, and the run folder too if ``write`` created it and it is still empty."""
        with suppress(OSError):  # the folder is not empty: a run has begun there
            self._begun.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
            if self._made_folder:
                self.path.parent.rmdir()


class LauncherGone:
    """Stop source: a process between this rank and its launcher has ended.

    On one host DeepSpeed starts runner → launch → ranks; under pdsh, ssh's server → shell → launch → ranks. A signal
    that kills the runner does not reach the others, so each rank watches all the links above it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # Without RANK a user started this process from a shell, which may end first.
        self._links = _links_to_launcher() if "RANK" in environment else []

    def __call__(self) -> str | None:
        for child, parent in self._links:
            with suppress(psutil.Error):
                if psutil.Process(child).ppid() == parent:
                    continue
            return "the end of its launcher"
        return None


def _links_to_launcher() -> list[tuple[int, int]]:
    """Find (process, parent) for each link from this process up to DeepSpeed's runner or ssh's server.

    The chain ends below an unknown process: it may be the user's shell, and a run outlives that.
    """
    chain = [psutil.Process(), *psutil.Process().parents()]
    links = [(child.pid, parent.pid) for child, parent in itertools.pairwise(chain)]
    if not links or not _command_line_holds(chain[1], (_LAUNCH,)):
        return links[:1]  # torchrun, srun or mpirun
    if len(chain) == 3 and not _command_line_holds(chain[2], _RUNNERS):
        return [(chain[1].pid, -1)]  # launch is an orphan of process 1: its runner died before this rank started
    for number in range(2, min(len(chain), _MOST_LINKS + 1)):
        # The command line of pdsh's shell contains that of launch, and so the word deepspeed.
        if _command_line_holds(chain[number], _RUNNERS) and not _command_line_holds(chain[number], (_LAUNCH,)):
            return links[:number]
    return links[:2]


def _command_line_holds(process: psutil.Process, words: tuple[str, ...]) -> bool:
    with suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return any(word in line for word in words)
    return False
