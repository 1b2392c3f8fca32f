"""Processes that read ahead for a rank, each its own share of every step; and how the rank learns of their ends.

A worker shares a socket with its rank, and nothing with other workers: one that is killed or stopped in the midst of a
message holds no lock and spoils no queue. A thread of the rank receives what a worker sends, so that the rank itself
never waits in a read that does not end. What had arrived of a worker's shares is still taken after its death; only then
is it missed. Nothing is raised in the midst of what the rank computes.

A worker that fetches a large shard brings nothing for long and is not lost: it tells that it writes what comes. How
slowly that may come is the store's to say.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from longstride.data_pipelines.errors import DataError

Share = TypeVar("Share")
_FORK = multiprocessing.get_context("fork")
_LOOK_SECONDS = 1.0  # a rank that was stopped itself, or whose machine slept, has waited for no more than that
_END_SECONDS = 5.0  # for a killed process to be gone; one that a dead disk holds takes longer, and is left behind
_SET_PDEATHSIG = 1  # prctl(2)


class LostWorkerError(RuntimeError):
    """A worker was killed, or has brought nothing for so long that it must be stopped: no mistake of the user."""


class _Failure(NamedTuple):
    """What a worker sends in place of a share that it cannot read."""

    error: Exception
    stack: str


class _Fetching(NamedTuple):
    """What a worker sends while it writes to its cache, so that the rank waits on."""


class Workers(Generic[Share]):
    """As many processes as there are shares, which are read there, each ``prefetch`` items ahead of those taken.

    ``shares``: endless iterators; none has been begun, and none is to be used here.
    """

    def __init__(self, shares: Sequence[Iterator[Share]], prefetch: int, timeout_seconds: float) -> None:
        self._owner = os.getpid()
        self._workers: list[_Worker[Share]] = []
        atexit.register(self.close)  # multiprocessing would ask them to end by a signal that they ignore, and wait
        try:
            for number, share in enumerate(shares):
                name = f"loader worker {number + 1} of {len(shares)}"
                elsewhere = [each.connection for each in self._workers]
                self._workers.append(_Worker(name, share, prefetch, timeout_seconds, elsewhere))
        except OSError:  # so many are not to be had
            self.close()
            raise
        for worker in self._workers:  # only now: a fork is best done by a process of few threads
            worker.receiving.start()

    def take(self) -> list[Share]:
        """The next item of each share.

        Raises:
            LostWorkerError: a worker is gone, or brought nothing and fetched nothing for ``timeout_seconds``.
            Exception: what the reading of a share raised.
        """
        return [worker.take() for worker in self._workers]

    def close(self) -> None:
        """Ends the processes at once, stopped ones too."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:  # a copy in a forked process
            return
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.close()
        self._workers.clear()


class _Worker(Generic[Share]):
    """One process, as its rank has it."""

    def __init__(
        self, name: str, share: Iterator[Share], prefetch: int, timeout_seconds: float, elsewhere: list[Connection]
    ) -> None:
        self._timeout = timeout_seconds
        self.connection, theirs = _FORK.Pipe()
        # The system would end it with the thread that forked it, and only the main thread lives as long as its process.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        arguments = (share, prefetch, theirs, [self.connection, *elsewhere], parent, timeout_seconds / 4)
        self.process = _FORK.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()  # the socket ends with the worker
        self._name = f"{name} (process {self.process.pid})"
        self._received: queue.SimpleQueue[Share | _Failure | _Fetching | None] = queue.SimpleQueue()
        self.receiving = threading.Thread(target=self._receive, daemon=True, name=name)

    def take(self) -> Share:
        """The next item; raises as ``Workers.take`` does."""
        item = self._awaited()
        if item is None:
            self.process.join(_END_SECONDS)
            raise LostWorkerError(f"{self._name} {_ending(self.process.exitcode)}")
        if isinstance(item, _Failure):
            if isinstance(item.error, DataError):
                raise item.error
            raise item.error from RuntimeError(f"in {self._name}:\n{item.stack}")
        with suppress(OSError):  # it is gone, which is found once what it has sent is taken
            self.connection.send_bytes(b"+")
        return item

    def close(self) -> None:
        """Waits for the end of the killed process, and lets go of it."""
        self.process.join(_END_SECONDS)
        if self.process.exitcode is not None and self.receiving.ident is not None:
            self.receiving.join()
            self.connection.close()

    def _awaited(self) -> Share | _Failure | None:
        """What has come from the process; None: it is gone. Raises LostWorkerError where nothing comes in time."""
        waited = 0.0
        while waited < self._timeout:
            piece = min(_LOOK_SECONDS, self._timeout - waited)
            try:
                item = self._received.get(timeout=piece)
            except queue.Empty:
                waited += piece
                continue
            if not isinstance(item, _Fetching):
                return item
            waited = 0.0
        rule = "is stopped, or its disk or store does not answer; data.worker_timeout_seconds says how long to wait"
        raise LostWorkerError(f"{self._name} has brought nothing for {self._timeout:g} s: it {rule}")

    def _receive(self) -> None:
        """What the receiving thread does: it hands on what comes, to the end of it."""
        while True:
            try:
                item = self.connection.recv()
            except (EOFError, OSError):
                item = None
            except Exception as error:  # of a class that cannot be rebuilt
                item = _Failure(error, traceback.format_exc())
            self._received.put(item)
            if item is None or isinstance(item, _Failure):
                return


def _ending(code: int | None) -> str:
    """How a process came to its end, in words."""
    if code is None:
        return "has closed its connection"
    if code >= 0:
        return f"ended with exit code {code}"
    cause = "; the system does so where memory runs out" if code == -signal.SIGKILL else ""
    name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")  # some have none
    return f"was ended by {name}{cause}"


def _work(
    share: Iterator[Share],
    prefetch: int,
    connection: Connection,
    of_rank: Sequence[Connection],
    parent: int | None,
    beat_seconds: float,
) -> None:
    """What a worker does, as long as its rank lives."""
    # What asks a run to stop reaches its whole group of processes; a worker is needed until its rank has saved.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if parent is not None and sys.platform == "linux":  # a stopped worker does not see the end of its socket
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            return
    for each in of_rank:  # else the socket would not end with the rank
        each.close()
    lock = threading.Lock()  # a message is sent whole
    threading.Thread(target=_tell_of_fetches, args=(connection, lock, beat_seconds), daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the rank is gone
        for sent in count():
            if sent >= prefetch:
                connection.recv_bytes()  # an item was taken
            try:
                item: Share | _Failure = next(share)
            except Exception as error:
                item = _Failure(error, traceback.format_exc())
            with lock:
                connection.send(item)
            if isinstance(item, _Failure):
                return


def _tell_of_fetches(connection: Connection, lock: threading.Lock, seconds: float) -> None:
    """What a thread of a worker does: whenever this process has written anything meanwhile, it tells its rank."""
    with suppress(OSError):  # the rank is gone, or the system does not count
        written = _written_bytes()
        while True:
            time.sleep(seconds)
            if _written_bytes() > written:
                with lock:
                    connection.send(_Fetching())
            written = _written_bytes()  # what was just sent is no progress


def _written_bytes() -> int:
    """All that this process has written so far, by Linux's count. Raises OSError where there is none."""
    counts = Path("/proc/self/io").read_bytes().splitlines()
    return int(dict(line.split(b": ") for line in counts)[b"wchar"])
