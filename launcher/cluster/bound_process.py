"""`python -I bound_process.py PID COMMAND …` becomes the command, and gets SIGTERM when process PID ends.

This is a program of its own: `longstride train` has threads, and such a process must run no Python between fork and
exec. It stands in place of the command for a moment only. On systems other than Linux it binds nothing.
"""

import ctypes
import os
import signal
import sys

_SET_PDEATHSIG = 1  # prctl(2)

if __name__ == "__main__":
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)  # it ended before it could be bound to
    os.execv(command[0], command)
