"""The last positions of every block, which summarise it for all later ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.errors import ConfigError
from kernels.patterns.base import Intervals, Part, Pattern
from kernels.patterns.single import positions, require_divides, require_positive


@dataclass(frozen=True)
class Summary:
    """The summary positions up to the query (Child et al. 2019, section 4.3, second fixed factor).

    Of each block of ``stride`` positions, the head's summary sub-block are the positions
    stride - summary * (index + 1) … stride - summary * index - 1. With ``num_summaries`` above 1 heads take the
    sub-blocks in turn, ``index = head % num_summaries``, by ``for_head``. Queries before the first summary position
    have no key, so their output is 0, unless ``include_self``.
    """

    stride: int  # positions in a block; the paper's l
    summary: int  # positions in a sub-block; the paper's c
    num_summaries: int = 1  # sub-blocks that heads take in turn
    include_self: bool = False
    index: int | None = None  # the sub-block of this head; None where it is still to be chosen, or there is only one

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
        """The first summary position of a block; ValueError where heads differ and none was chosen."""
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

    def factors(self) -> tuple[Pattern, ...]:
        """There is nothing to take apart."""
        return (self,)

    def parts(self) -> tuple[Part, ...]:
        """The gathered summary keys, and self where it is asked for and no summary position."""
        keys = SummaryKeys(self)
        return (keys, SelfElsewhere(self)) if self.include_self else (keys,)

    def check(self, context: int) -> None:
        """Raise ConfigError unless the stride divides the context."""
        require_divides("stride", self.stride, context)


@dataclass(frozen=True)
class SummaryKeys:
    """The summary keys, gathered first so that they are dense: a query reads the first so many of them."""

    pattern: Summary
    earlier_blocks: bool = False  # leave out the query's own block, which another part holds

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        stride = self.pattern.stride
        before = k // stride < q // stride if self.earlier_blocks else k <= q
        return before & self.pattern.is_summary(k)

    def query_order(self, context: int) -> Tensor | None:
        """Natural."""
        return None

    def key_order(self, context: int) -> Tensor | None:
        """The summary positions alone, ascending."""
        k = positions(context)
        return k[self.pattern.is_summary(k)]

    def intervals(self, context: int) -> Intervals:
        """Query i reads every summary key of earlier blocks, and those of its own up to itself."""
        p, i = self.pattern, positions(context)
        high = i // p.stride * p.summary
        if not self.earlier_blocks:
            high = high + (i % p.stride - p.first() + 1).clamp(0, p.summary)
        return Intervals(torch.zeros_like(i), high)


@dataclass(frozen=True)
class SelfElsewhere:
    """The query's own position, unless it is a summary position already."""

    pattern: Summary

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return (k == q) & ~self.pattern.is_summary(k)

    def query_order(self, context: int) -> Tensor | None:
        """Natural."""
        return None

    def key_order(self, context: int) -> Tensor | None:
        """Natural, all keys."""
        return None

    def intervals(self, context: int) -> Intervals:
        """Query i reads key i, or an empty interval after it, so that neither bound ever decreases."""
        i = positions(context)
        return Intervals(i + self.pattern.is_summary(i).long(), i + 1)
