"""The paper's strided pattern: a local window joined with a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from longstride.kernels.errors import ConfigError
from longstride.kernels.patterns.base import Pattern, PatternPart, UsualPattern, require_positive
from longstride.kernels.patterns.column import Column, InColumns
from longstride.kernels.patterns.local import Local


@dataclass(frozen=True)
class DistantColumn(InColumns):
    """A column without its last ``skip`` entries, which the local window already holds."""

    stride: int
    skip: int


@dataclass(frozen=True)
class Strided(UsualPattern):
    """A window of ``stride`` joined with every ``stride``-th position (Child et al. 2019, section 4.3).

    ``span`` chooses the window: "released" counts ``stride`` positions, self included, as the authors' code does;
    "paper" counts one more, as the set in the paper does.
    """

    stride: int  # positions; the paper's l
    span: Literal["paper", "released"] = "released"

    def __post_init__(self) -> None:
        require_positive("stride", self.stride)
        if self.span not in ("paper", "released"):
            raise ConfigError.at("span", self.span, "must be paper or released")

    def _window(self) -> int:
        return self.stride + (self.span == "paper")

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        local, column = self.factors()
        return local.mask(q, k) | column.mask(q, k)

    def factors(self) -> tuple[Pattern, ...]:
        """Local, then column."""
        return (Local(self._window()), Column(self.stride))

    def parts(self) -> tuple[PatternPart, ...]:
        """The window, and the column's entries before it."""
        skip = -(-self._window() // self.stride)  # the window holds the offsets 0, stride, … below its width
        return (Local(self._window()), DistantColumn(self.stride, skip))
