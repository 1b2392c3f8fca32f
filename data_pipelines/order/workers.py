"""Processes that prefetch for a rank, each its own share of every step, and the detection of their failures.

A worker shares a socket with its rank, and nothing with other workers. If it is killed or stopped during a message, no
lock stays locked and no queue is corrupted. A thread of the rank receives its messages, so the rank itself never blocks
in an endless read. Shares that arrived before a worker died are still used, and the error is raised after them, in
``take``.

A worker that fetches a large shard sends no share for a long time. It is waited for while it writes to the cache, by
Linux's count of a process's bytes. The store limits how slow a fetch may be.
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
_LOOK_SECONDS = 1.0  # longest single wait: only so much counts if the rank was stopped or the machine slept
_END_SECONDS = 5.0  # wait for the end of a killed process; one that is blocked by a dead disk is abandoned
_SET_PDEATHSIG = 1  # prctl(2)


class LostWorkerError(RuntimeError):
    """A worker was killed, or has sent nothing for so long that it must be stopped. This is not the user's mistake."""


class _Failure(NamedTuple):
    """A message of a worker that cannot read its share."""

    error: Exception
    stack: str


class Workers(Generic[Share]):
    """A process per share, which reads up to ``prefetch`` items ahead.

    ``shares`` are endless iterators that have not started. The caller must not use them.
    """

    def __init__(self, shares: Sequence[Iterator[Share]], prefetch: int, timeout_seconds: float) -> None:
        self._owner = os.getpid()
        self._workers: list[_Worker[Share]] = []
        atexit.register(self.close)  # multiprocessing would send a signal that they ignore, and wait
        try:
            for number, share in enumerate(shares):
                name = f"loader worker {number + 1} of {len(shares)}"
                connections = [worker.connection for worker in self._workers]
                self._workers.append(_Worker(name, share, prefetch, timeout_seconds, connections))
        except OSError:  # the system has no room for so many
            self.close()
            raise
        for worker in self._workers:  # after all forks, as forking with many threads is risky
            worker.receiving.start()

    def take(self) -> list[Share]:
        """Return the next item of each share.

        Raises:
            LostWorkerError: a worker died, or has sent and fetched nothing for ``timeout_seconds``.
            Exception: the error of reading a share.
        """
        return [worker.take() for worker in self._workers]

    def close(self) -> None:
        """Kill the processes, stopped ones too."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:  # a copy in a forked process
            return
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.close()
        self._workers.clear()


class _Worker(Generic[Share]):
    """The rank's side of one worker process."""

    def __init__(
        self, name: str, share: Iterator[Share], prefetch: int, timeout_seconds: float, connections: list[Connection]
    ) -> None:
        self._timeout = timeout_seconds
        self.connection, remote_end = _FORK.Pipe()
        # prctl ends the worker with the thread that forked it, and only the main thread lives as long as its process.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        arguments = (share, prefetch, remote_end, [self.connection, *connections], parent)
        self.process = _FORK.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        remote_end.close()  # so that the socket closes with the worker
        self._name = f"{name} (process {self.process.pid})"
        self._received: queue.SimpleQueue[Share | _Failure | None] = queue.SimpleQueue()
        self.receiving = threading.Thread(target=self._receive, daemon=True, name=name)

    def take(self) -> Share:
        item = self._wait_for_item()
        if item is None:
            self.process.join(_END_SECONDS)
            code = self.process.exitcode
            end = f"ended with exit code {code}"
            if code is None:
                end = "has closed its connection"
            elif code < 0:
                name = next((name for name in signal.Signals if name == -code), None)  # some have no name
                end = f"was ended by {name.name if name else f'signal {-code}'}"
                end += "; the system does so when memory runs out" if code == -signal.SIGKILL else ""
            raise LostWorkerError(f"{self._name} {end}")
        if isinstance(item, _Failure):
            if isinstance(item.error, DataError):
                raise item.error
            raise item.error from RuntimeError(f"in {self._name}:\n{item.stack}")
        with suppress(OSError):  # it died; this is reported after the items that it has sent
            self.connection.send_bytes(b"+")
        return item

    def close(self) -> None:
        """Wait for the end of the killed process, and release it."""
        self.process.join(_END_SECONDS)
        if self.process.exitcode is not None and self.receiving.ident is not None:
            self.receiving.join()
            self.connection.close()

    def _wait_for_item(self) -> Share | _Failure | None:
        """Return the next item or failure; None if the process died. Raises LostWorkerError after the time-out."""
        if not self._received.empty():
            return self._received.get()
        waited, written = 0.0, self._written_bytes()
        while waited < self._timeout:
            seconds = min(_LOOK_SECONDS, self._timeout - waited)
            with suppress(queue.Empty):
                return self._received.get(timeout=seconds)
            waited, before = waited + seconds, written
            written = self._written_bytes()
            if written > before:
                waited = 0.0
        rule = "is stopped, or its disk or store does not answer; data.worker_timeout_seconds says how long to wait"
        raise LostWorkerError(f"{self._name} has delivered nothing for {self._timeout:g} s: it {rule}")

    def _written_bytes(self) -> int:
        """Return the bytes that the process has written, by Linux's count; 0 without a count."""
        with suppress(OSError):
            counts = Path(f"/proc/{self.process.pid}/io").read_bytes().splitlines()
            return int(dict(line.split(b": ") for line in counts)[b"wchar"])
        return 0

    def _receive(self) -> None:
        """Receive messages until the connection ends; a thread runs this."""
        while True:
            try:
                item = self.connection.recv()
            except (EOFError, OSError):
                item = None
            except Exception as error:  # its class cannot be unpickled
                item = _Failure(error, traceback.format_exc())
            self._received.put(item)
            if item is None or isinstance(item, _Failure):
                return


def _work(
    share: Iterator[Share],
    prefetch: int,
    connection: Connection,
    rank_connections: Sequence[Connection],
    parent: int | None,
) -> None:
    """Run a worker process, as long as its rank lives."""
    # Signals that stop a run reach its whole process group, and the rank needs its workers until it has saved.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if parent is not None and sys.platform == "linux":  # a stopped worker does not notice that its socket closed
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            return
    for inherited in rank_connections:  # otherwise the sockets would not close with the rank
        inherited.close()
    with suppress(EOFError, ConnectionError):  # the rank died
        for sent in count():
            if sent >= prefetch:
                connection.recv_bytes()  # an item was taken
            try:
                item: Share | _Failure = next(share)
            except Exception as error:
                item = _Failure(error, traceback.format_exc())
            connection.send(item)
            if isinstance(item, _Failure):
                return
