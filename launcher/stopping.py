"""A stop that all ranks agree on: a signal sets a flag, which travels with the next batch.

Nothing is saved in a handler: the ranks get a signal at different moments, or one of them alone.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from launcher import exit_codes

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_ONE_STOP_SECONDS = 5.0  # a stop may come as several signals: from the terminal, and from the launcher that got it too


class StopAskedError(Exception):
    """Every rank knows that the run is to stop here, and is to be gone on with later."""


class StopFlag:
    """Whether this process has been asked to stop."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._since = 0.0

    def asked(self) -> bool:
        """Whether it has."""
        return self.reason is not None

    def listen(self) -> None:
        """Takes the signals that ask for a stop; one that comes later again has the process leave at once."""
        for number in SIGNALS:
            signal.signal(number, self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.reason is None:
            self.reason, self._since = signal.Signals(number).name, now
        elif now - self._since > _ONE_STOP_SECONDS:
            os._exit(exit_codes.STOPPED)
