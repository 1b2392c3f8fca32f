"""LongNet's pattern: the longer a segment, the fewer of its positions take part."""

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
from longstride.kernels.patterns.block import Block
from longstride.kernels.patterns.column import column_order

MOST_SEGMENTS = 32  # twice as long each, they would span every context


@dataclass(frozen=True)
class LongNet(PatternDefaults):
    """Dilated segments (Ding et al. 2023, section 2.2), causal.

    Member i cuts the sequence into segments of ``segments[i]`` positions, of which every ``dilations[i]``-th takes part
    and reads those of its segment up to itself. Heads shift which ones they are, ``offset = head % dilations[i]``, by
    ``for_head``. The first dilation is 1, so that every query reads its own first segment at least.

    Three layers of all heads reach every earlier position, except some in the segment before the query's own: what
    stands behind the last position of a head in its segment leaves it through other heads alone.

    The paper computes a softmax for each member and mixes their outputs in proportion to the softmax denominators. That
    counts a key as often as members hold it. Here there is one softmax over the union, and every key counts once.
    """

    segments: Annotated[tuple[int, ...], Doc("positions; each divides the next")]
    dilations: Annotated[
        tuple[int, ...],
        Doc("positions from key to key; each divides the next, and the segment before its own"),
    ]
    index: int | None = None  # of this head; None: not chosen yet, or heads are alike

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
        self._check_segments()
        self._check_dilations()
        most = self.dilations[-1]
        if self.index is not None and (type(self.index) is not int or not 0 <= self.index < most):
            raise ConfigError.at("index", self.index, f"must be 0 to {most - 1}, or left out")

    def _check_segments(self) -> None:
        good = [self.segments[0]]
        for segment in self.segments[1:]:
            good.append(good[-1] * max(2, round(segment / good[-1])))
        if good != list(self.segments):
            raise ConfigError.at(
                "segments", self.segments, f"each must be a multiple of the one before; nearest {good}"
            )

    def _check_dilations(self) -> None:
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

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        members = (
            (q // segment == k // segment) & (q % dilation == offset) & (k % dilation == offset)
            for segment, dilation, offset in self._members()
        )
        return (k <= q) & reduce(or_, members)

    def for_head(self, head: int) -> Pattern:
        """The pattern with this head's own offsets."""
        if self.dilations[-1] == 1 or self.index is not None:
            return self
        return replace(self, index=head % self.dilations[-1])

    def parts(self) -> tuple[PatternPart, ...]:
        """The first segment, and of each further member what lies before the segment of the one before.

        As segments and dilations divide each other, a position that takes part in a member takes part in all before it.
        """
        further = (
            EarlierSegments(before, segment, dilation, offset)
            for (before, *_), (segment, dilation, offset) in itertools.pairwise(self._members())
        )
        return (Block(self.segments[0]), *further)

    def period(self) -> int:
        """Whole outer segments."""
        return self.segments[-1]

    def check(self, context: int) -> None:
        """Raise ConfigError unless the last segment, and so every one, divides the context."""
        if context % self.segments[-1] == 0:
            return
        good = [_nearest(self.segments[-1], divisors(context))]
        for segment in self.segments[-2::-1]:
            good.insert(0, _nearest(segment, (d for d in divisors(good[0]) if d < good[0] or good[0] == 1)))
        rule = f"the last must divide context {context}; nearest {good}"
        raise ConfigError.at("segments", self.segments, rule)

    def _members(self) -> list[tuple[int, int, int]]:
        """Segment, dilation and offset of each; ValueError where heads differ and no head was chosen."""
        if self.index is None and self.dilations[-1] > 1:
            raise ValueError(f"heads differ in {self}: resolve it first, for_head(head)")
        pairs = zip(self.segments, self.dilations, strict=True)
        return [(segment, dilation, (self.index or 0) % dilation) for segment, dilation in pairs]


@dataclass(frozen=True)
class EarlierSegments:
    """Every ``dilation``-th position of the query's outer segment before its inner one, for queries among them.

    They are one column of queries, and the others read nothing. By grains of an inner and an outer segment, the bounds
    are closed forms.
    """

    inner: int  # positions, a multiple of the dilation
    outer: int  # positions, a multiple of the inner ones
    dilation: int
    offset: int

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        held = (q % self.dilation == self.offset) & (k % self.dilation == self.offset)
        return held & (q // self.outer == k // self.outer) & (k // self.inner < q // self.inner)

    def query_order(self, context: int) -> Order:
        """Column after column."""
        return column_order(context, self.dilation)

    def key_order(self, context: int) -> Order:
        """The column of the offset alone."""
        num_keys = self._num_keys(context)
        return Fold(num_keys, 1, self.dilation, 1, self.offset) if self.dilation > 1 else None

    def by_query(self, context: int) -> Bounds | Intervals:
        """Queries of the column read from the beginning of their outer segment to that of their inner one."""
        inner, outer, num_keys = self.inner // self.dilation, self.outer // self.dilation, self._num_keys(context)
        if context % self.outer == 0:
            begin = self.offset * num_keys  # the row at which the column begins: a multiple of both grains
            low, high = (Bound(0, -begin, 0, num_keys, grain) for grain in (outer, inner))
            return Bounds(context, whole(context), low, high)
        row, order = torch.arange(context), positions_of(self.query_order(context))
        position = row if order is None else order
        ends = (position // self.outer * outer, position // self.inner * inner)
        column = position % self.dilation
        return Intervals(*(end.where(column == self.offset, (column > self.offset) * num_keys) for end in ends))

    def by_key(self, context: int) -> Bounds | None:
        """Each key is read from the next inner segment to the end of its outer one."""
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


def _nearest(wanted: int, good: Iterable[int]) -> int:
    return min(good, key=lambda value: abs(value - wanted))
