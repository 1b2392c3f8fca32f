"""The paper's fixed pattern: the query's block joined with the summaries of earlier ones, and its two factors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.errors import ConfigError
from longstride.kernels.forms import Bound, Bounds, Fold, Intervals, constant, intervals_of, ramp, whole
from longstride.kernels.patterns.base import (
    Causal,
    NaturalOrder,
    Pattern,
    PatternDefaults,
    PatternPart,
    SinglePart,
    require_boolean,
    require_divides,
)


class Blocks(PatternDefaults):
    """Defaults of patterns whose blocks of ``stride`` positions are alike. Heads may differ in their summaries."""

    stride: int
    num_summaries: int = 1
    index: int | None = None

    def for_head(self, head: int) -> Pattern:
        if self.num_summaries == 1 or self.index is not None:
            return self  # type: ignore[return-value]
        return replace(self, index=head % self.num_summaries)  # type: ignore[type-var, return-value]

    def period(self) -> int:
        return self.stride

    def check(self, context: int) -> None:
        require_divides("stride", self.stride, context)


@dataclass(frozen=True, repr=False)
class Block(Blocks, SinglePart):
    """Earlier positions of the query's block, self included (Child et al. 2019, section 4.3, first fixed factor).

    With ``causal`` False, all positions of its block.
    """

    stride: Annotated[int, Doc("positions in a block; the paper's l")]
    causal: Causal = True

    left_out_at_default = ("causal",)

    def __post_init__(self) -> None:
        self.require_fields("stride")

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        in_block = q // self.stride == k // self.stride
        return (k <= q) & in_block if self.causal else in_block

    def by_query(self, context: int) -> Bounds | Intervals:
        """Let query i read its block from the first position to i, or to the last."""
        stride = min(self.stride, whole(context))
        high = Bound(stride, 1, 1, stride) if self.causal else constant(stride, stride)
        bounds = Bounds(context, stride, constant(0, stride), high)
        return bounds if self.causal or context % stride == 0 else clipped(bounds, context)

    def by_key(self, context: int) -> Bounds | None:
        """Let key i be read by the queries from i to the end of its block."""
        stride = min(self.stride, whole(context))
        if context % stride:
            return None  # the last block is short
        low = Bound(stride, 0, 0, stride) if self.causal else constant(0, stride)
        return Bounds(context, stride, low, constant(stride, stride))


@dataclass(frozen=True, repr=False)
class Summary(Blocks):
    """The summary positions up to the query (Child et al. 2019, section 4.3, second fixed factor).

    In each block of ``stride`` positions, the head's summary sub-block has the positions
    stride - summary * (index + 1) … stride - summary * index - 1. With ``num_summaries`` above 1, heads take the
    sub-blocks in turn: ``for_head`` sets ``index = head % num_summaries``. Queries before the first summary position
    have no key, so their output is 0, unless ``include_self`` is set. With ``causal`` False, every query reads all
    summary positions.
    """

    stride: Annotated[int, Doc("positions in a block; the paper's l")]
    summary: Annotated[int, Doc("positions at a block's end, which later blocks read; the paper's c")]
    num_summaries: Annotated[int, Doc("summary sub-blocks that heads take in turn")] = 1
    include_self: Annotated[bool, Doc("whether a query also reads itself")] = False
    index: int | None = None  # the sub-block of this head; None: unresolved, or there is only one
    causal: Causal = True

    left_out_at_default = ("causal",)

    def __post_init__(self) -> None:
        self.require_fields("stride", "summary", "num_summaries")
        if self.summary * self.num_summaries > self.stride:
            rule = f"summary x num_summaries must not exceed stride {self.stride}"
            largest = max(1, self.stride // self.num_summaries)
            raise ConfigError.at("summary", self.summary, f"{rule}; largest {largest}")
        require_boolean("include_self", self.include_self)
        if self.index is not None and (type(self.index) is not int or not 0 <= self.index < self.num_summaries):
            raise ConfigError.at("index", self.index, f"must be 0 to {self.num_summaries - 1}, or left out")

    def first(self) -> int:
        """Return the first summary position of a block; ValueError if heads differ and none was chosen."""
        if self.index is None and self.num_summaries > 1:
            raise ValueError(f"heads differ in {self}: resolve it first, for_head(head)")
        return self.stride - self.summary * ((self.index or 0) + 1)

    def is_summary(self, k: Tensor) -> Tensor:
        """Return True where k, original positions, is a summary position."""
        offset = k % self.stride - self.first()
        return (offset >= 0) & (offset < self.summary)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        allowed = (k <= q) & self.is_summary(k) if self.causal else (q == q) & self.is_summary(k)
        return allowed | (k == q) if self.include_self else allowed

    def parts(self) -> tuple[PatternPart, ...]:
        """Return the summary keys and, with ``include_self``, the queries that are not summary positions."""
        keys = SummaryKeys(self, "up to the query" if self.causal else "everywhere")
        if not self.include_self:
            return (keys,)
        outside = ((0, self.first()), (self.first() + self.summary, self.stride))
        return (keys, *(SelfBetween(self.stride, first, last) for first, last in outside if first < last))


@dataclass(frozen=True)
class SummaryKeys(NaturalOrder):
    """The summary keys in one dense run: each query reads a prefix of it, all of it, or its end."""

    pattern: Summary
    place: Literal["up to the query", "earlier blocks", "later blocks", "everywhere"]

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        if self.place == "everywhere":
            in_place = q == q
        elif self.place == "up to the query":
            in_place = k <= q
        else:
            block_q, block_k = q // self.pattern.stride, k // self.pattern.stride
            in_place = block_k < block_q if self.place == "earlier blocks" else block_k > block_q
        return in_place & self.pattern.is_summary(k)

    def key_order(self, context: int) -> Fold:
        """Return the summary positions, ascending."""
        p = self.pattern
        last = min(max(context % p.stride - p.first(), 0), p.summary)  # those of an incomplete last block
        if p.stride > context:
            return Fold(last, max(last, 1), whole(context), 1, min(p.first(), context))
        return Fold(context // p.stride * p.summary + last, p.summary, p.stride, 1, p.first())

    def by_query(self, context: int) -> Bounds | Intervals:
        """Let query i read the summary keys of earlier blocks and its own up to itself, of later blocks, or all."""
        p, count = self.pattern, self.key_order(context).length
        if self.place == "everywhere":
            return Bounds(context, whole(context), constant(0), constant(count))
        if p.stride > context:  # a single incomplete block
            up_to_query = ramp(1 - min(p.first(), context), 0, min(p.summary, context))
            high = up_to_query if self.place == "up to the query" else constant(0)
            return Bounds(context, whole(context), constant(0), high)
        if self.place == "later blocks":
            later = Bounds(context, p.stride, constant(p.summary, p.summary), constant(count))
            return clipped(later, count) if context % p.stride else later
        earlier = self.place == "earlier blocks"
        high = constant(0, p.summary) if earlier else Bound(p.summary, 1 - p.first(), 0, p.summary)
        return Bounds(context, p.stride, constant(0), high)

    def by_key(self, context: int) -> Bounds | None:
        """Let each key be read from its own position on, from the next block on, before its block, or by all."""
        p, count = self.pattern, self.key_order(context).length
        if self.place == "everywhere":
            return Bounds(count, whole(count), constant(0), constant(context))
        if context % p.stride:
            return None  # there may be no block after the last key
        if self.place == "later blocks":
            return Bounds(count, p.summary, constant(0), constant(0, p.stride))
        earlier = self.place == "earlier blocks"
        low = constant(p.stride, p.stride) if earlier else Bound(p.stride, p.first(), 0, p.stride)
        return Bounds(count, p.summary, low, constant(context))


@dataclass(frozen=True)
class SelfBetween(NaturalOrder):
    """The query's own position, if it is one of ``first … last - 1`` in its block."""

    stride: int
    first: int
    last: int

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return (k == q) & (k % self.stride >= self.first) & (k % self.stride < self.last)

    def by_query(self, context: int) -> Bounds | Intervals:
        """Let query i read key i or nothing. Empty intervals lie at an end of the run, so no bound decreases."""
        bounds = self._bounds(context)
        return clipped(bounds, context) if context % self.stride else bounds

    def by_key(self, context: int) -> Bounds | None:
        """Return the same intervals: a key is read by its own query only."""
        return self._bounds(context) if context % self.stride == 0 else None

    def _bounds(self, context: int) -> Bounds:
        low, high = (Bound(self.stride, offset, self.first, self.last) for offset in (0, 1))
        return Bounds(context, self.stride, low, high)


