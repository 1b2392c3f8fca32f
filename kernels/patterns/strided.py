"""The paper's strided pattern: a local window joined with a column."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Literal

from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.errors import ConfigError
from longstride.kernels.patterns.base import (
    MOST_POSITIONS,
    Align,
    Causal,
    Pattern,
    PatternDefaults,
    PatternPart,
    require_divides,
    require_positive,
)
from longstride.kernels.patterns.column import Column, Entries
from longstride.kernels.patterns.local import Local

MOST_FACTORS = 32  # with a stride of 2, they span every context


@dataclass(frozen=True, repr=False)
class Strided(PatternDefaults):
    """A window of ``stride`` positions joined with every ``stride``-th position (Child et al. 2019, section 4.3).

    ``span`` chooses the window: "released" counts ``stride`` positions, self included, as the authors' code does;
    "paper" counts one more, as the set in the paper does.

    With ``num_factors`` p above 2 there are factors between the two (section 4.2 allows any p). Factor j reads at
    distances that are multiples of stride^(j-1) below stride^j. The last factor reads at all multiples of
    stride^(p-1). If the stride is the p-th root of N, there are O(N · ᵖ√N) pairs, and p layers with one factor each
    reach every earlier position.

    ``align`` is that of all factors but the window: see ``Column``. With ``causal`` False, every distance is read on
    both sides.
    """

    stride: Annotated[int, Doc("size of the window and distance between keys of the column; the paper's l")]
    span: Annotated[Literal["paper", "released"], Doc("paper: the window counts one position more")] = "released"
    num_factors: Annotated[int, Doc("factors that together reach every earlier position; the paper's p")] = 2
    align: Align = "row"
    causal: Causal = True

    left_out_at_default = ("num_factors", "align", "causal")

    def __post_init__(self) -> None:
        self.require_fields("stride")
        if self.span not in ("paper", "released"):
            raise ConfigError.at("span", self.span, "must be paper or released")
        require_positive("num_factors", self.num_factors, least=2)
        if self.num_factors > MOST_FACTORS:
            raise ConfigError.at("num_factors", self.num_factors, f"must be at most {MOST_FACTORS}")

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return reduce(or_, (factor.mask(q, k) for factor in self.factors()))

    def factors(self) -> tuple[Pattern, ...]:
        """Return the window, then dilated windows if there are more than two factors, then the column."""
        *between, last = self._strides()
        dilated = (Local(self.stride, stride, self.align, self.causal) for stride in between)
        return (Local(self._window(), causal=self.causal), *dilated, Column(last, self.align, self.causal))

    def parts(self) -> tuple[PatternPart, ...]:
        """Return the window, and the entries of each further factor beyond it, which are disjoint."""
        window = Local(self._window(), causal=self.causal)
        *between, last = self._strides()
        if self.align == "row":
            # The window has the distances 0, stride, … below its width. Each other factor has the query itself.
            skips = {stride: -(-window.window // stride) for stride in (*between, last)}
            end = self.stride
        else:
            # Counted from the target, the window has the distances 1 to its width. A factor's first distance is the
            # last one of the factor before it.
            skips = {stride: max(window.window // stride, 1) + 1 for stride in (*between, last)}
            end = self.stride + 1
        beyond = [*((s, skips[s], end) for s in between if skips[s] < end), (last, skips[last], None)]
        parts = [*window.parts(), *(Entries(stride, first, end, align=self.align) for stride, first, end in beyond)]
        if not self.causal:
            parts += [Entries(stride, end and 1 - end, 1 - first) for stride, first, end in beyond]
        return tuple(parts)

    def _window(self) -> int:
        return self.stride + (self.span == "paper")

    def _strides(self) -> list[int]:
        """Return the strides of the factors after the first."""
        return [min(self.stride**power, MOST_POSITIONS) for power in range(1, self.num_factors)]

    def period(self) -> int | None:
        """Return 1, as only distances matter; None with ``align`` "target", as position 0 differs."""
        return 1 if self.align == "row" else None

    def check(self, context: int) -> None:
        power = self.num_factors - 1
        if power == 1:
            require_divides("stride", self.stride, context)
        elif context % self._strides()[-1]:
            most = round(context ** (1 / power)) + 1
            good = [s for s in range(1, most + 1) if context % s**power == 0]
            near = min(good, key=lambda s: abs(s - self.stride))
            rule = f"its power {power} must divide context {context}; nearest {near}"
            raise ConfigError.at("stride", self.stride, rule)
