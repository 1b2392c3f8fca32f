"""`longstride` for tests: the command itself, with launched_worker.py in place of train.py."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

from longstride.launcher.stops import stopped_at_once  # noqa: E402  the path comes first

if __name__ == "__main__":
    with stopped_at_once():  # as the command does before its heavy imports
        import longstride.launcher.cli as cli
        import longstride.launcher.train as train

        train.__file__ = str(Path(__file__).with_name("launched_worker.py"))
        sys.exit(cli.main(sys.argv[1:]))
