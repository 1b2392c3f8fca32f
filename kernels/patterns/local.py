"""Every position, and those within a window; earlier ones alone, or on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.forms import Bound, Bounds, Intervals, constant, intervals_of, ramp, whole
from longstride.kernels.patterns.base import (
    Align,
    Causal,
    NaturalOrder,
    PatternDefaults,
    PatternPart,
    SinglePart,
    require_divides,
)
from longstride.kernels.patterns.column import Entries


@dataclass(frozen=True, repr=False)
class Dense(SinglePart):
    """Full attention: every position up to and including its own (Child et al. 2019, section 4.1), or every one."""

    causal: Causal = True

    left_out_at_default = ("causal",)

    def __post_init__(self) -> None:
        self.require_fields()

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return k <= q if self.causal else (q == q) & (k == k)  # all, of the broadcast shape

    def by_query(self, context: int) -> Bounds:
        """Let query i read keys 0 … i, or all."""
        high = ramp(1, 1, context) if self.causal else constant(context)
        return Bounds(context, whole(context), constant(0), high)

    def by_key(self, context: int) -> Bounds:
        """Let key i be read by queries i … N-1, or all."""
        low = ramp(0, 0, context) if self.causal else constant(0)
        return Bounds(context, whole(context), low, constant(context))

    def period(self) -> int:
        return 1


@dataclass(frozen=True, repr=False)
class Local(PatternDefaults):
    """The last ``window`` positions, self included (section 4.3 of Child et al. 2019, first factor as in their code).

    With a ``dilation`` d they are at distances 0, d, 2d, …: still ``window`` keys, but d times as far (Beltagy et al.
    2020, section 3.1, causal).

    With ``align`` "target" and a dilation above 1, query q reads the positions q + 1 - k * dilation from 1 on, for k
    from 1 to ``window``: see ``Column``. The query itself is not one of them.

    With ``causal`` False the same distances are read on the other side too: 2 ``window`` - 1 keys.
    """

    window: Annotated[int, Doc("keys, the query included")]
    dilation: Annotated[int, Doc("distance between keys")] = 1
    align: Align = "row"
    causal: Causal = True

    left_out_at_default = ("dilation", "align", "causal")

    def __post_init__(self) -> None:
        self.require_fields("window", "dilation")

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        (part,) = self.parts()
        return part.mask(q, k)

    def parts(self) -> tuple[PatternPart, ...]:
        """Return the window; with a dilation, its entries in a column."""
        if self.dilation == 1:
            return (Window(self.window, causal=self.causal),)
        if not self.causal:
            return (Entries(self.dilation, 1 - self.window, self.window),)
        first = int(self.align == "target")
        return (Entries(self.dilation, first, first + self.window, align=self.align),)

    def period(self) -> int | None:
        """Return 1, as only distances matter; None if position 0 differs."""
        return 1 if self.dilation == 1 or self.align == "row" else None

    def check(self, context: int) -> None:
        require_divides("dilation", self.dilation, context)


@dataclass(frozen=True)
class Window(NaturalOrder):
    """The last ``size`` positions. With a ``grain`` g: the query's block of g positions and full blocks before it.

    With ``causal`` False also as many on the other side, between positions from ``start`` on.
    """

    size: int  # positions, a multiple of the grain
    grain: int = 1
    start: int = 0  # a multiple of the grain; 0 if causal
    causal: bool = True

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        first = q - q % self.grain  # of the query's block
        is_near = first + (self.grain - 1) - k < self.size
        if self.causal:
            return (k <= q) & is_near
        return is_near & (k - first < self.size) & (q >= self.start) & (k >= self.start)

    def by_query(self, context: int) -> Bounds | Intervals:
        """Let query i read keys max(0, i - size + 1) … i, or min(i + size, N) - 1, for a grain of 1."""
        size, start = min(self.size, context + self.grain - 1), min(self.start, context)
        low = Bound(0, self.grain - size, start, context, self.grain)
        if self.causal:
            return Bounds(context, whole(context), low, ramp(1, 1, context))
        bounds = Bounds(context, whole(context), low, Bound(0, size, start, context, self.grain))
        if not start:
            return bounds
        low_of_row, high = intervals_of(bounds)
        return Intervals(low_of_row, high.where(torch.arange(context) >= start, start))

    def by_key(self, context: int) -> Bounds | None:
        """Let key i be read by queries i, or max(0, i - size + 1), … min(i + size, N) - 1, for a grain of 1."""
        if not self.causal:  # the same pairs with queries and keys exchanged
            bounds = self.by_query(context)
            return bounds if isinstance(bounds, Bounds) else None
        high = Bound(0, min(self.size, context), 0, context, self.grain)
        return Bounds(context, whole(context), ramp(0, 0, context), high)
