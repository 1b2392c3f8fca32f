"""How much of some work is done, on standard error, and numbers as a person reads them."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from longstride.launcher.output.messages import say

if TYPE_CHECKING:
    from tqdm import tqdm

_QUIET_SECONDS = 2.0  # what is done sooner is told by its result alone
LINE_SECONDS = 10.0  # between lines where there is no terminal
USUAL_SIZE = {"ncols": 80, "nrows": 20}  # of a terminal that says it has none, where tqdm would show nothing
_MOST_YEARS = 1_000  # that are told by their number


class WorkCounter:
    """Counts up to ``total``: on a terminal a bar, elsewhere a line every ten seconds; nothing of what is done at once.

    ``unit`` is what is counted, in the plural. One that is not ``shown``, as of ranks behind the first, counts alone.
    """

    def __init__(self, what: str, total: int, unit: str, *, shown: bool = True) -> None:
        self._what, self._total, self._unit, self._shown = what, total, unit, shown
        self._done = 0
        self._start = time.monotonic()
        self._next = self._start + (_QUIET_SECONDS if sys.stderr.isatty() else LINE_SECONDS)
        self._bar: tqdm | None = None

    def add(self, count: int) -> None:
        """So much more is done."""
        self.at(self._done + count)

    def at(self, done: int, total: int | None = None) -> None:
        """So much is done; of ``total``, where that has not been known before."""
        self._done, self._total = done, self._total if total is None else total
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        with suppress(OSError):  # a terminal that is gone
            if not sys.stderr.isatty():
                self._next = now + LINE_SECONDS
                left = (now - self._start) * (self._total / max(1, self._done) - 1)
                share = f"{self._done:,} of {self._total:,} {self._unit}"
                say(f"{self._what}: {share}, about {duration(max(0.0, left))} left")
                return
            if self._bar is None:
                from tqdm import tqdm  # late: most work is done sooner

                form = "{desc}: {percentage:3.0f} % {bar:30} {n_fmt} of {total_fmt} {unit}, {remaining} left"
                size = {} if terminal_size(sys.stderr) else USUAL_SIZE
                self._bar = tqdm(
                    desc=self._what, total=self._total, unit=self._unit, bar_format=form, leave=False, **size
                )
                self._bar.n = self._done  # what came before the bar
                self._bar.refresh()
            self._bar.total = self._total
            self._bar.update(self._done - self._bar.n)

    def close(self) -> None:
        """Wipes the bar, so that the result takes its place."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
            self._bar = None


def terminal_size(stream: TextIO) -> os.terminal_size | None:
    """Return how large a terminal is; None where it does not say, as some that programs open."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return None
    return size if min(size) > 0 else None


def duration(seconds: float) -> str:
    """A time as a person says it: 45 s, 3 min 20 s, 25 min, 2 h 13 min, 3 d 4 h."""
    if seconds > _MOST_YEARS * 365 * 86_400:
        return f"more than {_MOST_YEARS:,} years"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    hours = round(seconds / 3600)
    return f"{hours // 24:,} d {hours % 24} h" if hours % 24 else f"{hours // 24:,} d"


def step_duration(seconds: float) -> str:
    """The time of a step, to about three digits: 12.3 ms, 4.25 s, 180 s."""
    return f"{1_000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:,.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


def amount(value: float) -> str:
    """Return a number with three digits, a space and a prefix: "41.3 k"."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)):
        if value >= 0.9995 * size or not prefix:
            return f"{value / size:#.3g}".rstrip(".") + f" {prefix}"
    raise AssertionError


def percent(share: float) -> str:
    """Return a share with two digits: 4.7 %, 38 %."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"
