"""Every earlier position, and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.forms import Bound, Bounds, constant, ramp, whole
from longstride.kernels.patterns.base import (
    Align,
    NaturalOrder,
    PatternDefaults,
    PatternPart,
    SinglePart,
    require_align,
    require_divides,
    require_positive,
)
from longstride.kernels.patterns.column import Entries


@dataclass(frozen=True)
class Dense(SinglePart):
    """Full causal attention: every position up to and including its own (Child et al. 2019, section 4.1)."""

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    def by_query(self, context: int) -> Bounds:
        """Let query i read keys 0 … i."""
        return Bounds(context, whole(context), constant(0), ramp(1, 1, context))

    def by_key(self, context: int) -> Bounds:
        """Let key i be read by queries i … N-1."""
        return Bounds(context, whole(context), ramp(0, 0, context), constant(context))

    def period(self) -> int:
        return 1


@dataclass(frozen=True, repr=False)
class Local(PatternDefaults):
    """The last ``window`` positions, self included (section 4.3 of Child et al. 2019, first factor as in their code).

    With a ``dilation`` d they are at distances 0, d, 2d, …: still ``window`` keys, but d times as far (Beltagy et al.
    2020, section 3.1, causal).

    With ``align`` "target" and a dilation above 1, query q reads the positions q + 1 - k * dilation from 1 on, for k
    from 1 to ``window``: see ``Column``. The query itself is not one of them.
    """

    window: Annotated[int, Doc("keys, the query included")]
    dilation: Annotated[int, Doc("distance between keys")] = 1
    align: Align = "row"

    left_out_at_default = ("dilation", "align")

    def __post_init__(self) -> None:
        require_positive("window", self.window)
        require_positive("dilation", self.dilation)
        require_align(self.align)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        (part,) = self.parts()
        return part.mask(q, k)

    def parts(self) -> tuple[PatternPart, ...]:
        """Return the window; with a dilation, its entries in a column."""
        if self.dilation == 1:
            return (Window(self.window),)
        return (Entries(self.dilation, int(self.align == "target"), self.window, align=self.align),)

    def period(self) -> int | None:
        """Return 1, as only distances matter; None if position 0 differs."""
        return 1 if self.dilation == 1 or self.align == "row" else None

    def check(self, context: int) -> None:
        require_divides("dilation", self.dilation, context)


@dataclass(frozen=True)
class Window(NaturalOrder):
    """The last ``size`` positions. With a ``grain`` g: the query's block of g positions and full blocks before it."""

    size: int  # positions, a multiple of the grain
    grain: int = 1

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - q % self.grain + (self.grain - 1) - k < self.size)

    def by_query(self, context: int) -> Bounds:
        """Let query i read keys max(0, i - size + 1) … i, for a grain of 1."""
        size = min(self.size, context + self.grain - 1)
        low = Bound(0, self.grain - size, 0, context, self.grain)
        return Bounds(context, whole(context), low, ramp(1, 1, context))

    def by_key(self, context: int) -> Bounds:
        """Let key i be read by queries i … min(i + size, N) - 1, for a grain of 1."""
        high = Bound(0, min(self.size, context), 0, context, self.grain)
        return Bounds(context, whole(context), ramp(0, 0, context), high)
