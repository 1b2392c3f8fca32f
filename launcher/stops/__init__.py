"""Stopping a run: signals, time limits, stop files and a dead launcher ask for it, and all ranks stop together.

Imports neither torch nor deepspeed nor numpy: a rank listens for signals before it imports them, which takes seconds.
"""

from longstride.launcher.stops.reasons import LEAVE_AT_ONCE, LauncherGone, StopFile, TimeIsUp
from longstride.launcher.stops.stop_flag import SIGNALS, SignalPipe, StopAskedError, StopFlag, stopped_at_once
