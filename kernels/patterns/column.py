"""Positions a whole number of strides back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.patterns.base import Intervals
from kernels.patterns.single import SinglePart, positions, require_divides, require_positive


def column_order(context: int, stride: int) -> Tensor:
    """Positions grouped by residue, so that each column is dense and causal: (N,) int64."""
    position = positions(-(-context // stride) * stride).view(-1, stride).T.reshape(-1)
    return position[position < context]


def column_intervals(context: int, stride: int, skip: int) -> Intervals:
    """Each reordered query reads its column from the top to ``skip`` entries above itself (0: to itself)."""
    row = positions(context)
    top = row - column_order(context, stride) // stride
    return Intervals(top, torch.maximum(row + 1 - skip, top))


@dataclass(frozen=True)
class Column(SinglePart):
    """Every ``stride``-th earlier position, self included (Child et al. 2019, section 4.3, second strided factor)."""

    stride: int  # positions; the paper's l

    def __post_init__(self) -> None:
        require_positive("stride", self.stride)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return (k <= q) & ((q - k) % self.stride == 0)

    def query_order(self, context: int) -> Tensor | None:
        """Column after column."""
        return column_order(context, self.stride)

    def key_order(self, context: int) -> Tensor | None:
        """Column after column."""
        return column_order(context, self.stride)

    def intervals(self, context: int) -> Intervals:
        """Each query reads its own column down to itself."""
        return column_intervals(context, self.stride, skip=0)

    def check(self, context: int) -> None:
        """Raise ConfigError unless the stride divides the context."""
        require_divides("stride", self.stride, context)
