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
from longstride.kernels.patterns.base import (
    Align,
    PatternDefaults,
    PatternPart,
    require_align,
    require_divides,
    require_positive,
)


def column_order(context: int, stride: int) -> Order:
    """Return the positions grouped by residue, so that each column is dense and causal."""
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
    is 0.
    """

    stride: Annotated[int, Doc("distance between keys; the paper's l")]
    align: Align = "row"

    left_out_at_default = ("align",)

    def __post_init__(self) -> None:
        require_positive("stride", self.stride)
        require_align(self.align)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        if self.align == "row":
            return (k <= q) & ((q - k) % self.stride == 0)
        return (k >= 1) & (k <= q + 1 - self.stride) & ((q + 1 - k) % self.stride == 0)

    def parts(self) -> tuple[PatternPart, ...]:
        return (Entries(self.stride) if self.align == "row" else Entries(self.stride, skip=1, align="target"),)

    def period(self) -> int | None:
        """Return 1, as only distances matter; None with ``align`` "target", as position 0 differs."""
        return 1 if self.align == "row" else None

    def check(self, context: int) -> None:
        require_divides("stride", self.stride, context)


@dataclass(frozen=True)
class Entries:
    """Entries of the query's column (every ``stride``-th position) from ``skip`` entries above the query up.

    With ``align`` "target", it is the column of the next position, which the query predicts. The column lacks position
    0, and ``skip`` is at least 1. A key k then stands where k - 1 stands in the query's column, so that the bounds are
    those of ``align`` "row".
    """

    stride: int  # positions
    skip: int = 0  # entries; 1 excludes the query itself
    count: int | None = None  # entries; None: up to the top of the column
    start: int = 0  # positions before this one are excluded
    align: Align = "row"

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        distance = q + self._shift - k
        above = distance // self.stride
        allowed = (above >= self.skip) & (distance % self.stride == 0) & (k >= max(self.start, self._shift))
        return allowed if self.count is None else allowed & (above - self.skip < self.count)

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
        """Let each query read its column from ``skip`` entries above itself (0: from itself) up."""
        rows = context // self.stride
        count = None if self.count is None else min(self.count, context)
        start = min(max(self.start, self._shift), context) - self._shift
        if context % self.stride == 0 and start % self.stride == 0:
            top = start // self.stride
            low = constant(top, rows) if count is None else Bound(rows, 1 - self.skip - count, top, rows)
            return Bounds(context, rows, low, Bound(rows, 1 - self.skip, top, rows))
        row = torch.arange(context)
        position = positions_of(column_order(context, self.stride))
        position = row if position is None else position
        before = (start - position % self.stride + self.stride - 1) // self.stride  # in this column
        if self._shift:  # the key order lacks one position, so the columns after that one begin a row earlier
            row = row - (position % self.stride > (context - 1) % self.stride).long()
        top_row = row - position // self.stride + before.clamp_min(0)
        high = torch.maximum(row + 1 - self.skip, top_row)
        return Intervals(top_row if count is None else torch.maximum(row + 1 - self.skip - count, top_row), high)

    def by_key(self, context: int) -> Bounds | None:
        """Let each key be read from ``skip`` entries below itself down."""
        rows = context // self.stride
        if context % self.stride or self.start > self._shift:
            return None
        high = constant(rows, rows) if self.count is None else Bound(rows, min(self.skip + self.count, rows), 0, rows)
        return Bounds(context - self._shift, rows, Bound(rows, self.skip, 0, rows), high)

    @property
    def _shift(self) -> int:
        """Columns from the query's to that of its keys."""
        return int(self.align == "target")
