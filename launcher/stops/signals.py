"""Signals as numbers from a pipe: they are seen whatever the main thread is doing.

Python's own handlers run between two bytecodes of the main thread, so never while it waits in a collective.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from types import FrameType


class SignalPipe:
    """Takes signals in place of what they would do; made, and closed, in the main thread."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._numbers = {each for each in numbers if not is_hushed(each)}
        # The pipe first: a signal that has its handler already, and no pipe yet, would be lost.
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {each: signal.signal(each, _pass) for each in self._numbers}

    def wait(self, seconds: float) -> list[signal.Signals]:
        """The signals that have come, in their order; none after so many seconds. By any one thread."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        taken = os.read(self._reader, 4096) if ready else b""
        return [signal.Signals(each) for each in taken if each in self._numbers]  # others' handlers write there too

    def close(self) -> None:
        """Lets the signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reader)
        os.close(self._writer)


def is_hushed(number: signal.Signals) -> bool:
    """Whether a signal was ignored from the start and is to stay so: nohup does it with SIGHUP."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _pass(number: int, frame: FrameType | None) -> None:
    """Python writes to the pipe only for signals that have a handler of its own kind."""
