"""A stop that all ranks agree on: a signal, a time or a file sets a flag, which travels with the next batch.

Nothing is saved in a handler: the ranks get a signal at different moments, or one of them alone. Imports nothing heavy:
a rank listens before it imports torch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from longstride.launcher.output import exit_codes
from longstride.launcher.stops.signals import SignalPipe, is_hushed

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
LEAVE_AT_ONCE = "leave at once"  # in a stop file
_ONE_STOP_SECONDS = 5.0  # a stop may come as several signals: from the terminal, and from the launcher that got it too
_LOOK_SECONDS = 0.5  # between looks at what else may ask for a stop


class StopAskedError(Exception):
    """Every rank knows that the run is to stop here, and is to be gone on with later."""


class StopFlag:
    """Whether this process has been asked to stop; a thread of its own listens."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.since = 0.0  # by time.monotonic(), once there is a reason
        self._sources: list[tuple[Callable[[], str | None], bool]] = []
        self._signals: SignalPipe | None = None
        self._signalled: float | None = None
        self._held = self._closed = False
        self._lock = threading.Lock()

    def asked(self) -> bool:
        """Whether it has."""
        return self.reason is not None

    def listen(self) -> None:
        """Takes the signals that ask for a stop, from here on. In the main thread; again changes nothing."""
        if self._signals is None:
            self._signals = SignalPipe(SIGNALS)
            self._thread = threading.Thread(target=self._watch, args=(self._signals,), daemon=True, name="stop")
            self._thread.start()

    def close(self) -> None:
        """Listens no more."""
        if self._signals is not None:
            self._closed = True
            self._thread.join()
            self._signals.close()
            self._signals = None

    def look(self, source: Callable[[], str | None], *, held_only: bool = False) -> None:
        """Asks a function again and again whether there is a reason to stop, in the listening thread.

        ``held_only``: the reason waits for ``held``. For one that this rank alone is told: if it left before the ranks
        have met, the others would wait for it until the time-out.
        """
        self._sources.append((source, held_only))

    @contextmanager
    def held(self) -> Iterator[None]:
        """A stop is for the code inside to see; before it there is nothing to save, and the process ends at once by 75.

        So it does where the code failed. Where it has come to its end, the process is about to.
        """
        with self._lock:
            self._held = True
        try:
            yield
        except BaseException:
            with self._lock:
                self._held = False
            raise

    def ask(self, reason: str) -> None:
        """Asks for a stop; the first reason is kept."""
        with self._lock:
            if self.reason is None:
                self.reason, self.since = reason, time.monotonic()
            if not self._held:
                if os.environ.get("RANK", "0") == "0":
                    _tell(f"longstride: stopped by {self.reason}; there was nothing to save")
                end_now(exit_codes.REQUEUE)

    def _watch(self, signals: SignalPipe) -> None:
        while not self._closed:
            for number in signals.wait(_LOOK_SECONDS):
                self._take(number)
            for source, held_only in self._sources:
                reason = source()
                if reason == LEAVE_AT_ONCE:
                    end_now(exit_codes.STOPPED)
                if reason is not None and self.reason is None and (self._held or not held_only):
                    self.ask(reason)

    def _take(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._signalled is None:
            self._signalled = now
        elif now - self._signalled > _ONE_STOP_SECONDS:
            end_now(exit_codes.STOPPED)
        self.ask(number.name)


class TimeIsUp:
    """A reason to stop once a process has lived for ``train.max_seconds``; ``started``: by time.time()."""

    def __init__(self, max_seconds: float, started: float) -> None:
        # A clock that is set must not move the end.
        self._max_seconds, self._end = max_seconds, time.monotonic() + started + max_seconds - time.time()

    def __call__(self) -> str | None:
        return f"train.max_seconds={self._max_seconds:g}" if time.monotonic() >= self._end else None


class StopFile:
    """A wish to stop that reaches rank 0 where no signal does: a file in the run folder that holds the reason.

    Its name is of one run alone, so that one left behind stops nobody.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made_folder = False

    def __call__(self) -> str | None:
        """The reason in it; None while it is not there."""
        try:
            if self.path not in self.path.parent.iterdir():  # for which NFS asks its server, unlike for the file alone
                return None
            return self.path.read_text(encoding="utf-8").strip() or None
        except OSError:
            return None

    def write(self, reason: str) -> None:
        """Asks for a stop; a disk that is full or gone cannot carry the wish."""
        try:
            self._made_folder = self._made_folder or not self.path.parent.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_name(f"{self.path.name}.partial")
            partial.write_text(reason, encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            _tell(f"longstride: {self.path}: {error.strerror}; only processes on this host are told to stop")

    def remove(self) -> None:
        """Takes it away, and the run folder if it made that and nothing else came into it."""
        with suppress(OSError):  # a run began there
            self.path.unlink(missing_ok=True)
            if self._made_folder:
                self.path.parent.rmdir()


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Ends the program by the code of a stop where nothing has been started yet that could be stopped otherwise."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        _tell(f"longstride: stopped by {signal.Signals(number).name}; there was nothing to save")
        sys.exit(exit_codes.REQUEUE)

    before = {each: signal.signal(each, leave) for each in SIGNALS if not is_hushed(each)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def end_now(code: int) -> NoReturn:
    """Ends this process and its children, whatever their threads are doing."""
    import psutil

    for child in psutil.Process().children(recursive=True):  # loader workers, which ignore what would ask them to end
        with suppress(psutil.Error):
            child.kill()
    os._exit(code)


def _tell(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone, which may be why
        print(line, file=sys.stderr, flush=True)
