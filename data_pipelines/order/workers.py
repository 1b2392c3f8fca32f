"""Processes that read ahead, and what becomes of one that is killed or stands still.

Torch's loader tells of a killed worker by an error in the midst of whatever its rank computes, and waits for a stopped
one for ever. Here a rank finds either where it takes from that worker, and nowhere else, so that it can save.
"""

import atexit
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from longstride.data_pipelines.errors import DataError

_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0  # in which a killed process is gone
Item = TypeVar("Item")


class LostWorkerError(Exception):
    """A process that reads ahead was ended, or sent nothing in time. Nothing is known to be wrong with the data."""


def side_by_side(
    sources: Sequence[Callable[[], Iterator[Item]]], ahead: int, timeout_seconds: float
) -> Generator[list[Item], None, None]:
    """Steps of one item from each source, in their order; each source is a process of its own.

    A process makes at most so many items ``ahead``. Closing ends all of them, stopped ones too.

    Raises:
        DataError: as a source does.
        RuntimeError: any other error of a source, with its traceback.
        LostWorkerError: a process is gone, or sends nothing for ``timeout_seconds``.
    """
    workers: list[_Worker[Item]] = []
    try:
        for number, source in enumerate(sources):
            workers.append(_Worker(number, source, ahead, [worker.connection for worker in workers]))
        for worker in workers:  # only now: a process is not forked from among threads that read for another
            worker.listen()
        while True:
            yield [worker.take(timeout_seconds) for worker in workers]
    finally:
        for worker in workers:
            worker.end()


class _Worker(Generic[Item]):
    """A process that makes items as they are asked for, and the thread of this one that takes them from it."""

    def __init__(
        self, number: int, source: Callable[[], Iterator[Item]], ahead: int, others: Sequence[Connection]
    ) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self._ahead = ahead
        self._thread: threading.Thread | None = None
        self._received: queue.SimpleQueue[Item | Exception | None] = queue.SimpleQueue()  # None: the process is gone
        arguments = (source, theirs, [*others, self.connection], os.getpid())
        self._process = multiprocessing.Process(
            target=_serve, args=arguments, daemon=True, name=f"loader worker {number}"
        )
        self._process.start()
        atexit.register(self._process.kill)  # it ignores what multiprocessing would end it by
        theirs.close()  # so that the process alone holds it, and its end is that of the connection

    def listen(self) -> None:
        """Asks for the first items, and takes what comes from now on."""
        for _ in range(self._ahead):
            self._ask()
        # A thread, for an item that comes by half is waited for without a time-out.
        self._thread = threading.Thread(target=self._receive, daemon=True, name=self._process.name)
        self._thread.start()

    def take(self, timeout_seconds: float) -> Item:
        """The next item; raises as ``side_by_side`` does."""
        waited, last = 0.0, time.monotonic()
        while True:
            try:
                item = self._received.get(timeout=min(_LOOK_SECONDS, timeout_seconds))
                break
            except queue.Empty:
                now = time.monotonic()
                # Where this process was stopped as well, that time is not the other's.
                waited, last = waited + min(now - last, 2 * _LOOK_SECONDS), now
            if waited >= timeout_seconds:
                what = f"sent nothing for {timeout_seconds:g} s: it is stopped, or its store stands still"
                raise LostWorkerError(f"{self._name} {what}")
        if item is None:
            self._process.join(_END_SECONDS)
            code = self._process.exitcode
            how = "left" if code is None or code >= 0 else f"was ended by {signal.Signals(-code).name}"
            hint = ", as where memory is short" if code == -signal.SIGKILL else ""
            raise LostWorkerError(f"{self._name} {how}{hint}")
        if isinstance(item, Exception):
            raise item
        self._ask()
        return item

    def end(self) -> None:
        """Ends the process at once."""
        self._process.kill()  # the one signal that ends a stopped process too
        self._process.join(_END_SECONDS)
        atexit.unregister(self._process.kill)
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        self.connection.close()

    @property
    def _name(self) -> str:
        return f"{self._process.name} (process {self._process.pid})"

    def _ask(self) -> None:
        with suppress(OSError):  # it is gone, which ``take`` will find
            self.connection.send_bytes(b"1")

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._received.put(self.connection.recv())
        self._received.put(None)


def _serve(
    source: Callable[[], Iterator[Item]], connection: Connection, others: Sequence[Connection], parent: int
) -> None:
    """What the process does: an item for each message, until an error, or until the process that asks is gone."""
    # What asks a run to stop reaches its whole group of processes; a worker is needed until its rank has saved.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for each in others:  # a copy that is held here would hide the end of another process
        each.close()
    items = source()
    with suppress(EOFError, OSError):
        while True:
            while not connection.poll(_LOOK_SECONDS):
                if os.getppid() != parent:
                    return
            connection.recv_bytes()
            item: Item | Exception
            try:
                item = next(items)
            except DataError as error:
                item = error
            except Exception:
                item = RuntimeError(f"in {multiprocessing.current_process().name}:\n{traceback.format_exc()}")
            connection.send(item)
            if isinstance(item, Exception):
                return
