"""How a mistake of a person is told: one line a problem, no traceback, exit code 2."""

from __future__ import annotations

import os
import sys
import time

EXIT_WRONG_INPUT = 2
_FIRST_REPORTS_SECONDS = 30.0  # long enough for a slow start; the launcher ends all ranks once the first has ended


def is_wrong_input(error: ValueError) -> bool:
    """Whether a person can mend it: a ConfigError or a DataError, looked up only where its room is loaded already."""
    families = (("kernels.errors", "ConfigError"), ("data_pipelines.errors", "DataError"))
    return any(isinstance(error, getattr(sys.modules[room], name)) for room, name in families if room in sys.modules)


def report(error: ValueError) -> int:
    """Tells the problems on standard error; returns the exit code.

    The ranks find the same problems at the same time. Those after the first wait until the launcher ends them, and
    speak only if the first had nothing to say.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_FIRST_REPORTS_SECONDS)
    for line in str(error).splitlines():
        print(f"longstride: error: {line}", file=sys.stderr, flush=True)
    return EXIT_WRONG_INPUT
