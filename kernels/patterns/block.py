"""Earlier positions of the same block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.forms import Bound, Bounds, constant, whole
from longstride.kernels.patterns.base import SinglePart, require_divides, require_positive


@dataclass(frozen=True)
class Block(SinglePart):
    """Earlier positions of the query's own block, self included (section 4.3, first fixed factor)."""

    stride: Annotated[int, Doc("positions in a block; the paper's l")]

    def __post_init__(self) -> None:
        require_positive("stride", self.stride)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return (k <= q) & (q // self.stride == k // self.stride)

    def by_query(self, context: int) -> Bounds:
        """Query i reads its block from the first position to i."""
        stride = min(self.stride, whole(context))
        return Bounds(context, stride, constant(0, stride), Bound(stride, 1, 1, stride))

    def by_key(self, context: int) -> Bounds | None:
        """Key i is read by the queries from i to the end of its block."""
        stride = min(self.stride, whole(context))
        if context % stride:
            return None  # the last block is short
        return Bounds(context, stride, Bound(stride, 0, 0, stride), constant(stride, stride))

    def period(self) -> int:
        """Whole blocks."""
        return self.stride

    def check(self, context: int) -> None:
        """Raise ConfigError unless the stride divides the context."""
        require_divides("stride", self.stride, context)
