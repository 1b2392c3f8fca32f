"""Output that a run outlives: a closed terminal, a reader that has gone, or a full log disk costs no training."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_GONE = (errno.EIO, errno.EPIPE)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LastingOutput:
    """A text stream that is silent once nobody is left to read it; ``passed``: the errors that are passed over."""

    def __init__(self, stream: TextIO, passed: tuple[int, ...] = _GONE) -> None:
        self._stream, self._passed = stream, passed

    def write(self, text: str) -> int:
        """Writes, if there still is somewhere to."""
        try:
            return self._stream.write(text)
        except OSError as error:
            return self._lost(error)

    def flush(self) -> None:
        """Flushes, likewise."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> int:
        if error.errno not in self._passed:
            raise error
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Has standard output and error be such for the block.

    A full disk costs the log its lines, and no more; but a result that was asked for and cannot be written is an error.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = LastingOutput(sys.stdout), LastingOutput(sys.stderr, _GONE + _FULL)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
