"""worker.py as the file that launchers start: a whole rank, from its first import on."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

from longstride.launcher.stops import StopFlag  # noqa: E402  the path comes first

if __name__ == "__main__":
    stop = StopFlag()
    stop.listen()  # as train.py does before its heavy imports
    from tests.harness.processes import worker

    worker.work(sys.argv[1:], stop)
