"""Output that a run outlives: a terminal that was closed, or a reader that has gone, costs no training."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_GONE = (errno.EIO, errno.EPIPE)


class LastingOutput:
    """A text stream that is silent once nobody is left to read it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

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
        if error.errno not in _GONE:
            raise error
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Has standard output and error be such for the block."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = LastingOutput(sys.stdout), LastingOutput(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
