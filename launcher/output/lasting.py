"""Standard output and standard error that cannot stop a run, even if they are closed, full, or never read.

Writing to a pipe that nobody reads, or to a terminal halted by Ctrl-S, blocks for ever, and a blocked rank blocks its
run. So a thread writes, and printing only waits for it within a budget. An active reader sees every line at once and
in order. A stalled one costs the run two seconds, and then a hundredth of its time.
"""

from __future__ import annotations

import errno
import math
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_CLOSED = (errno.EIO, errno.EPIPE)
_PATIENCE_SECONDS = 2.0  # budget of a printing thread for a stalled reader
_PATIENCE_GROWTH = 0.01  # share of the passing time by which the budget recovers
_STALL_SECONDS = 5.0  # at the end: a reader that took nothing for so long is given up
_END_SECONDS = 10.0  # at the end, for a slow reader
_MOST_BYTES = 2**20  # in the queue; further lines are dropped and counted
_BLOCK_BYTES = 2**13  # buffered by a stream without line buffering until it is flushed
_AT_ONCE_BYTES = 4096  # pipes write so many atomically, so that lines of several processes do not mix


class LastingOutput:
    """A text stream that never blocks for long; ``dropped`` are the errno values of errors that it ignores."""

    def __init__(self, stream: TextIO, dropped: tuple[int, ...] = _CLOSED) -> None:
        self._stream, self._dropped = stream, dropped
        self._file: int | None = None  # a stream in memory, as in tests, has none
        with suppress(OSError, ValueError, AttributeError):
            self._file = stream.fileno()
        self._reset()

    def _reset(self) -> None:
        """Begin with an empty queue: at the start, and in a forked process, which has no writing thread."""
        self._changed = threading.Condition()  # reentrant: a signal handler may print while its thread prints
        self._text: list[str] = []  # the unfinished line
        self._queue: deque[bytes] = deque()
        self._dropped_lines = self._accepted = self._written = 0
        self._has_thread = False
        self._failure: OSError | None = None
        self._patience, self._measured = _PATIENCE_SECONDS, time.monotonic()
        self._moved = self._measured  # when the reader last took something, or had taken everything
        self._pid = os.getpid()  # last: another thread of a forked process would wait for the lock of its parent

    def write(self, text: str) -> int:
        """Write the text; return 0 if it was dropped."""
        with self._lock():
            self._text.append(text)
            # Lines are kept together on unbuffered streams too, with which launchers start ranks.
            has_lines = self._file is None or self._stream.line_buffering or getattr(self._stream, "write_through", 0)
            if ("\n" in text and has_lines) or sum(map(len, self._text)) >= _BLOCK_BYTES:
                is_accepted = self._enqueue()
                self._wait_within_budget()
                return len(text) if is_accepted else 0
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the lines behind those in the queue; the stream's own method would overtake them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Wait until everything is written, but not for long."""
        with self._lock():
            self._enqueue()
            self._wait_within_budget()

    def settle(self) -> None:
        """Wait until everything is written, as long as the reader reads. Call it before the process ends."""
        with self._lock():
            self._enqueue()
            self._wait(_END_SECONDS, _STALL_SECONDS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lock(self) -> threading.Condition:
        """Return the lock of this process; a forked process gets a new one."""
        if self._pid != os.getpid():
            self._reset()
        return self._changed

    def _enqueue(self) -> bool:
        """Pass the text to the writing thread; return False if it is dropped because the queue is full."""
        parts, self._text = self._text, []  # before anything else: a signal handler that prints would repeat them
        text = "".join(parts)
        content = text.encode(self._stream.encoding or "utf-8", self._stream.errors or "strict")
        if not content:
            return True
        num_waiting = self._accepted - self._written
        if num_waiting and num_waiting + len(content) > _MOST_BYTES:
            self._dropped_lines += text.count("\n")
            return False
        if not num_waiting:
            self._moved = time.monotonic()
        self._add(self._note() + content)
        if not self._has_thread:
            threading.Thread(target=self._write_queue, daemon=True, name="output").start()  # it waits for the lock
            self._has_thread = True
        return True

    def _add(self, content: bytes) -> None:
        self._queue += (content[at : at + _AT_ONCE_BYTES] for at in range(0, len(content), _AT_ONCE_BYTES))
        self._accepted += len(content)

    def _note(self) -> bytes:
        """Return a line about the dropped lines, if there are any."""
        count, self._dropped_lines = self._dropped_lines, 0
        lines = f"{count:,} line{'s are' if count > 1 else ' is'}"
        return f"longstride: {lines} not shown: nothing read them in time\n".encode() if count else b""

    def _wait_within_budget(self) -> None:
        begin = time.monotonic()
        patience = min(_PATIENCE_SECONDS, self._patience + (begin - self._measured) * _PATIENCE_GROWTH)
        try:
            self._wait(patience, math.inf)
        finally:
            self._measured = time.monotonic()
            self._patience = max(0.0, begin + patience - self._measured)

    def _wait(self, seconds: float, stall_seconds: float) -> None:
        """Wait until the accepted text is written, or no longer than this, or than the reader may take nothing."""
        target, end = self._accepted, time.monotonic() + seconds
        while self._written < target and (left := min(end, self._moved + stall_seconds) - time.monotonic()) > 0:
            self._changed.wait(left)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write_queue(self) -> None:
        """Write until the queue is empty; then the thread ends."""
        while True:
            with self._changed:
                if not self._queue:
                    self._add(self._note())
                if not self._queue:
                    self._has_thread = False
                    return
                content = self._queue.popleft()
            failure: OSError | None = None
            try:
                self._write_all(content)
            except OSError as error:
                failure = None if error.errno in self._dropped else error
            with self._changed:
                self._written += len(content)
                self._moved = time.monotonic()
                self._failure = failure or self._failure
                self._changed.notify_all()

    def _write_all(self, content: bytes) -> None:
        """Write to the file, however long it takes."""
        if self._file is None:
            self._stream.write(content.decode(self._stream.encoding or "utf-8", "replace"))
            self._stream.flush()
            return
        while content:
            try:
                content = content[os.write(self._file, content) :]
            except BlockingIOError:  # another process made the file non-blocking
                select.select([], [self._file], [])


def settle_output() -> None:
    """Wait until standard output and standard error are written, as long as their readers read."""
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "settle", stream.flush)()


@contextmanager
def nonblocking_output() -> Iterator[None]:
    """Make the block survive a closed terminal, a lost or stalled reader, and a full disk.

    On a full disk standard error loses its lines. On standard output, which carries a verb's result, it is an error.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        LastingOutput(sys.stdout),
        LastingOutput(sys.stderr, (*_CLOSED, errno.ENOSPC, errno.EDQUOT)),
    )
    try:
        yield
    finally:
        try:
            settle_output()
        finally:
            sys.stdout, sys.stderr = streams
