"""The most recent positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longstride.kernels.forms import Bounds, ramp, whole
from longstride.kernels.patterns.base import SinglePart, require_positive


@dataclass(frozen=True)
class Local(SinglePart):
    """The last ``window`` positions, self counted (the released code's reading of section 4.3's first factor)."""

    window: int  # positions, the query itself among them

    def __post_init__(self) -> None:
        require_positive("window", self.window)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return (k <= q) & (q - k < self.window)

    def by_query(self, context: int) -> Bounds:
        """Query i reads keys max(0, i - window + 1) … i."""
        return Bounds(context, whole(context), ramp(1 - min(self.window, context), 0, context), ramp(1, 1, context))

    def by_key(self, context: int) -> Bounds:
        """Key i is read by queries i … min(i + window, N) - 1."""
        return Bounds(context, whole(context), ramp(0, 0, context), ramp(min(self.window, context), 0, context))
