"""Readers that stall: files to write to that are full, open at their other end, and never read."""

from __future__ import annotations

import os
import pty
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

STALLED: dict[str, Callable[[], tuple[int, int]]] = {"pipe": os.pipe, "terminal": pty.openpty}  # to read, to write

_SETTLED_MILLISECONDS = 100


@contextmanager
def stalled(kind: str) -> Iterator[int]:
    """Yield the writing end of one of STALLED. A writer waits until the block ends."""
    reader, writer = STALLED[kind]()
    os.set_blocking(writer, False)
    room = select.poll()
    room.register(writer, select.POLLOUT)
    while room.poll(_SETTLED_MILLISECONDS):  # a terminal makes room when it has moved what was written
        with suppress(BlockingIOError):
            os.write(writer, b"x" * 512)
    os.set_blocking(writer, True)
    try:
        yield writer
    finally:
        os.close(reader)
        os.close(writer)
