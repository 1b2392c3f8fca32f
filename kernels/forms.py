"""Closed forms of orders and intervals: a kernel evaluates a few integers instead of reading a vector.

Letters: N positions, M rows of an order, P its period.
An order without a closed form, for example if the stride does not divide the context, is a vector. Code that reads
orders and intervals accepts both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Row = TypeVar("Row", int, Tensor)  # a row, or a vector of rows


class Intervals(NamedTuple):
    """The columns of each row as a half-open interval ``low <= column < high``, counted in a part's own orders.

    Both are (M,) int64 and never decrease, so the rows of each *column* are an interval too.
    A row without columns has ``low == high``.
    """

    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class Fold:
    """An order in closed form: a table read in another direction. Row r stands for position

        (r // period) * step + (r % period) * stride + shift        0 <= r < length

    with ``stride == 1`` (a few positions of every block) or ``step == 1`` (column after column).
    Its inverse is a fold too. It adds ``before`` to a position first. Only the sums s >= 0 with
    ``s % period < width`` then stand for a row.
    """

    length: int  # M
    period: int  # P
    step: int
    stride: int
    shift: int = 0
    before: int = 0
    width: int | None = None  # None: every r below the length stands for a position

    def __post_init__(self) -> None:
        assert (self.stride == 1 or self.step == 1) and 0 in (self.shift, self.before), self

    def __call__(self, row: Row) -> Row:
        """Return the positions of rows; an arbitrary number for a row that stands for none."""
        row = row + self.before
        return row // self.period * self.step + row % self.period * self.stride + self.shift

    def inverse(self) -> Fold:
        """Return the fold from positions to rows. Its ``length`` is the number of rows."""
        if self.stride == 1:
            return Fold(self.length, self.step, self.period, 1, before=-self.shift, width=self.period)
        return Fold(self.length, self.stride, 1, self.period, before=-self.shift, width=self.stride)


class Bound(NamedTuple):
    """One end of a row's interval: ``step * (r // period) + clip(r % period + offset, least, most)``.

    With a ``grain`` above 1 the bound rises in stairs of that many rows: ``r % period`` is rounded down to a multiple.
    """

    step: int
    offset: int
    least: int
    most: int
    grain: int = 1

    def __call__(self, row: Row, period: int) -> Row:
        """Return this end of the intervals of rows, as a column."""
        column = row % period
        if self.grain > 1:
            column -= column % self.grain
        column = column + self.offset
        if isinstance(column, int):
            return row // period * self.step + min(max(column, self.least), self.most)
        return row // period * self.step + column.clamp(self.least, self.most)

    def total(self, rows: int, period: int) -> int:
        """Return the exact sum over rows 0 … rows - 1, at a cost that does not depend on their number."""
        runs, remainder = divmod(rows, period)
        steps = self.step * (period * runs * (runs - 1) // 2 + runs * remainder)
        return steps + runs * self._ramp_total(period) + self._ramp_total(remainder)

    def _ramp_total(self, rows: int) -> int:
        """Return the sum of ``clip(r + offset, least, most)`` over 0 <= r < rows, with r rounded down to a stair."""
        stairs, remainder = divmod(rows, self.grain)
        rising = min(max(-((self.offset - self.least) // self.grain), 0), stairs)  # the first stair above the least
        level = min(max(-((self.offset - self.most) // self.grain), rising), stairs)  # the first at the greatest
        ramp = (level - rising) * (2 * self.offset + (rising + level - 1) * self.grain) // 2
        last = min(max(stairs * self.grain + self.offset, self.least), self.most)  # of an incomplete stair
        return (rising * self.least + ramp + (stairs - level) * self.most) * self.grain + remainder * last


@dataclass(frozen=True)
class Bounds:
    """The intervals of rows 0 … length-1, in closed form."""

    length: int  # M
    period: int  # P
    low: Bound
    high: Bound

    def __call__(self, row: Tensor) -> Intervals:
        """Return the intervals of some rows."""
        return Intervals(self.low(row, self.period), self.high(row, self.period))

    def num_pairs(self) -> int:
        """Return the number of columns of all rows together, at a cost that does not depend on the length."""
        return self.high.total(self.length, self.period) - self.low.total(self.length, self.period)

    def closed_period(self) -> int | None:
        """Return P if rows and columns fall into runs of P and no interval leaves its run, else None."""
        closed = all(bound.step == self.period for bound in (self.low, self.high))
        return self.period if closed and self.low.least >= 0 and self.high.most <= self.period else None


Order = Fold | Tensor | None  # original position of each row; None is the natural order of all positions


def positions_of(order: Order) -> Tensor | None:
    """Return an order as a vector, (M,) int64; None stays None."""
    return order(torch.arange(order.length)) if isinstance(order, Fold) else order


def intervals_of(bounds: Bounds | Intervals) -> Intervals:
    """Return intervals as vectors, (M,) int64."""
    return bounds(torch.arange(bounds.length)) if isinstance(bounds, Bounds) else bounds


def whole(context: int) -> int:
    """Return the period of a form that does not repeat: no row reaches it."""
    return max(context, 1)


def ramp(offset: int, least: int, most: int) -> Bound:
    """Return the bound ``clip(r + offset, least, most)``, for a period of the whole context."""
    return Bound(0, offset, least, most)


def constant(value: int, step: int = 0) -> Bound:
    """Return a bound with the same value for every row of a period."""
    return Bound(step, 0, value, value)
