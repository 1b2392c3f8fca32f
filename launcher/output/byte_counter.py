"""A line on a terminal that counts bytes up; nothing where standard error is no terminal."""

from __future__ import annotations

import sys
import time

_EVERY_SECONDS = 0.2


class ByteCounter:
    """Counts to ``total``."""

    def __init__(self, total: int) -> None:
        self._total, self._shown = total, sys.stderr.isatty()
        self._next = time.monotonic() + _EVERY_SECONDS

    def at(self, number: int) -> None:
        """So many are done."""
        if self._shown and time.monotonic() >= self._next:
            print(f"\r{number:,} of {self._total:,} bytes", end="", file=sys.stderr, flush=True)
            self._next = time.monotonic() + _EVERY_SECONDS

    def end(self) -> None:
        """Take the line away: what follows says what came of it."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
