"""How a mistake of a person is told: one line a problem, no traceback, exit code 2."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from longstride.launcher.output.exit_codes import WRONG_INPUT

_FIRST_REPORTS_SECONDS = 30.0  # long enough for a slow start; the launcher ends all ranks once the first has ended
_FULL_OR_FORBIDDEN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # told by a write, which knows no name


class AgreedError(ValueError):
    """A mistake that every rank knows of, whoever found it: the first rank tells it for all."""


def is_wrong_input(error: Exception) -> bool:
    """Whether a person can mend it: a ConfigError, a DataError, or a file that cannot be read or written.

    The families are looked up only where their room is loaded already.
    """
    if isinstance(error, OSError):
        return error.strerror is not None and (error.filename is not None or error.errno in _FULL_OR_FORBIDDEN)
    if isinstance(error, AgreedError):
        return True
    families = (("longstride.kernels.errors", "ConfigError"), ("longstride.data_pipelines.errors", "DataError"))
    return any(isinstance(error, getattr(sys.modules[room], name)) for room, name in families if room in sys.modules)


def report(error: Exception) -> int:
    """Tells the problems on standard error; returns the exit code.

    The ranks find the same problems at the same time. Those after the first wait until the launcher ends them, and
    speak only if the first had nothing to say.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_FIRST_REPORTS_SECONDS)
    _tell(error)
    return WRONG_INPUT


@contextmanager
def told_at_once(meet: Callable[[], None]) -> Iterator[None]:
    """Ends this rank by exit code 2 for a mistake found inside, which may meet one rank alone, such as a bad sample.

    It is told before the other ranks, left alone in a collective, can bring the run down. What all ranks have agreed on
    is told once, and all leave together: ``meet`` waits for the others.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if not is_wrong_input(error):
            raise
        if not isinstance(error, AgreedError) or os.environ.get("RANK", "0") == "0":
            _tell(error)
        if isinstance(error, AgreedError):
            meet()  # a launcher ends all ranks once one has ended: not before the first has spoken
        sys.exit(WRONG_INPUT)


def tell_passed_over(lines: Sequence[str]) -> None:
    """Tells which checkpoints were passed over for an older one, and why: a line each."""
    for line in lines:
        print(f"longstride: passed over: {line}", file=sys.stderr)


def told_line(error: Exception) -> str:
    """A mistake in words; one that holds several problems has a line for each."""
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


def _tell(error: Exception) -> None:
    for line in told_line(error).splitlines():
        print(f"longstride: error: {line}", file=sys.stderr, flush=True)
