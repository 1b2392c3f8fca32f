"""The paper's strided pattern: a local window joined with a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from longstride.kernels.errors import ConfigError
from longstride.kernels.patterns.base import PatternDefaults, PatternPart, require_divides, require_positive
from longstride.kernels.patterns.column import Column, InColumns
from longstride.kernels.patterns.local import Local


@dataclass(frozen=True)
class DistantColumn(InColumns):
    """A column without its last ``skip`` entries, which the local window already holds."""

    stride: int
    skip: int


@dataclass(frozen=True)
class Strided(PatternDefaults):
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

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        local, column = self.factors()
        return local.mask(q, k) | column.mask(q, k)

    def factors(self) -> tuple[Local, Column]:
        """Local, then column."""
        return Local(self.stride + (self.span == "paper")), Column(self.stride)

    def parts(self) -> tuple[PatternPart, ...]:
        """The window, and the column's entries before it."""
        local, _ = self.factors()
        skip = -(-local.window // self.stride)  # the window holds the offsets 0, stride, … below its width
        return local, DistantColumn(self.stride, skip)

    def check(self, context: int) -> None:
        """Raise ConfigError unless the stride divides the context."""
        require_divides("stride", self.stride, context)