def clipped(bounds: Bounds, most: int) -> Intervals:
    """Return bounds as vectors of at most ``most`` columns: those of an incomplete last block may lie beyond."""
    return Intervals(*(bound.clamp_max(most) for bound in intervals_of(bounds)))


@dataclass(frozen=True, repr=False)
class Fixed(Blocks):
    """The query's block joined with every block's last positions (Child et al. 2019, section 4.3).

    ``num_summaries`` and ``index`` are those of Summary: heads take different summary sub-blocks in turn. With
    ``causal`` False, a query reads all of its block, and the summaries of later blocks as well.
    """

    stride: Annotated[int, Doc("positions in a block; the paper's l")]
    summary: Annotated[int, Doc("positions at a block's end, which later blocks read; the paper's c")]
    num_summaries: Annotated[int, Doc("summary sub-blocks that heads take in turn")] = 1
    index: int | None = None
    causal: Causal = True

    left_out_at_default = ("causal",)

    def __post_init__(self) -> None:
        self.factors()  # validates the fields

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        block, summary = self.factors()
        return block.mask(q, k) | summary.mask(q, k)

    def factors(self) -> tuple[Block, Summary]:
        summary = Summary(self.stride, self.summary, self.num_summaries, index=self.index, causal=self.causal)
        return Block(self.stride, self.causal), summary

    def parts(self) -> tuple[PatternPart, ...]:
        """Return the query's block, and the summary keys of earlier blocks and of later ones."""
        block, summary = self.factors()
        earlier = SummaryKeys(summary, "earlier blocks")
        return (block, earlier) if self.causal else (block, earlier, SummaryKeys(summary, "later blocks"))
