"""The paper's strided pattern: a local window joined with a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from longstride.kernels.errors import ConfigError
from longstride.kernels.forms import Bounds, Intervals, Order
from longstride.kernels.patterns.base import Pattern, PatternPart, require_divides, require_positive
from longstride.kernels.patterns.column import Column, column_by_key, column_by_query, column_order
from longstride.kernels.patterns.local import Local


@dataclass(frozen=True)
class DistantColumn:
    """A column without its last ``skip`` entries, which the local window already holds."""

    stride: int
    skip: int  # entries; 1 leaves out the query itself

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return (q - k >= self.skip * self.stride) & ((q - k) % self.stride == 0)

    def query_order(self, context: int) -> Order:
        """Column after column."""
        return column_order(context, self.stride)

    def key_order(self, context: int) -> Order:
        """Column after column."""
        return column_order(context, self.stride)

    def by_query(self, context: int) -> Bounds | Intervals:
        """Each query reads its own column down to ``skip`` entries above itself."""
        return column_by_query(context, self.stride, self.skip)

    def by_key(self, context: int) -> Bounds | None:
        """Each key is read by its own column from ``skip`` entries below itself on."""
        return column_by_key(context, self.stride, self.skip)


@dataclass(frozen=True)
class Strided:
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

    def for_head(self, head: int) -> Pattern:
        """All heads are alike."""
        return self

    def factors(self) -> tuple[Pattern, ...]:
        """Local, then column."""
        return (Local(self._window()), Column(self.stride))

    def parts(self) -> tuple[PatternPart, ...]:
        """The window, and the column's entries before it."""
        skip = -(-self._window() // self.stride)  # the window holds the offsets 0, stride, … below its width
        return (Local(self._window()), DistantColumn(self.stride, skip))

    def check(self, context: int) -> None:
        """Raise ConfigError unless the stride divides the context."""
        require_divides("stride", self.stride, context)
