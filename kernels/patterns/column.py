"""Positions a multiple of the stride back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.forms import Bound, Bounds, Fold, Intervals, Order, constant, positions_of
from longstride.kernels.patterns.base import PatternDefaults, PatternPart, require_divides, require_positive


def column_order(context: int, stride: int) -> Order:
    """Return the positions grouped by residue, so that each column is dense and causal."""
    if stride == 1 or stride >= context:
        return None
    if context % stride == 0:
        return Fold(context, context // stride, 1, stride)
    position = torch.arange(-(-context // stride) * stride).view(-1, stride).T.reshape(-1)
    return position[position < context]


@dataclass(frozen=True)
class Column(PatternDefaults):
    """Every ``stride``-th earlier position, self included (Child et al. 2019, section 4.3, second strided factor)."""

    stride: Annotated[int, Doc("distance between keys; the paper's l")]

    def __post_init__(self) -> None:
        require_positive("stride", self.stride)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((q - k) % self.stride == 0)

    def parts(self) -> tuple[PatternPart, ...]:
        """Return the entries of a column."""
        return (Entries(self.stride),)

    def period(self) -> int:
        """Return 1: only distances matter."""
        return 1

    def check(self, context: int) -> None:
        """Raise ConfigError if the stride does not divide the context."""
        require_divides("stride", self.stride, context)


@dataclass(frozen=True)
class Entries:
    """Entries of the query's column (every ``stride``-th position) from ``skip`` entries above the query up."""

    stride: int  # positions
    skip: int = 0  # entries; 1 excludes the query itself
    count: int | None = None  # entries; None: up to the top of the column
    start: int = 0  # positions before this one are excluded

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        above = (q - k) // self.stride
        allowed = (above >= self.skip) & ((q - k) % self.stride == 0) & (k >= self.start)
        return allowed if self.count is None else allowed & (above - self.skip < self.count)

    def query_order(self, context: int) -> Order:
        """Return column after column."""
        return column_order(context, self.stride)

    def key_order(self, context: int) -> Order:
        """Return column after column."""
        return column_order(context, self.stride)

    def by_query(self, context: int) -> Bounds | Intervals:
        """Let each query read its column from ``skip`` entries above itself (0: from itself) up."""
        rows = context // self.stride
        count = None if self.count is None else min(self.count, context)
        if context % self.stride == 0 and self.start % self.stride == 0:
            top = min(self.start // self.stride, rows)
            low = constant(top, rows) if count is None else Bound(rows, 1 - self.skip - count, top, rows)
            return Bounds(context, rows, low, Bound(rows, 1 - self.skip, top, rows))
        row = torch.arange(context)
        position = positions_of(column_order(context, self.stride))
        position = row if position is None else position
        before = (min(self.start, context) - position % self.stride + self.stride - 1) // self.stride  # in this column
        top_row = row - position // self.stride + before.clamp_min(0)
        high = torch.maximum(row + 1 - self.skip, top_row)
        return Intervals(top_row if count is None else torch.maximum(row + 1 - self.skip - count, top_row), high)

    def by_key(self, context: int) -> Bounds | None:
        """Let each key be read from ``skip`` entries below itself down."""
        rows = context // self.stride
        if context % self.stride or self.start:
            return None
        high = constant(rows, rows) if self.count is None else Bound(rows, min(self.skip + self.count, rows), 0, rows)
        return Bounds(context, rows, Bound(rows, self.skip, 0, rows), high)
