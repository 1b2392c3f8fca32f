"""The keys of one query as a few regular runs of positions, found in a time that does not grow with the context.

Letters: N positions, M keys of the query.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longstride.kernels.patterns.base import Pattern
from longstride.kernels.patterns.forms import Fold, intervals_of
from longstride.kernels.plan import View, view


@dataclass(frozen=True, slots=True)
class Run:
    """Positions ``first + block * step + i`` for ``0 <= block < blocks`` and ``0 <= i < width``, ascending.

    One block is a slice; blocks of width 1 are every ``step``-th position.
    """

    first: int
    width: int
    blocks: int = 1
    step: int = 1

    def __len__(self) -> int:
        return self.blocks * self.width

    def positions(self) -> Tensor:
        """All of them, (M,) int64."""
        start = self.first + torch.arange(self.blocks, device="cpu")[:, None] * self.step
        return (start + torch.arange(self.width, device="cpu")).reshape(-1)

    def rows_of(self, x: Tensor) -> Tensor:
        """These rows of (N, …), (M, …): a view, but of several wide blocks a copy of these rows alone."""
        last = self.first + (self.blocks - 1) * self.step + self.width
        if self.blocks == 1:
            return x[self.first : last]
        if self.width == 1:
            return x[self.first : last : self.step]
        return x[self.first : last].unfold(0, self.width, self.step).movedim(-1, 1).flatten(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """Positions in a vector, for orders that have no closed form."""

    vector: Tensor  # (M,) int64, part of one that is kept for all queries

    def __len__(self) -> int:
        return len(self.vector)

    def positions(self) -> Tensor:
        """All of them, (M,) int64."""
        return self.vector

    def rows_of(self, x: Tensor) -> Tensor:
        """These rows of (N, …), (M, …): a copy."""
        return x.index_select(0, self.vector.to(x.device))


Read = Run | Listed


@lru_cache(maxsize=256)
def query_views(pattern: Pattern, context: int) -> tuple[View, ...]:
    """The parts of a resolved pattern as queries see them; cached."""
    return tuple(view(part, context, "queries") for part in pattern.parts())


def reads(pattern: Pattern, position: int, context: int) -> tuple[Read, ...]:
    """What the query of a position reads, part by part, each key once; nothing empty.

    Args:
        pattern: one, resolved for a head.
        position: of the query, 0 … N-1.
        context: N.
    """
    found: list[Read] = []
    for one in query_views(pattern, context):
        low, high = one.interval_of(one.row_of(position))
        if low < high:
            found += _runs(one, low, high)
    return tuple(found)


def positions(found: tuple[Read, ...]) -> Tensor:
    """All that several reads read, (M,) int64, in their order; few, as some are kept."""
    runs = tuple(read for read in found if isinstance(read, Run))
    if len(runs) < len(found):
        return torch.cat([read.positions() for read in found])
    first = runs[0].first
    return _positions(tuple(Run(run.first - first, run.width, run.blocks, run.step) for run in runs)) + first


@lru_cache(maxsize=64)
def _positions(runs: tuple[Run, ...]) -> Tensor:
    """Of runs, counted from the first one's start: alike at the next position, where a column moves with a window."""
    return torch.cat([run.positions() for run in runs])


def num_reads(pattern: Pattern, position: int, context: int) -> int:
    """How many keys the query of a position reads."""
    intervals = (one.interval_of(one.row_of(position)) for one in query_views(pattern, context))
    return sum(high - low for low, high in intervals)


@lru_cache(maxsize=256)
def most_reads(pattern: Pattern, context: int) -> int:
    """No query reads more keys than this: the sum of each part's most; cached."""
    # Of vectors that are not kept: the views of other calls do without them.
    intervals = (intervals_of(one.bounds) for one in query_views(pattern, context))
    return sum(int((high - low).max()) for low, high in intervals)


def _runs(one: View, low: int, high: int) -> Iterator[Read]:
    """The columns low … high-1 of a view, of which there are some."""
    order = one.column_order
    if order is None:
        yield Run(low, high - low)
    elif not isinstance(order, Fold):
        yield Listed(order[low:high])
    elif order.stride == 1:
        yield from _blocks(order, low, high)
    else:
        yield from _columns(order, low, high)


def _columns(order: Fold, low: int, high: int) -> Iterator[Run]:
    """Of an order column after column: a run for each column, of which our patterns read one."""
    while low < high:
        last = min(high, (low // order.period + 1) * order.period)
        yield Run(order(low), 1, last - low, order.stride)
        low = last


def _blocks(order: Fold, low: int, high: int) -> Iterator[Run]:
    """Of an order that takes some positions of every block: what is left of one, whole ones, what begins another."""
    period = order.period
    whole_first, whole_last = -(-low // period), high // period
    if whole_first > whole_last or period == order.step:  # within one block, or blocks that touch
        yield Run(order(low), high - low)
        return
    if low % period:
        yield Run(order(low), -low % period)
    if whole_first < whole_last:
        yield Run(order(whole_first * period), period, whole_last - whole_first, order.step)
    if high % period:
        yield Run(order(whole_last * period), high % period)
