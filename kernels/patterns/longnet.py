"""LongNet's pattern: the longer a segment, the sparser its positions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.errors import ConfigError
from longstride.kernels.forms import Bound, Bounds, Fold, Intervals, Order, positions_of, whole
from longstride.kernels.patterns.base import Pattern, PatternDefaults, PatternPart, divisors, require_positive
from longstride.kernels.patterns.column import column_order
from longstride.kernels.patterns.fixed import Block

MOST_SEGMENTS = 32  # if each is twice the one before, they span every context


@dataclass(frozen=True)
class LongNet(PatternDefaults):
    """Dilated segments (Ding et al. 2023, section 2.2), causal.

    Member i cuts the sequence into segments of ``segments[i]`` positions. Every ``dilations[i]``-th position of a
    segment takes part, and reads the others up to itself. Heads shift these positions by ``offset = head %
    dilations[i]`` (``for_head``). The first dilation is 1, so every query reads at least its first segment.

    Three layers of all heads reach every earlier position, except some in the segment before the query's: a position
    after the last one of a head in its segment leaves the segment only through other heads.

    The paper computes a softmax for each member and weighs their outputs by the softmax denominators, so a key in
    several members counts several times. Here there is one softmax over the union, and every key counts once.
    """

    segments: Annotated[tuple[int, ...], Doc("positions; each divides the next")]
    dilations: Annotated[
        tuple[int, ...],
        Doc("distance between keys; each divides the next, and the segment before its own"),
    ]
    index: int | None = None  # of this head; None: unresolved, or heads are alike

    def __post_init__(self) -> None:
        for name in ("segments", "dilations"):
            values = getattr(self, name)
            if not isinstance(values, (list, tuple)) or not values:
                raise ConfigError.at(name, values, "must be a list of integers of at least 1")
            if len(values) > MOST_SEGMENTS:
                raise ConfigError.at(name, values, f"must be at most {MOST_SEGMENTS}, as each is twice the one before")
            for number, value in enumerate(values):
                require_positive(f"{name}[{number}]", value)
            object.__setattr__(self, name, tuple(values))  # JSON has lists, which are not hashable
        segments = [self.segments[0]]
        for segment in self.segments[1:]:
            segments.append(segments[-1] * max(2, round(segment / segments[-1])))
        if segments != list(self.segments):
            rule = f"each must be a multiple of the one before; nearest {segments}"
            raise ConfigError.at("segments", self.segments, rule)
        good = [1]
        for segment, dilation in zip(self.segments, self.dilations[1:], strict=False):
            good.append(_nearest(dilation, (d for d in divisors(segment) if d % good[-1] == 0)))
        if len(self.segments) != len(self.dilations):
            good += good[-1:] * (len(self.segments) - len(good))
            rule = f"must be one for each of the {len(self.segments)} segments; such as {good[: len(self.segments)]}"
            raise ConfigError.at("dilations", self.dilations, rule)
        if good != list(self.dilations):
            rule = "must begin with 1, and each divide the next and the segment before its own"
            raise ConfigError.at("dilations", self.dilations, f"{rule}; nearest {good}")
        most = self.dilations[-1]
        if self.index is not None and (type(self.index) is not int or not 0 <= self.index < most):
            raise ConfigError.at("index", self.index, f"must be 0 to {most - 1}, or left out")

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        members = (
            (q // segment == k // segment) & (q % dilation == offset) & (k % dilation == offset)
            for segment, dilation, offset in self._members()
        )
        return (k <= q) & reduce(or_, members)

    def for_head(self, head: int) -> Pattern:
        if self.dilations[-1] == 1 or self.index is not None:
            return self
        return replace(self, index=head % self.dilations[-1])

    def parts(self) -> tuple[PatternPart, ...]:
        """Return the first segment, and for each further member the part before the previous member's segment.

        As segments and dilations divide each other, a position of a member belongs to all members before it.
        """
        further = (
            EarlierSegments(before, segment, dilation, offset)
            for (before, *_), (segment, dilation, offset) in itertools.pairwise(self._members())
        )
        return (Block(self.segments[0]), *further)

    def period(self) -> int:
        """Return the last segment: outer segments are alike."""
        return self.segments[-1]

    def check(self, context: int) -> None:
        """Raise ConfigError unless the last segment, and so every segment, divides the context."""
        if context % self.segments[-1] == 0:
            return
        good = [_nearest(self.segments[-1], divisors(context))]
        for segment in self.segments[-2::-1]:
            good.insert(0, _nearest(segment, (d for d in divisors(good[0]) if d < good[0] or good[0] == 1)))
        rule = f"the last must divide context {context}; nearest {good}"
        raise ConfigError.at("segments", self.segments, rule)

    def _members(self) -> list[tuple[int, int, int]]:
        """Return segment, dilation and offset of each member; ValueError if heads differ and none was chosen."""
        if self.index is None and self.dilations[-1] > 1:
            raise ValueError(f"heads differ in {self}: resolve it first, for_head(head)")
        pairs = zip(self.segments, self.dilations, strict=True)
        return [(segment, dilation, (self.index or 0) % dilation) for segment, dilation in pairs]


@dataclass(frozen=True)
class EarlierSegments:
    """Every ``dilation``-th position of the query's outer segment before its inner one, for queries at such positions.

    These queries are one column; the others read nothing. The bounds are closed forms with grains of an inner and an
    outer segment.
    """

    inner: int  # positions, a multiple of the dilation
    outer: int  # positions, a multiple of the inner ones
    dilation: int
    offset: int

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        takes_part = (q % self.dilation == self.offset) & (k % self.dilation == self.offset)
        return takes_part & (q // self.outer == k // self.outer) & (k // self.inner < q // self.inner)

    def query_order(self, context: int) -> Order:
        return column_order(context, self.dilation)

    def key_order(self, context: int) -> Order:
        num_keys = self._num_keys(context)
        return Fold(num_keys, 1, self.dilation, 1, self.offset) if self.dilation > 1 else None

    def by_query(self, context: int) -> Bounds | Intervals:
        """Let queries of the column read from the start of their outer segment to the start of their inner one."""
        inner, outer, num_keys = self.inner // self.dilation, self.outer // self.dilation, self._num_keys(context)
        if context % self.outer == 0:
            begin = self.offset * num_keys  # first row of the column, a multiple of both grains
            low, high = (Bound(0, -begin, 0, num_keys, grain) for grain in (outer, inner))
            return Bounds(context, whole(context), low, high)
        row, order = torch.arange(context), positions_of(self.query_order(context))
        position = row if order is None else order
        ends = (position // self.outer * outer, position // self.inner * inner)
        column = position % self.dilation
        return Intervals(*(end.where(column == self.offset, (column > self.offset) * num_keys) for end in ends))

    def by_key(self, context: int) -> Bounds | None:
        """Let each key be read from the next inner segment to the end of its outer segment."""
        if context % self.outer:
            return None
        num_keys = self._num_keys(context)
        low, high = (
            Bound(0, self.offset * num_keys + grain, 0, context, grain)
            for grain in (self.inner // self.dilation, self.outer // self.dilation)
        )
        return Bounds(num_keys, whole(num_keys), low, high)

    def _num_keys(self, context: int) -> int:
        return max(0, -(-(context - self.offset) // self.dilation))


def _nearest(value: int, candidates: Iterable[int]) -> int:
    return min(candidates, key=lambda candidate: abs(candidate - value))
