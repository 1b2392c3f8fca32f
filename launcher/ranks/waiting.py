"""Long waits of ranks: for work of the first rank, and until other hosts see what it has written.

They poll, and are in no collective meanwhile, so the watchdog tolerates them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from longstride.launcher.output import AgreedError, mistake

_POLL_SECONDS = (0.01, 0.5)  # between two meetings: the first and the longest pause
_VISIBLE_SECONDS = 20.0  # until a shared file system shows all hosts the same
_LOOK_SECONDS = 0.2
Result = TypeVar("Result")


def wait_until_visible(look: Callable[[], Result | None], since: float) -> Result | None:
    """Poll ``look`` until its result is not None, for files that another host has just written to a shared folder.

    Returns None 20 s after ``since``, a time of the monotonic clock.
    """
    while (result := look()) is None and time.monotonic() < since + _VISIBLE_SECONDS:
        time.sleep(_LOOK_SECONDS)
    return result


class _Outcome(NamedTuple):
    """The outcome of the first rank's work, for all ranks."""

    result: Any = None
    wrong: str | None = None  # the user's mistake
    unforeseen: str | None = None


def run_on_first(work: Callable[[], Result] | None, gather: Callable[[object], list]) -> Result:
    """Implement ``Ranks.run_on_first``. ``work`` is None on all other ranks, and ``gather`` is their collective."""
    outcomes: list[_Outcome] = []  # one once the work is done
    errors: list[BaseException] = []

    def fulfil() -> None:
        assert work is not None
        try:
            outcomes.append(_Outcome(work()))
        except BaseException as error:  # raised by the main thread
            errors.append(error)
            wrong = mistake(error)
            outcomes.append(_Outcome(wrong=wrong, unforeseen=repr(error) if wrong is None else None))

    if work is not None:  # a daemon, so that nothing waits for the work if a peer dies
        threading.Thread(target=fulfil, daemon=True, name="first works").start()
    pause, longest = _POLL_SECONDS
    try:
        while (outcome := gather(outcomes[0] if outcomes else None)[0]) is None:
            time.sleep(pause)
            pause = min(longest, 2 * pause)
        if outcome.wrong is not None:
            raise AgreedError(outcome.wrong)
        if outcome.unforeseen is not None:
            raise RuntimeError(f"the first rank failed: {outcome.unforeseen}")
    except RuntimeError:
        if errors:
            raise errors[0] from None  # with its own traceback
        raise
    return outcome.result
