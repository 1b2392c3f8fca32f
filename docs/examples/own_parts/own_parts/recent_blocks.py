"""A pattern: the query's own block of positions, and the whole block before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longstride.kernels.forms import Intervals
from longstride.kernels.patterns.base import SinglePart, require_positive


@dataclass(frozen=True)
class RecentBlocks(SinglePart):
    """The JSON object ``{"type": "recent_blocks", "size": 16}``."""

    size: int  # positions of a block

    def __post_init__(self) -> None:
        """Refuse a size that is no positive integer."""
        require_positive("size", self.size)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Say for positions q and k, broadcastable, whether q reads k: the definition."""
        return (k <= q) & (q // self.size - k // self.size <= 1)

    def by_query(self, context: int) -> Intervals:
        """Give the interval of keys that each query reads, for the kernels; a test holds it to the mask."""
        rows = torch.arange(context)
        return Intervals((rows // self.size - 1).clamp_min(0) * self.size, rows + 1)

    def by_key(self, context: int) -> None:
        """Leave it to the kernels, which derive it from ``by_query``."""
