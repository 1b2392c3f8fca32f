"""The last positions of every block, which summarise it for all later ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.errors import ConfigError
from longstride.kernels.forms import Bound, Bounds, Fold, Intervals, Order, constant, intervals_of, ramp, whole
from longstride.kernels.patterns.base import (
    NaturalOrder,
    Pattern,
    PatternDefaults,
    PatternPart,
    require_divides,
    require_positive,
)


@dataclass(frozen=True)
class Summary(PatternDefaults):
    """The summary positions up to the query (Child et al. 2019, section 4.3, second fixed factor).

    Of each block of ``stride`` positions, the head's summary sub-block are the positions
    stride - summary * (index + 1) … stride - summary * index - 1. With ``num_summaries`` above 1 heads take the
    sub-blocks in turn, ``index = head % num_summaries``, by ``for_head``. Queries before the first summary position
    have no key, so their output is 0, unless ``include_self``.
    """

    stride: Annotated[int, Doc("positions in a block; the paper's l")]
    summary: Annotated[int, Doc("positions at a block's end that later blocks read; the paper's c")]
    num_summaries: Annotated[int, Doc("summary sub-blocks that heads take in turn")] = 1
    include_self: Annotated[bool, Doc("a query reads itself too")] = False
    index: int | None = None  # the sub-block of this head; None: not chosen yet, or there is only one

    def __post_init__(self) -> None:
        for name in ("stride", "summary", "num_summaries"):
            require_positive(name, getattr(self, name))
        if self.summary * self.num_summaries > self.stride:
            rule = f"summary x num_summaries must not exceed stride {self.stride}"
            largest = max(1, self.stride // self.num_summaries)
            raise ConfigError.at("summary", self.summary, f"{rule}; largest {largest}")
        if not isinstance(self.include_self, bool):
            raise ConfigError.at("include_self", self.include_self, "must be true or false")
        if self.index is not None and (type(self.index) is not int or not 0 <= self.index < self.num_summaries):
            raise ConfigError.at("index", self.index, f"must be 0 to {self.num_summaries - 1}, or left out")

    def first(self) -> int:
        """The first summary position of a block; ValueError where heads differ and no head was chosen."""
        if self.index is None and self.num_summaries > 1:
            raise ValueError(f"heads differ in {self}: resolve it first, for_head(head)")
        return self.stride - self.summary * ((self.index or 0) + 1)

    def is_summary(self, k: Tensor) -> Tensor:
        """Original positions k to bool: True on the summary positions."""
        offset = k % self.stride - self.first()
        return (offset >= 0) & (offset < self.summary)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        allowed = (k <= q) & self.is_summary(k)
        return allowed | (k == q) if self.include_self else allowed

    def for_head(self, head: int) -> Pattern:
        """The pattern with this head's own summary sub-block."""
        if self.num_summaries == 1 or self.index is not None:
            return self
        return replace(self, index=head % self.num_summaries)

    def parts(self) -> tuple[PatternPart, ...]:
        """The gathered summary keys and, with ``include_self``, the queries that are no summary positions."""
        keys = SummaryKeys(self)
        if not self.include_self:
            return (keys,)
        elsewhere = ((0, self.first()), (self.first() + self.summary, self.stride))
        return (keys, *(SelfBetween(self.stride, first, last) for first, last in elsewhere if first < last))

    def period(self) -> int:
        """Whole blocks."""
        return self.stride

    def check(self, context: int) -> None:
        """Raise ConfigError unless the stride divides the context."""
        require_divides("stride", self.stride, context)


@dataclass(frozen=True)
class SummaryKeys(NaturalOrder):
    """The summary keys, gathered so that they are dense: each query reads a prefix of them."""

    pattern: Summary
    earlier_blocks: bool = False  # leave out the query's own block, which another part holds

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        stride = self.pattern.stride
        before = k // stride < q // stride if self.earlier_blocks else k <= q
        return before & self.pattern.is_summary(k)

    def key_order(self, context: int) -> Order:
        """The summary positions alone, ascending."""
        p = self.pattern
        last = min(max(context % p.stride - p.first(), 0), p.summary)  # those of a last block that is not whole
        if p.stride > context:
            return Fold(last, max(last, 1), whole(context), 1, min(p.first(), context))
        return Fold(context // p.stride * p.summary + last, p.summary, p.stride, 1, p.first())

    def by_query(self, context: int) -> Bounds:
        """Query i reads every summary key of earlier blocks, and those of its own up to itself."""
        p = self.pattern
        if p.stride > context:  # one block, and not a whole one
            high = constant(0) if self.earlier_blocks else ramp(1 - min(p.first(), context), 0, min(p.summary, context))
            return Bounds(context, whole(context), constant(0), high)
        high = constant(0, p.summary) if self.earlier_blocks else Bound(p.summary, 1 - p.first(), 0, p.summary)
        return Bounds(context, p.stride, constant(0), high)

    def by_key(self, context: int) -> Bounds | None:
        """Each key is read from its own position on, or from the next block."""
        p = self.pattern
        if context % p.stride:
            return None  # no block need come after the last key
        low = constant(p.stride, p.stride) if self.earlier_blocks else Bound(p.stride, p.first(), 0, p.stride)
        return Bounds(context // p.stride * p.summary, p.summary, low, constant(context))


@dataclass(frozen=True)
class SelfBetween(NaturalOrder):
    """The query's own position, where it is one of ``first … last - 1`` of its block."""

    stride: int
    first: int
    last: int

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return (k == q) & (k % self.stride >= self.first) & (k % self.stride < self.last)

    def by_query(self, context: int) -> Bounds | Intervals:
        """Query i reads key i or nothing. Empty intervals lie at an end of the run, so that no bound decreases."""
        bounds = self._bounds(context)
        if context % self.stride == 0:
            return bounds
        # In a block that is not whole, both ends may lie behind the last position.
        return Intervals(*(bound.clamp_max(context) for bound in intervals_of(bounds)))

    def by_key(self, context: int) -> Bounds | None:
        """The same intervals: a key is read by its own query alone."""
        return self._bounds(context) if context % self.stride == 0 else None

    def _bounds(self, context: int) -> Bounds:
        low, high = (Bound(self.stride, offset, self.first, self.last) for offset in (0, 1))
        return Bounds(context, self.stride, low, high)
