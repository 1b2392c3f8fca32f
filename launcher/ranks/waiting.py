"""Long waits of ranks: for work of the first rank, and until other hosts see what it has written.

They poll, and are in no collective meanwhile, so the watchdog tolerates them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from longstride.launcher.output import AgreedError, mistake

_POLL_SECONDS = (0.01, 0.5)  # between two meetings: the first and the longest pause
_VISIBLE_SECONDS = 20.0  # until a shared file system shows all hosts the same
_LOOK_SECONDS = 0.2
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _State(Generic[Result]):
    """The progress of the first rank's work, with the user's mistake or the unforeseen error."""

    done: bool = False
    result: Result | None = None
    wrong: str | None = None
    unforeseen: str | None = None


def wait_until_visible(look: Callable[[], Result | None], since: float) -> Result | None:
    """Poll ``look`` until its result is not None, for files that another host has just written to a shared folder.

    Returns None 20 s after ``since``, a time of the monotonic clock.
    """
    while (result := look()) is None and time.monotonic() < since + _VISIBLE_SECONDS:
        time.sleep(_LOOK_SECONDS)
    return result


def run_on_first(work: Callable[[], Result] | None, gather: Callable[[object], list]) -> Result:
    """Implement ``Ranks.run_on_first``. ``work`` is None on all other ranks, and ``gather`` is their collective."""
    if work is None:
        return _meet(_State, gather)
    future: Future[Result] = Future()

    def fulfil() -> None:
        try:
            result = work()
        except BaseException as error:  # raised by the main thread
            future.set_exception(error)
        else:
            future.set_result(result)

    # A daemon, so that nothing waits for the work if a peer dies.
    threading.Thread(target=fulfil, daemon=True, name="first works").start()

    def state() -> _State[Result]:
        if not future.done():
            return _State()
        error = future.exception()
        if error is None:
            return _State(done=True, result=future.result())
        wrong = mistake(error)
        return _State(unforeseen=repr(error)) if wrong is None else _State(wrong=wrong)

    try:
        return _meet(state, gather)
    except RuntimeError:
        if future.done():
            future.result()  # with its own traceback
        raise


def _meet(state: Callable[[], _State[Result]], gather: Callable[[object], list]) -> Result:
    """Gather the first rank's state until its work is done, and return the result."""
    pause, longest = _POLL_SECONDS
    while True:
        now: _State[Result] = gather(state())[0]
        if now.wrong is not None:
            raise AgreedError(now.wrong)
        if now.unforeseen is not None:
            raise RuntimeError(f"the first rank failed: {now.unforeseen}")
        if now.done:
            return cast(Result, now.result)
        time.sleep(pause)
        pause = min(longest, 2 * pause)
