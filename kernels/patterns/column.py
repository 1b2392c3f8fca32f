"""Positions a whole number of strides back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longstride.kernels.forms import Bound, Bounds, Fold, Intervals, Order, constant, positions_of
from longstride.kernels.patterns.base import SinglePart, require_divides, require_positive


def column_order(context: int, stride: int) -> Order:
    """Positions grouped by residue, so that each column is dense and causal."""
    if stride == 1 or stride >= context:
        return None
    if context % stride == 0:
        return Fold(context, context // stride, 1, stride)
    position = torch.arange(-(-context // stride) * stride).view(-1, stride).T.reshape(-1)
    return position[position < context]


class InColumns:
    """Every ``stride``-th earlier position but the last ``skip`` of them, column after column."""

    stride: int  # positions
    skip: int  # entries; 1 leaves out the query itself

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return (q - k >= self.skip * self.stride) & ((q - k) % self.stride == 0)

    def query_order(self, context: int) -> Order:
        """Column after column."""
        return column_order(context, self.stride)

    def key_order(self, context: int) -> Order:
        """Column after column."""
        return column_order(context, self.stride)

    def by_query(self, context: int) -> Bounds | Intervals:
        """Each query reads its own column from the top to ``skip`` entries above itself (0: to itself)."""
        rows = context // self.stride
        if context % self.stride == 0:
            return Bounds(context, rows, constant(0, rows), Bound(rows, 1 - self.skip, 0, rows))
        row = torch.arange(context)
        position = positions_of(column_order(context, self.stride))
        top = row - (row if position is None else position) // self.stride
        return Intervals(top, torch.maximum(row + 1 - self.skip, top))

    def by_key(self, context: int) -> Bounds | None:
        """Each key is read from ``skip`` entries below itself to the end of its column."""
        rows = context // self.stride
        if context % self.stride:
            return None
        return Bounds(context, rows, Bound(rows, self.skip, 0, rows), constant(rows, rows))


@dataclass(frozen=True)
class Column(InColumns, SinglePart):
    """Every ``stride``-th earlier position, self included (Child et al. 2019, section 4.3, second strided factor)."""

    stride: int  # positions; the paper's l
    skip = 0  # no field

    def __post_init__(self) -> None:
        require_positive("stride", self.stride)

    def check(self, context: int) -> None:
        """Raise ConfigError unless the stride divides the context."""
        require_divides("stride", self.stride, context)
