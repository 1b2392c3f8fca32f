"""Positions a multiple of the stride back, counted from a row or from the token that it predicts.

Row i predicts token i and holds token i - 1. The row that holds the token k strides before token i is therefore
i + 1 - k * stride. Row 0 holds no token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.forms import Bound, Bounds, Fold, Intervals, Order, constant, positions_of, whole
from longstride.kernels.patterns.base import Align, Causal, PatternDefaults, PatternPart, require_divides


def column_order(context: int, stride: int) -> Order:
    """Return the positions grouped by residue, so that the entries of a column are adjacent."""
    if stride == 1 or stride >= context:
        return None
    if context % stride == 0:
        return Fold(context, context // stride, 1, stride)
    position = torch.arange(-(-context // stride) * stride).view(-1, stride).T.reshape(-1)
    return position[position < context]


@dataclass(frozen=True, repr=False)
class Column(PatternDefaults):
    """Every ``stride``-th earlier position, self included (Child et al. 2019, section 4.3, second strided factor).

    With ``align`` "target", query q reads the positions q + 1 - k * stride from 1 on, for every k of at least 1. They
    hold the tokens k strides before the one that q predicts. The first ``stride`` queries have no key, so their output
    is 0. With ``causal`` False, a query reads all of its column.
    """

    stride: Annotated[int, Doc("distance between keys; the paper's l")]
    align: Align = "row"
    causal: Causal = True

    left_out_at_default = ("align", "causal")

    def __post_init__(self) -> None:
        self.require_fields("stride")

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        if not self.causal:
            return (q - k) % self.stride == 0
        if self.align == "row":
            return (k <= q) & ((q - k) % self.stride == 0)
        return (k >= 1) & (k <= q + 1 - self.stride) & ((q + 1 - k) % self.stride == 0)

    def parts(self) -> tuple[PatternPart, ...]:
        if not self.causal:
            return (Entries(self.stride, None),)
        return (Entries(self.stride) if self.align == "row" else Entries(self.stride, 1, align="target"),)

    def period(self) -> int | None:
        """Return 1, as only distances matter; None with ``align`` "target", as position 0 differs."""
        return 1 if self.align == "row" else None

    def check(self, context: int) -> None:
        require_divides("stride", self.stride, context)


@dataclass(frozen=True)
class Entries:
    """Entries ``first`` to ``end - 1`` of the query's column (every ``stride``-th position), counted up from the query.

    Negative numbers are later entries, below the query. With ``align`` "target", it is the column of the next position,
    which the query predicts. The column lacks position 0, and ``first`` is at least 1. A key k then stands where k - 1
    stands in the query's column, so that the bounds are those of ``align`` "row".
    """

    stride: int  # positions
    first: int | None = 0  # 1 excludes the query itself; None: from the bottom of the column
    end: int | None = None  # None: up to the top of the column
    start: int = 0  # queries and keys before this position are excluded
    align: Align = "row"

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        distance = q + self._shift - k
        above = distance // self.stride
        allowed = (distance % self.stride == 0) & (k >= max(self.start, self._shift)) & (q >= self.start)
        if self.first is not None:
            allowed = allowed & (above >= self.first)
        return allowed if self.end is None else allowed & (above < self.end)

    def query_order(self, context: int) -> Order:
        return column_order(context, self.stride)

    def key_order(self, context: int) -> Order:
        """Return column after column; with ``align`` "target" a key is where the position before it would be."""
        order = column_order(context, self.stride)
        num_keys = context - self._shift
        if num_keys == context:
            return order
        if isinstance(order, Tensor):
            return order[order < num_keys] + self._shift
        if order is None:
            return Fold(num_keys, whole(num_keys), whole(context), 1, self._shift)
        return replace(order, length=num_keys, shift=self._shift)

    def by_query(self, context: int) -> Bounds | Intervals:
        """Let each query read its column from ``end - 1`` entries above itself to ``first`` above itself."""
        rows = context // self.stride
        first, end = self._within(context)
        start = min(max(self.start, self._shift), context) - self._shift
        excludes_readers = self.start > self._shift and (first is None or first < 0)
        if context % self.stride == 0 and start % self.stride == 0 and not excludes_readers:
            top = start // self.stride
            from_top = constant(top, rows) if end is None else Bound(rows, 1 - end, top, rows)
            to_bottom = constant(rows, rows) if first is None else Bound(rows, 1 - first, top, rows)
            return Bounds(context, rows, from_top, to_bottom)
        row = torch.arange(context)
        position = positions_of(column_order(context, self.stride))
        position = row if position is None else position
        before = (start - position % self.stride + self.stride - 1) // self.stride  # in this column
        if self._shift:  # the key order lacks one position, so the columns after that one begin a row earlier
            row = row - (position % self.stride > (context - 1) % self.stride).long()
        top_row = row - position // self.stride + before.clamp_min(0)
        end_row = row + (context - 1 - position) // self.stride + 1
        low = top_row if end is None else torch.minimum(torch.maximum(row + 1 - end, top_row), end_row)
        high = end_row if first is None else torch.minimum(torch.maximum(row + 1 - first, low), end_row)
        if excludes_readers:
            low, high = (bound.where(position >= self.start, top_row) for bound in (low, high))
        return Intervals(low, high)

    def by_key(self, context: int) -> Bounds | None:
        """Let each key be read from ``first`` entries below itself to ``end - 1`` below itself."""
        rows = context // self.stride
        if context % self.stride or self.start > self._shift:
            return None
        first, end = self._within(context)
        low = constant(0, rows) if first is None else Bound(rows, first, 0, rows)
        high = constant(rows, rows) if end is None else Bound(rows, end, 0, rows)
        return Bounds(context - self._shift, rows, low, high)

    def _within(self, context: int) -> tuple[int | None, int | None]:
        """Return ``first`` and ``end`` within the length of the context, so that bounds need few bits."""
        first, end = (n if n is None else min(max(n, -context), context) for n in (self.first, self.end))
        return first, end

    @property
    def _shift(self) -> int:
        """Columns from the query's to that of its keys."""
        return int(self.align == "target")
