"""The flag by which a rank knows that it should stop; it travels to all ranks with the next batch.

No signal handler saves anything: the ranks get a signal at different moments, or only one of them gets it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import psutil

from longstride.launcher.output import exit_codes, say
from longstride.launcher.stops.reasons import LEAVE_AT_ONCE

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_SAME_STOP_SECONDS = 5.0  # one stop may send several signals: from the terminal, and from the launcher that got it too
_POLL_SECONDS = 0.5


class StopAskedError(Exception):
    """Raised on every rank at the step after which the run stops, to be resumed later."""


class StopFlag:
    """Whether this process has been asked to stop, and why; a thread of its own listens.

    ``reason``: None until a stop is asked for. The first reason stays.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._sources: list[tuple[Callable[[], str | None], bool]] = []
        self._signals: SignalPipe | None = None
        self._first_signal: float | None = None
        self._handled = self._closed = False
        self._lock = threading.Lock()

    def listen(self) -> None:
        """Takes over ``SIGNALS`` from here on. For the main thread; a second call changes nothing."""
        if self._signals is None:
            self._signals = SignalPipe(SIGNALS)
            self._thread = threading.Thread(target=self._watch, args=(self._signals,), daemon=True, name="stop")
            self._thread.start()

    def close(self) -> None:
        """Ends the thread and gives the signals back."""
        if self._signals is not None:
            self._closed = True
            self._thread.join()
            self._signals.close()
            self._signals = None

    def add_source(self, source: Callable[[], str | None], *, handled_only: bool = False) -> None:
        """Polls a function that returns a reason to stop, or None; the listening thread calls it.

        ``handled_only``: a reason waits until the run is inside ``handled``. For a reason that this rank alone learns:
        if it left before the ranks have met, the others would wait for it until their time-out.
        """
        self._sources.append((source, handled_only))

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Inside, the training loop handles stops. Before it, or once it has failed, a stop exits by 75 at once."""
        with self._lock:
            self._handled = True
        try:
            yield
        except BaseException:
            with self._lock:
                self._handled = False
            raise

    def ask(self, reason: str) -> None:
        """Asks this process to stop. It ends at once where there is nothing to save yet."""
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
    """Catches signals and hands them to a thread through a pipe; made and closed in the main thread.

    Python runs its handlers between two bytecodes of the main thread, so never while that waits in a collective. It
    writes a signal's number to the wake-up pipe at once.
    """

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._numbers = {number for number in numbers if not _stays_ignored(number)}
        # The pipe before the handlers: a signal that had its handler, and no pipe yet, would be lost.
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # Handlers that do nothing: Python writes a signal to the pipe only where it has one.
        self._handlers_before = {number: signal.signal(number, lambda *_: None) for number in self._numbers}

    def wait(self, seconds: float) -> list[signal.Signals]:
        """The signals that came, in order; empty after so many seconds. One thread at a time may wait."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        received = os.read(self._reader, 4096) if ready else b""
        # Handlers of other code write their numbers to the same pipe.
        return [signal.Signals(number) for number in received if number in self._numbers]

    def close(self) -> None:
        """Restores the handlers from before."""
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reader)
        os.close(self._writer)


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Inside, a signal that asks for a stop exits by code 75: no run has been started yet."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        say(f"stopped by {signal.Signals(number).name}; there was nothing to save")
        sys.exit(exit_codes.REQUEUE)

    before = {number: signal.signal(number, leave) for number in SIGNALS if not _stays_ignored(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_now(code: int) -> NoReturn:
    """Ends this process and its children, whatever their threads are doing."""
    for child in psutil.Process().children(recursive=True):  # loader workers ignore the signals that ask for a stop
        with suppress(psutil.Error):
            child.kill()
    os._exit(code)


def _stays_ignored(number: signal.Signals) -> bool:
    """Whether this process was started with the signal ignored: nohup does so with SIGHUP."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
