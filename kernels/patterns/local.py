"""The most recent positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.patterns.base import Intervals
from kernels.patterns.single import SinglePart, positions, require_positive


@dataclass(frozen=True)
class Local(SinglePart):
    """The last ``window`` positions, self counted (the released code's reading of section 4.3's first factor)."""

    window: int  # positions, the query itself among them

    def __post_init__(self) -> None:
        require_positive("window", self.window)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return (k <= q) & (q - k < self.window)

    def intervals(self, context: int) -> Intervals:
        """Query i reads keys max(0, i - window + 1) … i."""
        i = positions(context)
        return Intervals((i - self.window + 1).clamp_min(0), i + 1)
