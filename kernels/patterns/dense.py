"""Every earlier position."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longstride.kernels.forms import Bounds, constant, ramp, whole
from longstride.kernels.patterns.base import SinglePart


@dataclass(frozen=True)
class Dense(SinglePart):
    """Full causal attention: every position up to and including its own (Child et al. 2019, section 4.1)."""

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return k <= q

    def by_query(self, context: int) -> Bounds:
        """Query i reads keys 0 … i."""
        return Bounds(context, whole(context), constant(0), ramp(1, 1, context))

    def by_key(self, context: int) -> Bounds:
        """Key i is read by queries i … N-1."""
        return Bounds(context, whole(context), ramp(0, 0, context), constant(context))

    def period(self) -> int:
        """Any: it goes by distances."""
        return 1
