"""Earlier positions of the same block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.patterns.base import Intervals
from kernels.patterns.single import SinglePart, positions, require_divides, require_positive


@dataclass(frozen=True)
class Block(SinglePart):
    """Earlier positions of the query's own block, self included (section 4.3, first fixed factor)."""

    stride: int  # positions in a block; the paper's l

    def __post_init__(self) -> None:
        require_positive("stride", self.stride)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return (k <= q) & (q // self.stride == k // self.stride)

    def intervals(self, context: int) -> Intervals:
        """Query i reads its block from the first position to i."""
        i = positions(context)
        return Intervals(i - i % self.stride, i + 1)

    def check(self, context: int) -> None:
        """Raise ConfigError unless the stride divides the context."""
        require_divides("stride", self.stride, context)
