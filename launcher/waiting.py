"""Waits of ranks: for long work of the first one, and for what it has written to be seen on other hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, cast

from launcher.processes import Ranks, gather_objects
from launcher.reporting import AgreedError, is_wrong_input, told_line

_POLL_SECONDS = (0.01, 0.5)  # between two meetings: the first, and the longest
_SEEN_SECONDS = 20.0  # until a shared file system shows all hosts what one has
_LOOK_SECONDS = 0.2
Result = TypeVar("Result")


def look_until() -> float:
    """When, by the monotonic clock, to give up ``seen``."""
    return time.monotonic() + _SEEN_SECONDS


def seen(look: Callable[[], Result | None], end: float) -> Result | None:
    """What ``look`` finds, which a shared file system may show some time after it was written; None: not by ``end``."""
    while (found := look()) is None and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
    return found


def first_works(work: Callable[[], Result], ranks: Ranks) -> Result:
    """What the first rank's ``work`` returns, on every rank. All ranks must call.

    It works in a thread, and all ranks meet in a small collective again and again until it is done: a rank that dies
    meanwhile is noticed at once, and none waits longer in any one collective than between two meetings.

    Raises:
        AgreedError: on every rank, for a mistake of a person that the work met.
    """
    if not ranks.is_first:
        return _meet(lambda: (False, None, None, None), ranks)
    future: Future[Result] = Future()
    # A daemon: where a peer dies, nothing waits for the rest of the work.
    threading.Thread(target=_fulfil, args=(future, work), daemon=True, name="first works").start()

    def state() -> tuple:
        if not future.done():
            return (False, None, None, None)
        error = future.exception()
        if error is None:
            return (True, future.result(), None, None)
        if isinstance(error, Exception) and is_wrong_input(error):
            return (True, None, told_line(error), None)
        return (True, None, None, repr(error))

    try:
        return _meet(state, ranks)
    except RuntimeError:
        if future.done():
            future.result()  # with its own traceback
        raise


def _fulfil(future: Future[Result], work: Callable[[], Result]) -> None:
    try:
        result = work()
    except BaseException as error:  # which the main thread raises
        future.set_exception(error)
    else:
        future.set_result(result)


def _meet(state: Callable[[], tuple], ranks: Ranks) -> Result:  # type: ignore[type-var]
    pause, longest = _POLL_SECONDS
    while True:
        done, result, wrong, unforeseen = gather_objects(state(), ranks)[0]
        if wrong is not None:
            raise AgreedError(wrong)
        if unforeseen is not None:
            raise RuntimeError(f"the first rank failed: {unforeseen}")
        if done:
            return cast(Result, result)
        time.sleep(pause)
        pause = min(longest, 2 * pause)
