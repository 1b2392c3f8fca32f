"""Waits of ranks: for long work of the first one, and for what it has written to be seen on other hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from longstride.launcher.output import AgreedError, mistake
from longstride.launcher.ranks.processes import Ranks, gather_objects

_POLL_SECONDS = (0.01, 0.5)  # between two meetings: the first, and the longest
_SEEN_SECONDS = 20.0  # until a shared file system shows all hosts what one has
_LOOK_SECONDS = 0.2
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _State(Generic[Result]):
    """How far the first rank's work is; what went wrong is a person's mistake, or unforeseen."""

    done: bool = False
    result: Result | None = None
    wrong: str | None = None
    unforeseen: str | None = None


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
        return _meet(_State, ranks)
    future: Future[Result] = Future()
    # A daemon: where a peer dies, nothing waits for the rest of the work.
    threading.Thread(target=_fulfil, args=(future, work), daemon=True, name="first works").start()

    def state() -> _State[Result]:
        if not future.done():
            return _State()
        error = future.exception()
        if error is None:
            return _State(done=True, result=future.result())
        wrong = mistake(error)
        return _State(unforeseen=repr(error)) if wrong is None else _State(wrong=wrong)

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


def _meet(state: Callable[[], _State[Result]], ranks: Ranks) -> Result:
    pause, longest = _POLL_SECONDS
    while True:
        now: _State[Result] = gather_objects(state(), ranks)[0]
        if now.wrong is not None:
            raise AgreedError(now.wrong)
        if now.unforeseen is not None:
            raise RuntimeError(f"the first rank failed: {now.unforeseen}")
        if now.done:
            return cast(Result, now.result)
        time.sleep(pause)
        pause = min(longest, 2 * pause)
