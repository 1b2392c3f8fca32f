"""Progress of long work on standard error, and numbers formatted for people."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from longstride.launcher.output.messages import say

if TYPE_CHECKING:
    from tqdm import tqdm

_QUIET_SECONDS = 2.0  # shorter work shows no progress
LINE_SECONDS = 10.0  # between lines without a terminal
USUAL_SIZE = {"ncols": 80, "nrows": 20}  # for a terminal that reports no size, where tqdm would show nothing
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_MOST_YEARS = 1_000  # beyond, a duration is "more than"


class WorkCounter:
    """A progress display: a bar on a terminal, elsewhere a line every ten seconds; nothing for short work.

    ``unit`` names what is counted, in the plural. A counter that is not ``shown``, as on ranks above 0, only counts.
    """

    def __init__(self, what: str, total: int, unit: str, *, shown: bool = True) -> None:
        self._what, self._total, self._unit, self._shown = what, total, unit, shown
        self._done = 0
        self._start = time.monotonic()
        self._next = self._start + (_QUIET_SECONDS if sys.stderr.isatty() else LINE_SECONDS)
        self._bar: tqdm | None = None

    def add(self, count: int) -> None:
        """Count more finished work."""
        self.at(self._done + count)

    def at(self, done: int, total: int | None = None) -> None:
        """Set the finished work, and ``total`` if it was not known before."""
        self._done, self._total = done, self._total if total is None else total
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        with suppress(OSError):  # the terminal is gone
            if not sys.stderr.isatty():
                self._next = now + LINE_SECONDS
                seconds = (now - self._start) * (self._total / max(1, self._done) - 1)
                share = f"{self._done:,} of {self._total:,} {self._unit}"
                say(f"{self._what}: {share}, about {duration(max(0.0, seconds))} left")
                return
            if self._bar is None:
                from tqdm import tqdm  # late: most work needs no bar

                form = "{desc}: {percentage:3.0f} % {bar:30} {n_fmt} of {total_fmt} {unit}, {remaining} left"
                size = {} if terminal_size(sys.stderr) else USUAL_SIZE
                self._bar = tqdm(
                    desc=self._what, total=self._total, unit=self._unit, bar_format=form, leave=False, **size
                )
                self._bar.n = self._done  # includes work before the bar
                self._bar.refresh()
            self._bar.total = self._total
            self._bar.update(self._done - self._bar.n)

    def close(self) -> None:
        """Clear the bar, so that the result takes its place."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
            self._bar = None


def terminal_size(stream: TextIO) -> os.terminal_size | None:
    """Return the size of a terminal; None if it reports none, like some pseudo-terminals."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return None
    return size if min(size) > 0 else None


def duration(seconds: float) -> str:
    """Format a time with one or two units: 45 s, 3 min 20 s, 25 min, 2 h 13 min, 3 d 4 h."""
    if seconds > _MOST_YEARS * 365 * 86_400:
        return f"more than {_MOST_YEARS:,} years"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 600:
        return f"{rounded // 60} min {rounded % 60} s" if rounded % 60 else f"{rounded // 60} min"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    hours = round(seconds / 3600)
    return f"{hours // 24:,} d {hours % 24} h" if hours % 24 else f"{hours // 24:,} d"


def step_duration(seconds: float) -> str:
    """Format the time of a step with about three digits: 12.3 ms, 4.25 s, 180 s."""
    return f"{1_000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:,.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


def amount(value: float) -> str:
    """Format a number with three digits, a space and a prefix: "41.3 k"."""
    size, prefix = next((size, prefix) for size, prefix in _PREFIXES if value >= 0.9995 * size or not prefix)
    return f"{value / size:#.3g}".rstrip(".") + f" {prefix}"


def flops(count: float, digits: str = ",.3g") -> str:
    """Format a number of operations with a prefix: 1.2 TFLOP."""
    size, prefix = next((size, prefix) for size, prefix in _PREFIXES if count >= size or not prefix)
    return f"{count / size:{digits if prefix else ',.0f'}} {prefix}FLOP"


def processes(count: int) -> str:
    """Format a number of processes: 1 process, 8 processes."""
    return f"{count:,} process{'es' if count != 1 else ''}"


def memory(num_bytes: float) -> str:
    """Format bytes of memory with a binary prefix: 310 MiB, 2.25 GiB."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"


def traffic(num_bytes: float) -> str:
    """Format bytes on a network with a decimal prefix: 1.250 MB, 3.100 GB."""
    return f"{num_bytes / 1e9:,.3f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.3f} MB"


def percent(share: float) -> str:
    """Format a share with two digits: 4.7 %, 38 %."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"
