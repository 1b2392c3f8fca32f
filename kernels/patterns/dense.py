"""Every earlier position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.patterns.base import Intervals
from kernels.patterns.single import SinglePart, positions


@dataclass(frozen=True)
class Dense(SinglePart):
    """Full causal attention: every position up to and including its own (Child et al. 2019, section 4.1)."""

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return k <= q

    def intervals(self, context: int) -> Intervals:
        """Query i reads keys 0 … i."""
        i = positions(context)
        return Intervals(torch.zeros_like(i), i + 1)
