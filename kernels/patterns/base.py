"""The protocols of patterns and their parts, and defaults that most patterns share.

Letters: N positions, M keys a part reads (M <= N). All positions are 0-indexed.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.errors import ConfigError
from longstride.kernels.forms import Bounds, Intervals, Order

MOST_POSITIONS = 1 << 62  # largest field of a pattern: beyond every context, and within 64 bits
Align = Annotated[Literal["row", "target"], Doc("where strides count from: the row, or the token that it predicts")]
Causal = Annotated[bool, Doc("false: also read later positions")]


@runtime_checkable
class PatternPart(Protocol):
    """Pairs in which each query reads one interval of keys, once queries and keys are ordered. Hashable."""

    def __hash__(self) -> int:
        """Return a hash, as plans are cached by part."""
        ...

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Return True where q attends to k, for original positions q and k, int64 and broadcastable."""
        ...

    def query_order(self, context: int) -> Order:
        """Return the original position of each reordered query, a permutation."""
        ...

    def key_order(self, context: int) -> Order:
        """Return the original position of each reordered key, without repeats; keys may be missing."""
        ...

    def by_query(self, context: int) -> Bounds | Intervals:
        """Return the interval of keys of each reordered query, counted in the key order."""
        ...

    def by_key(self, context: int) -> Bounds | None:
        """Return the interval of queries of each reordered key, counted in the query order; None: no closed form."""
        ...


@runtime_checkable
class Pattern(Protocol):
    """The positions that each position attends to. A frozen, hashable value.

    A pattern that reads later positions says so by an attribute ``causal`` that is False (``declares_causal``).
    """

    def __hash__(self) -> int:
        """Return a hash, as plans are cached by pattern."""
        ...

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Return True where q attends to k: the definition, for positions q and k, int64 and broadcastable."""
        ...

    def for_head(self, head: int) -> Pattern:
        """Return the pattern of this head if heads differ, else itself."""
        ...

    def factors(self) -> tuple[Pattern, ...]:
        """Return the factors that layers or heads take in turn (Child et al. 2019, section 4.2)."""
        ...

    def parts(self) -> tuple[PatternPart, ...]:
        """Return disjoint parts whose union is the pattern. Their softmaxes are merged by logsumexp."""
        ...

    def period(self) -> int | None:
        """Return a p such that (q + p, k + p) is allowed exactly if (q, k) is; None if there is none."""
        ...

    def check(self, context: int) -> None:
        """Raise ConfigError if a model of this context cannot use the pattern evenly."""
        ...


class NaturalOrder:
    """A part whose queries and keys are in the natural order."""

    def query_order(self, context: int) -> Order:
        return None

    def key_order(self, context: int) -> Order:
        return None


class PatternDefaults:
    """Defaults of most patterns: heads are alike, there is one factor, and any context will do."""

    causal: bool = True  # no position reads a later one
    left_out_at_default: ClassVar[tuple[str, ...]] = ()  # fields added later, omitted from JSON at their default

    def __repr__(self) -> str:
        """Return the repr of a dataclass with ``repr=False``, without omitted fields."""
        shown = {
            k: v for k, v in vars(self).items() if k not in self.left_out_at_default or v != getattr(type(self), k)
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def require_fields(self, *positive: str) -> None:
        """Raise ConfigError unless these fields are positive integers, ``causal`` is a bool, and ``align`` fits it."""
        for name in positive:
            require_positive(name, getattr(self, name))
        require_boolean("causal", self.causal)
        align = getattr(self, "align", "row")
        if align not in ("row", "target"):
            raise ConfigError.at("align", align, "must be row or target")
        if align == "target" and not self.causal:
            raise ConfigError.at("align", align, 'needs a causal pattern; remove it, or "causal": false')

    def for_head(self, head: int) -> Pattern:
        return self  # type: ignore[return-value]

    def factors(self) -> tuple[Pattern, ...]:
        return (self,)  # type: ignore[return-value]

    def period(self) -> int | None:
        return None

    def check(self, context: int) -> None:
        """Accept every context."""


def declares_causal(pattern: object) -> bool:
    """Whether a pattern promises to read no later position; one of another package that says nothing does."""
    return bool(getattr(pattern, "causal", True))


class SinglePart(NaturalOrder, PatternDefaults):
    """A pattern that is its own only part: one interval per query is enough."""

    def parts(self) -> tuple[PatternPart, ...]:
        return (self,)  # type: ignore[return-value]


def require_positive(name: str, value: object, least: int = 1) -> None:
    """Raise ConfigError unless the value is an integer from ``least`` to ``MOST_POSITIONS``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError.at(name, value, f"must be an integer of at least {least}")
    if value > MOST_POSITIONS:
        raise ConfigError.at(name, value, f"must be at most {MOST_POSITIONS}, which is beyond every context")


def require_boolean(name: str, value: object) -> None:
    """Raise ConfigError unless the value is a bool."""
    if not isinstance(value, bool):
        raise ConfigError.at(name, value, "must be true or false")


def divisors(number: int) -> list[int]:
    """Return all divisors of a number from 1 on, ascending, in √number steps."""
    below = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return below + [number // d for d in reversed(below) if d * d != number]


def require_divides(name: str, value: int, context: int) -> None:
    """Raise ConfigError, naming the nearest divisors, unless ``value`` divides the context."""
    if context % value == 0:
        return
    candidates = divisors(context)
    below = max(d for d in candidates if d < value) if value > 1 else None
    above = min((d for d in candidates if d > value), default=None)
    nearest = ", ".join(str(d) for d in (below, above) if d is not None)
    raise ConfigError.at(name, value, f"must divide context {context}; nearest {nearest}")
