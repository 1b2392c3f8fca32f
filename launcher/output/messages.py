"""Standard error: what a run says, and a mistake of the user in one line."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from longstride.launcher.output.exit_codes import WRONG_INPUT

_FIRST_RANK_SECONDS = 30.0  # long enough for a slow start of rank 0
_NAMELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # errors of a write, which names no file
_SLOW_SECONDS = 5.0
_MOST_CHARACTERS = 900  # of a line: what it quotes may be of any length


def say(text: str) -> None:
    """Writes ``longstride: text`` to standard error; a closed terminal or a full disk costs the line and no more."""
    with suppress(OSError):
        print(f"longstride: {text}", file=sys.stderr, flush=True)


@contextmanager
def said_where_slow(what: str) -> Iterator[None]:
    """Says what the block does, where that takes more than five seconds; of several ranks the first one does."""
    timer = threading.Timer(_SLOW_SECONDS, say, [f"{what} …"])
    timer.daemon = True
    if os.environ.get("RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class AgreedError(ValueError):
    """A mistake of the user that every rank knows of, whichever rank met it: rank 0 reports it for all."""


def mistake(error: BaseException) -> str | None:
    """The message of a mistake that the user can mend, a line a problem; None for any other error.

    Such mistakes are a ConfigError, a DataError, an AgreedError, and a file that cannot be read or written.
    """
    if isinstance(error, OSError):
        if error.strerror is None or (error.filename is None and error.errno not in _NAMELESS):
            return None
        if error.errno == errno.EFBIG:
            name = _printable(str(error.filename or "a file"))
            return f"{name}: is larger than this process may write; raise the limit on file sizes (`ulimit -f`)"
        if not error.filename:
            return f"standard output, or a file: cannot be written: {error.strerror}; write where there is room"
        return f"{_printable(str(error.filename))}: {error.strerror}"
    # Looked up in modules that are loaded already: importing them here would cost every verb their time.
    families = (("longstride.kernels.errors", "ConfigError"), ("longstride.data_pipelines.errors", "DataError"))
    classes = [getattr(sys.modules[module], name) for module, name in families if module in sys.modules]
    return str(error) if isinstance(error, (AgreedError, *classes)) else None


def report(error: Exception) -> int:
    """Says what the user did wrong, a line a problem; returns the exit code 2.

    All ranks find the same mistake at the same time. Rank 0 reports it; the others wait for the launcher to end them,
    and report only if it has not after 30 seconds.

    Raises:
        Exception: the error itself, where it is no mistake of the user.
    """
    if mistake(error) is None:
        raise error
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_FIRST_RANK_SECONDS)
    _say_mistake(error)
    return WRONG_INPUT


@contextmanager
def exit_on_mistake(meet: Callable[[], None]) -> Iterator[None]:
    """Reports a mistake of the user inside the block and exits by code 2.

    A mistake that one rank alone has met, such as a bad sample, is reported at once: the other ranks wait in a
    collective and would bring the run down first. An ``AgreedError`` is reported by rank 0; then all ranks leave
    together, for which ``meet`` waits for the others.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if mistake(error) is None:
            raise
        agreed = isinstance(error, AgreedError)
        if not agreed or os.environ.get("RANK", "0") == "0":
            _say_mistake(error)
        if agreed:
            meet()  # the launcher ends all ranks once one has ended: none may leave before rank 0 has reported
        sys.exit(WRONG_INPUT)


def _say_mistake(error: Exception) -> None:
    for line in (mistake(error) or "").split("\n"):
        half = _MOST_CHARACTERS // 2
        say(f"error: {_printable(line if len(line) <= 2 * half else f'{line[:half]} … {line[-half:]}')}")


def _printable(text: str) -> str:
    """A text that may quote anything, for a terminal to show and not to obey."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
