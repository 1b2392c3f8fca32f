"""What a pattern is, the parts that a plan is built from, and what patterns have in common.

Letters: N positions, M keys a part reads (M <= N). All positions are 0-indexed.
"""

from __future__ import annotations

import math
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from longstride.kernels.errors import ConfigError
from longstride.kernels.forms import Bounds, Intervals, Order

MOST_POSITIONS = 1 << 62  # that a number of a pattern may be: beyond every context, and within 64 bits


@runtime_checkable
class PatternPart(Protocol):
    """Pairs of which each query has one interval of keys, with queries and keys in the right orders. Hashable."""

    def __hash__(self) -> int:
        """Plans are cached by part."""
        ...

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, int64 and broadcastable, to bool: True where q attends to k."""
        ...

    def query_order(self, context: int) -> Order:
        """Original position of each reordered query: a permutation."""
        ...

    def key_order(self, context: int) -> Order:
        """Original position of each reordered key, without repeats; some keys may be left out."""
        ...

    def by_query(self, context: int) -> Bounds | Intervals:
        """The interval of keys of each reordered query, counted in the key order."""
        ...

    def by_key(self, context: int) -> Bounds | None:
        """The interval of queries of each reordered key, counted in the query order; None: no closed form."""
        ...


@runtime_checkable
class Pattern(Protocol):
    """Which positions each position attends to; all of ours are causal. A frozen, hashable value."""

    def __hash__(self) -> int:
        """Plans are cached by pattern."""
        ...

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """The definition: original positions q and k, int64 and broadcastable, to bool."""
        ...

    def for_head(self, head: int) -> Pattern:
        """The pattern of this head, where heads differ; itself where they do not."""
        ...

    def factors(self) -> tuple[Pattern, ...]:
        """The factors that layers or heads take in turn (Child et al. 2019, section 4.2), each a pattern."""
        ...

    def parts(self) -> tuple[PatternPart, ...]:
        """Disjoint parts whose union is the pattern: merged by logsumexp, their softmaxes are that of the pattern."""
        ...

    def period(self) -> int | None:
        """Positions by which it may be moved: it allows (q + period, k + period) just where (q, k); None: by none."""
        ...

    def check(self, context: int) -> None:
        """Raise ConfigError where a model of this context cannot use the pattern evenly."""
        ...


class NaturalOrder:
    """A part whose queries and keys are in the natural order."""

    def query_order(self, context: int) -> Order:
        """Natural."""
        return None

    def key_order(self, context: int) -> Order:
        """Natural, all keys."""
        return None


class PatternDefaults:
    """What most patterns have in common: heads are alike, there is one factor, and any context will do."""

    left_out_at_default: ClassVar[tuple[str, ...]] = ()  # fields that came later: what is written stays as it was

    def __repr__(self) -> str:
        """As a dataclass is written, for those with ``repr=False``: without what is left out."""
        shown = {
            k: v for k, v in vars(self).items() if k not in self.left_out_at_default or v != getattr(type(self), k)
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def for_head(self, head: int) -> Pattern:
        """All heads are alike."""
        return self  # type: ignore[return-value]

    def factors(self) -> tuple[Pattern, ...]:
        """Itself alone."""
        return (self,)  # type: ignore[return-value]

    def period(self) -> int | None:
        """None that is known of."""
        return None

    def check(self, context: int) -> None:
        """Raise ConfigError where a model of this context cannot use the pattern evenly: never."""


class SinglePart(NaturalOrder, PatternDefaults):
    """A pattern that is its own only part: one interval a query is enough."""

    def parts(self) -> tuple[PatternPart, ...]:
        """Itself alone."""
        return (self,)  # type: ignore[return-value]


def require_positive(name: str, value: object, least: int = 1) -> None:
    """Raise ConfigError unless the value is an integer of at least 1, or of another ``least``, and no absurd one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError.at(name, value, f"must be an integer of at least {least}")
    if value > MOST_POSITIONS:
        raise ConfigError.at(name, value, f"must be at most {MOST_POSITIONS}, which is beyond every context")


def divisors(number: int) -> list[int]:
    """All divisors of a number from 1 on, ascending: in √number steps, so that a long context is no long wait."""
    below = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return below + [number // d for d in reversed(below) if d * d != number]


def require_divides(name: str, value: int, context: int) -> None:
    """Raise ConfigError, naming the nearest divisors, unless ``value`` divides the context."""
    if context % value == 0:
        return
    known = divisors(context)
    below = max(d for d in known if d < value) if value > 1 else None
    above = min((d for d in known if d > value), default=None)
    nearest = ", ".join(str(d) for d in (below, above) if d is not None)
    raise ConfigError.at(name, value, f"must divide context {context}; nearest {nearest}")
