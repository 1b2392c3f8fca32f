"""`python -I bound_process.py PID COMMAND …` executes the command, which gets SIGTERM when process PID ends.

This is a separate program because `longstride train` has threads: such a process must not run Python between fork and
exec. It replaces itself by the command at once. On systems other than Linux it binds nothing.
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
            sys.exit(1)  # the parent ended before the call
    os.execv(command[0], command)
