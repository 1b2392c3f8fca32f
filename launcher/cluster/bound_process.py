"""`python bound_process.py PID COMMAND …`: becomes the command, which is told to end when process PID does.

Run as a file, and for that moment alone: setting it between fork and exec would have to be done by a process that has
threads. Linux only; elsewhere it is the command and no more.
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
            sys.exit(1)  # it has ended already
    os.execv(command[0], command)
