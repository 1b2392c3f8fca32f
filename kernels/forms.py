"""Closed forms of orders and intervals: a few integers in place of a vector, which a kernel evaluates by itself.

Letters: N positions, M rows of an order, P its period.
An order without a closed form (for example where the stride does not divide the context) is a vector; whatever reads
orders and intervals takes either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Row = TypeVar("Row", int, Tensor)  # one row, or a vector of them


class Intervals(NamedTuple):
    """The columns of each row as a half-open interval ``low <= column < high``, counted in a part's own orders.

    Both are (M,) int64 and neither ever decreases, so that the rows of each *column* are an interval too.
    A row without columns has ``low == high``.
    """

    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class Fold:
    """An order in closed form, a table read another way: row r stands for position

        (r // period) * step + (r % period + shift) * stride        0 <= r < length

    with ``stride == 1`` (a few positions of every block) or ``step == 1`` and ``shift == 0`` (column after column).
    Its inverse is a fold too, in which only ``0 <= r % period + shift < width`` stand for a row at all.
    """

    length: int  # M
    period: int  # P
    step: int
    stride: int
    shift: int = 0
    width: int | None = None  # None: every r below the length stands for a position

    def __post_init__(self) -> None:
        assert self.stride == 1 or (self.step == 1 and self.shift == 0), self

    def __call__(self, row: Row) -> Row:
        """The positions of rows; of a row that stands for none, any number."""
        return row // self.period * self.step + (row % self.period + self.shift) * self.stride

    def inverse(self) -> Fold:
        """Position to row; its ``length`` is that of the rows."""
        if self.stride == 1:
            return Fold(self.length, self.step, self.period, 1, -self.shift, width=self.period)
        return Fold(self.length, self.stride, 1, self.period, width=self.stride)


class Bound(NamedTuple):
    """One end of a row's interval: ``step * (r // period) + clip(r % period + offset, least, most)``.

    With a ``grain`` the bound rises in stairs of so many rows: ``r % period`` is rounded down to a multiple of it.
    """

    step: int
    offset: int
    least: int
    most: int
    grain: int = 1

    def __call__(self, row: Row, period: int) -> Row:
        """This end of the intervals of rows, as a column."""
        rest = row % period
        if self.grain > 1:
            rest -= rest % self.grain
        rest = rest + self.offset
        if isinstance(rest, int):
            return row // period * self.step + min(max(rest, self.least), self.most)
        return row // period * self.step + rest.clamp(self.least, self.most)

    def total(self, rows: int, period: int) -> int:
        """The exact sum over rows 0 … rows - 1, at a cost that does not grow with their number."""
        runs, rest = divmod(rows, period)
        steps = self.step * (period * runs * (runs - 1) // 2 + runs * rest)
        return steps + runs * self._ramp_total(period) + self._ramp_total(rest)

    def _ramp_total(self, rows: int) -> int:
        """The sum of ``clip(r + offset, least, most)`` over 0 <= r < rows, r rounded down to a whole stair."""
        stairs, rest = divmod(rows, self.grain)
        rising = min(max(-((self.offset - self.least) // self.grain), 0), stairs)  # the first stair above the least
        level = min(max(-((self.offset - self.most) // self.grain), rising), stairs)  # the first at the greatest
        ramp = (level - rising) * (2 * self.offset + (rising + level - 1) * self.grain) // 2
        last = min(max(stairs * self.grain + self.offset, self.least), self.most)  # of a stair that is not whole
        return (rising * self.least + ramp + (stairs - level) * self.most) * self.grain + rest * last


@dataclass(frozen=True)
class Bounds:
    """The intervals of rows 0 … length-1, in closed form."""

    length: int  # M
    period: int  # P
    low: Bound
    high: Bound

    def __call__(self, row: Tensor) -> Intervals:
        """The intervals of some rows."""
        return Intervals(self.low(row, self.period), self.high(row, self.period))

    def num_pairs(self) -> int:
        """The columns of all rows together, at a cost that does not grow with the length."""
        return self.high.total(self.length, self.period) - self.low.total(self.length, self.period)

    def closed_period(self) -> int | None:
        """P where rows and columns fall into runs of P and no interval leaves its run, else None."""
        closed = all(bound.step == self.period for bound in (self.low, self.high))
        return self.period if closed and self.low.least >= 0 and self.high.most <= self.period else None


Order = Fold | Tensor | None  # original position of each row; None is the natural order of all positions


def positions_of(order: Order) -> Tensor | None:
    """An order as a vector, (M,) int64; None stays None."""
    return order(torch.arange(order.length)) if isinstance(order, Fold) else order


def intervals_of(bounds: Bounds | Intervals) -> Intervals:
    """Intervals as vectors, (M,) int64."""
    return bounds(torch.arange(bounds.length)) if isinstance(bounds, Bounds) else bounds


def whole(context: int) -> int:
    """The period of a form that does not repeat: no row reaches it."""
    return max(context, 1)


def ramp(offset: int, least: int, most: int) -> Bound:
    """``clip(r + offset, least, most)``, where the period is the whole context."""
    return Bound(0, offset, least, most)


def constant(value: int, step: int = 0) -> Bound:
    """The same value for every row of a period."""
    return Bound(step, 0, value, value)
