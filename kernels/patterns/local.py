"""The most recent positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.forms import Bound, Bounds, ramp, whole
from longstride.kernels.patterns.base import (
    NaturalOrder,
    PatternDefaults,
    PatternPart,
    require_divides,
    require_positive,
)
from longstride.kernels.patterns.column import Entries


@dataclass(frozen=True, repr=False)
class Local(PatternDefaults):
    """The last ``window`` positions, self counted (the released code's reading of section 4.3's first factor).

    With a ``dilation`` d they are those at distances 0, d, 2d, …: still ``window`` keys, d times as far (Beltagy et al.
    2020, section 3.1, causal).
    """

    window: Annotated[int, Doc("keys, the query itself among them")]
    dilation: Annotated[int, Doc("positions from one key to the next")] = 1

    left_out_at_default = ("dilation",)

    def __post_init__(self) -> None:
        require_positive("window", self.window)
        require_positive("dilation", self.dilation)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        (only,) = self.parts()
        return only.mask(q, k)

    def parts(self) -> tuple[PatternPart, ...]:
        """The window, or its entries of the query's column."""
        return (Window(self.window) if self.dilation == 1 else Entries(self.dilation, count=self.window),)

    def period(self) -> int:
        """Any: it goes by distances."""
        return 1

    def check(self, context: int) -> None:
        """Raise ConfigError unless the dilation divides the context."""
        require_divides("dilation", self.dilation, context)


@dataclass(frozen=True)
class Window(NaturalOrder):
    """The last ``size`` positions; with a ``grain`` g those of the query's block of g, and of whole ones before it."""

    size: int  # positions, a multiple of the grain
    grain: int = 1

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return (k <= q) & (q - q % self.grain + (self.grain - 1) - k < self.size)

    def by_query(self, context: int) -> Bounds:
        """Query i reads keys max(0, i - size + 1) … i, where the grain is 1."""
        size = min(self.size, context + self.grain - 1)
        low = Bound(0, self.grain - size, 0, context, self.grain)
        return Bounds(context, whole(context), low, ramp(1, 1, context))

    def by_key(self, context: int) -> Bounds:
        """Key i is read by queries i … min(i + size, N) - 1, where the grain is 1."""
        high = Bound(0, min(self.size, context), 0, context, self.grain)
        return Bounds(context, whole(context), ramp(0, 0, context), high)
