"""Standard output and standard error that a run outlives: closed, full, or never read.

A pipe that nobody empties, or a terminal that was halted by Ctrl-S, holds whoever writes to it for ever, and with a
rank its whole run. So a thread writes, and whoever prints waits for it in a measured way: a reader that reads sees
every line at once and in order, one that stalls costs a run two seconds, and then a hundredth of its time.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_CLOSED = (errno.EIO, errno.EPIPE)
_PATIENCE_SECONDS = 2.0  # that writers wait for a reader that stalls
_PATIENCE_GROWTH = 0.01  # of the time that passes: with it patience comes back
_STALL_SECONDS = 5.0  # at the end: a reader that has taken nothing for so long is not waited for
_END_SECONDS = 10.0  # at the end, for one that reads slowly
_MOST_BYTES = 2**20  # that wait for a reader; what comes then is left out, and counted
_BLOCK_BYTES = 2**13  # that a stream without lines keeps until it is flushed
_AT_ONCE_BYTES = 4096  # written at once: pipes take so many whole, so that lines of several processes do not mix


class LastingOutput:
    """A text stream that nobody waits long for; ``dropped``: the numbers of the errors that it passes over.

    A stream without a file, as a test may put in place, is written to at once.
    """

    def __init__(self, stream: TextIO, dropped: tuple[int, ...] = _CLOSED) -> None:
        self._stream, self._dropped = stream, dropped
        self._file: int | None = None
        with suppress(OSError, ValueError, AttributeError):
            self._file = stream.fileno()
        self._begin()

    def _begin(self) -> None:
        """Nothing waits: at the start, and in a forked process, which has no thread and whose lines are its own."""
        self._changed = threading.Condition()  # reentrant: a signal's handler may print while its thread prints
        self._text: list[str] = []  # of a line that has not ended
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._left_out = self._given = self._written = 0
        self._writes = False  # whether a thread does
        self._failure: OSError | None = None
        self._patience, self._measured = _PATIENCE_SECONDS, time.monotonic()
        self._moved = self._measured  # when the reader last took something, or had taken all there was
        self._pid = os.getpid()  # last: another thread of a forked process would wait for the lock of its parent

    def write(self, text: str) -> int:
        """Writes the text; returns 0 where it was dropped."""
        if self._file is None:
            return self._at_once(lambda: self._stream.write(text))
        with self._own():
            self._text.append(text)
            # Unbuffered as well, as launchers start ranks: so that a line stays whole.
            ends = "\n" in text and (self._stream.line_buffering or getattr(self._stream, "write_through", False))
            if ends or sum(map(len, self._text)) >= _BLOCK_BYTES:
                kept = self._give()
                self._wait_patiently()
                return len(text) if kept else 0
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes the lines, which the stream's own method would put past those that wait."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Waits until all is written, but not for long."""
        if self._file is None:
            self._at_once(lambda: self._stream.flush() or 0)
            return
        with self._own():
            self._give()
            self._wait_patiently()

    def settle(self) -> None:
        """Waits until all is written, for as long as its reader reads: before the process ends."""
        if self._file is None:
            self._at_once(lambda: self._stream.flush() or 0)
            return
        with self._own():
            self._give()
            end = time.monotonic() + _END_SECONDS
            while self._writes and (left := min(end, self._moved + _STALL_SECONDS) - time.monotonic()) > 0:
                self._changed.wait(left)
            self._raise_failure()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _own(self) -> threading.Condition:
        """The lock of this process's lines."""
        if self._pid != os.getpid():
            self._begin()
        return self._changed

    def _give(self) -> bool:
        """Hands the text to the thread that writes; returns False where it is left out, as too much waits."""
        parts, self._text = self._text, []  # at once: a signal's handler that prints here would give them too
        text = "".join(parts)
        content = text.encode(self._stream.encoding, self._stream.errors or "strict")
        if not content:
            return True
        if self._waiting_bytes and self._waiting_bytes + len(content) > _MOST_BYTES:
            self._left_out += text.count("\n")
            return False
        self._add(self._note() + content)
        if not self._writes:
            self._moved = time.monotonic()
            threading.Thread(target=self._write_on, daemon=True, name="output").start()  # it waits for the lock
            self._writes = True
        return True

    def _add(self, content: bytes) -> None:
        self._waiting += (content[at : at + _AT_ONCE_BYTES] for at in range(0, len(content), _AT_ONCE_BYTES))
        self._waiting_bytes += len(content)
        self._given += len(content)

    def _note(self) -> bytes:
        """A line about those that were left out, if any were."""
        count, self._left_out = self._left_out, 0
        lines = f"{count:,} line{'s are' if count > 1 else ' is'}"
        return f"longstride: {lines} not shown: nothing read them in time\n".encode() if count else b""

    def _wait_patiently(self) -> None:
        """Waits until what was given is written, as long as patience lasts."""
        begun = time.monotonic()
        patience = min(_PATIENCE_SECONDS, self._patience + (begun - self._measured) * _PATIENCE_GROWTH)
        target, end = self._given, begun + patience
        while self._written < target and (left := end - time.monotonic()) > 0:
            self._changed.wait(left)
        self._measured = time.monotonic()
        self._patience = max(0.0, end - self._measured)
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write_on(self) -> None:
        """Writes until nothing waits: a thread that ends then."""
        while True:
            with self._changed:
                if not self._waiting:
                    self._add(self._note())
                if not self._waiting:
                    self._writes = False
                    self._changed.notify_all()
                    return
                content = self._waiting.popleft()
            failure = self._write_content(content)
            with self._changed:
                self._waiting_bytes -= len(content)
                self._written += len(content)
                self._moved = time.monotonic()
                self._failure = failure or self._failure
                self._changed.notify_all()

    def _write_content(self, content: bytes) -> OSError | None:
        """Writes bytes to the file, however long that takes; returns an error that is not passed over."""
        assert self._file is not None
        try:
            while content:
                try:
                    content = content[os.write(self._file, content) :]
                except BlockingIOError:  # another process that has the file does not wait
                    ready = select.poll()
                    ready.register(self._file, select.POLLOUT)
                    ready.poll()
        except OSError as error:
            return None if error.errno in self._dropped else error
        return None

    def _at_once(self, work: Callable[[], int]) -> int:
        try:
            return work()
        except OSError as error:
            if error.errno not in self._dropped:
                raise
            return 0


def settle_output() -> None:
    """Waits until standard output and standard error are written, for as long as their readers read."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, LastingOutput):
            stream.settle()
        else:
            stream.flush()


@contextmanager
def lasting_output() -> Iterator[None]:
    """Keeps a closed terminal, a reader that has gone, and a full disk from ending the block; one that stalls, from
    holding it.

    A full disk costs standard error its lines. On standard output, which carries a verb's result, it stays an error.
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
