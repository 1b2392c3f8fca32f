"""What the patterns of one part have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longstride.kernels.errors import ConfigError
from longstride.kernels.patterns.forms import Order

if TYPE_CHECKING:
    from longstride.kernels.patterns.base import Part, Pattern


class SinglePart:
    """A pattern that is its own only factor and its own only part, in the natural order."""

    __slots__ = ()

    def for_head(self, head: int) -> Pattern:
        """All heads are alike."""
        return self  # type: ignore[return-value]

    def factors(self) -> tuple[Pattern, ...]:
        """There is nothing to take apart."""
        return (self,)  # type: ignore[return-value]

    def parts(self) -> tuple[Part, ...]:
        """One interval a query is enough."""
        return (self,)  # type: ignore[return-value]

    def query_order(self, context: int) -> Order:
        """Natural."""
        return None

    def key_order(self, context: int) -> Order:
        """Natural, all keys."""
        return None

    def check(self, context: int) -> None:
        """Any context will do."""


def positions(context: int) -> Tensor:
    """0 … N-1: (N,) int64."""
    return torch.arange(context, dtype=torch.int64)


def require_positive(name: str, value: object) -> None:
    """Raise ConfigError unless the value is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError.at(name, value, "must be an integer of at least 1")


def require_divides(name: str, value: int, context: int) -> None:
    """Raise ConfigError, naming the nearest divisors, unless ``value`` divides the context."""
    if context % value == 0:
        return
    divisors = [d for d in range(1, context + 1) if context % d == 0]
    below = max(d for d in divisors if d < value) if value > 1 else None
    above = min((d for d in divisors if d > value), default=None)
    nearest = ", ".join(str(d) for d in (below, above) if d is not None)
    raise ConfigError.at(name, value, f"must divide context {context}; nearest {nearest}")
