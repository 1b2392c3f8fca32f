"""A stop that all ranks agree on: what asks for one, and how a run hears it.

Imports neither torch nor deepspeed, so that a run listens before the seconds that those take.
"""

from longstride.launcher.stops.ancestors import LauncherGone
from longstride.launcher.stops.signals import SignalPipe
from longstride.launcher.stops.stopping import (
    LEAVE_AT_ONCE,
    SIGNALS,
    StopAskedError,
    StopFile,
    StopFlag,
    TimeIsUp,
    stopped_at_once,
)

__all__ = [
    "LEAVE_AT_ONCE",
    "SIGNALS",
    "LauncherGone",
    "SignalPipe",
    "StopAskedError",
    "StopFile",
    "StopFlag",
    "TimeIsUp",
    "stopped_at_once",
]
