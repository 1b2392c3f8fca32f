"""Contexts cut into sections: which keys the queries of a section read outside of it, and attention over these.

Letters: U sections, N positions of a context, n = N / U of a section, H heads of queries, K of keys and values, M keys.

In a part of a pattern each query has one interval of columns, whose bounds never fall. That holds of the queries of one
section as well. So what they read follows from running sums over N columns, and a part that is cut down to some queries
and some keys has intervals again: it is a selection of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longstride.kernels.cache import cached
from longstride.kernels.forms import intervals_of, positions_of
from longstride.kernels.patterns import Pattern, PatternPart
from longstride.kernels.plan import require_causal, view
from longstride.kernels.selections.base import Part, Selection, stacked


@cached
def keys_before(patterns: tuple[Pattern, ...], context: int, sections: int) -> tuple[Tensor, ...]:
    """For each section the positions before it that its queries read in any of the patterns: (M,) int64, ascending.

    Args:
        patterns: resolved for their heads.
        context: N.
        sections: U, which divides it.

    Raises:
        ValueError: a pattern is not causal: rows travel to later sections alone.
    """
    require_causal(patterns, context)
    rows = context // sections
    read = torch.zeros(sections, context, dtype=torch.bool)
    for part in dict.fromkeys(part for pattern in patterns for part in pattern.parts()):
        whole = _Whole.of(part, context)
        for section in range(1, sections):
            _, low, high = whole.of_queries(section * rows, (section + 1) * rows)
            opened = torch.zeros(len(whole.column_positions) + 1, dtype=torch.int32)
            opened.index_add_(0, low, torch.ones_like(low, dtype=torch.int32))
            opened.index_add_(0, high, torch.full_like(high, -1, dtype=torch.int32))
            read[section, whole.column_positions[opened.cumsum(0)[:-1] > 0]] = True
    return tuple(read[section, : section * rows].nonzero().squeeze(1) for section in range(sections))


@cached
def rows_sent(patterns: tuple[Pattern, ...], key_heads: int, context: int, sections: int) -> Tensor:
    """(U, U) int64: how many rows of keys, of all K heads together, the queries of section [1] read of section [0].

    What several heads of queries read of a head of keys that they share counts once.
    """
    counts = torch.zeros(sections, sections, dtype=torch.int64)
    edges = torch.arange(sections + 1) * (context // sections)
    for sharing, heads in Counter(_by_key_head(patterns, key_heads)).items():
        for section, keys in enumerate(keys_before(sharing, context, sections)):
            counts[:, section] += heads * torch.searchsorted(keys, edges).diff()
    return counts


@dataclass(frozen=True, eq=False)
class Piece:
    """Some of the keys from outside a section, and the run of its queries from the first to the last that reads any.

    A selection has as many queries as keys. So the fewer of both are filled up.
    """

    count: int  # M, of keys of each head
    queries: slice  # of the section's rows
    selection: Selection  # tensors (1, H, L), in which what is filled up reads nothing and is not read
    length: int  # L


@dataclass(frozen=True, eq=False)
class SectionReads:
    """How the queries of one section attend: to keys of their own section, and to rows that other sections send.

    Rows that are received stand section by section, in each head by head, and there by position. Rows to send likewise.
    """

    sent_heads: Tensor  # (S,) int64, the head of each row to send
    sent_rows: Tensor  # (S,) int64, its place in this section
    sent: tuple[int, ...]  # how many of these go to each section
    received: tuple[int, ...]  # how many come from each
    travels: bool  # whether any section sends any
    own: Selection | None  # tensors (1, H, n), of keys in the section itself; None: the patterns as they are
    keys: Tensor  # int64, (K, M) numbers of received rows for each piece; any where a head has fewer than others
    pieces: tuple[Piece, ...]  # disjoint, of at most n keys each


@cached
@torch.inference_mode(False)  # training may use what an evaluation has made
def section_reads(
    patterns: tuple[Pattern, ...], key_heads: int, context: int, sections: int, section: int, device: torch.device
) -> SectionReads:
    """What one section exchanges with all others, and computes then; cached.

    Args:
        patterns: of each of H heads of queries, resolved.
        key_heads: K.
        context, sections: N and U.
        section: its number.
        device: of the tensors.
    """
    rows = context // sections
    first = section * rows
    shared = _by_key_head(patterns, key_heads)
    sent = [
        [_within(keys_before(sharing, context, sections)[other], first, first + rows) - first for sharing in shared]
        for other in range(sections)
    ]
    before = [keys_before(sharing, context, sections)[section] for sharing in shared]
    number = _received_numbers(before, rows, section)
    total = sum(map(len, before))
    pieces, listed_keys = [], [torch.arange(0)]
    for start in range(0, max(map(len, before)), rows):
        keys = [each[start : start + rows] for each in before]
        cuts = _cuts(patterns, keys, range(first, first + rows), context)
        queries = _reading(cuts)
        length = max(*map(len, keys), len(queries))
        selection = _laid(cuts, queries, length, device)
        numbers = (torch.arange(max(map(len, keys))) % total).repeat(key_heads, 1)
        for head, one in enumerate(number):
            numbers[head, : len(keys[head])] = one[start : start + rows]
        pieces.append(Piece(numbers.shape[1], slice(queries.start, queries.stop), selection, length))
        listed_keys.append(numbers.flatten())
    own = None
    if first and not all((period := pattern.period()) and first % period == 0 for pattern in patterns):
        keys = [torch.arange(first, first + rows)] * key_heads
        cuts = _cuts(patterns, keys, range(first, first + rows), context)
        own = _laid(cuts, range(rows), rows, device)
    listed = [one for by_head in sent for one in by_head]
    heads = torch.arange(key_heads).repeat(sections).repeat_interleave(torch.tensor([len(one) for one in listed]))
    counts = rows_sent(patterns, key_heads, context, sections)
    return SectionReads(
        heads.to(device),
        torch.cat(listed).to(device),
        tuple(counts[section].tolist()),
        tuple(counts[:, section].tolist()),
        bool(counts.any()),
        own,
        torch.cat(listed_keys).to(device),
        tuple(pieces),
    )


def _by_key_head(patterns: tuple[Pattern, ...], key_heads: int) -> list[tuple[Pattern, ...]]:
    """The patterns of the heads of queries that share each head of keys, each once."""
    group = len(patterns) // key_heads
    return [tuple(dict.fromkeys(patterns[head : head + group])) for head in range(0, len(patterns), group)]


def _within(ascending: Tensor, first: int, last: int) -> Tensor:
    start, stop = torch.searchsorted(ascending, torch.tensor([first, last])).tolist()
    return ascending[start:stop]


def _received_numbers(before: list[Tensor], rows: int, section: int) -> list[Tensor]:
    """Of each head's keys from outside, by position: their numbers among all rows that are received."""
    numbers: list[list[Tensor]] = [[] for _ in before]
    total = 0
    for other in range(section):
        for head, keys in enumerate(before):
            count = len(_within(keys, other * rows, (other + 1) * rows))
            numbers[head].append(torch.arange(total, total + count))
            total += count
    return [torch.cat(each) if each else torch.arange(0) for each in numbers]


class _Whole(NamedTuple):
    """A part over a whole context, as vectors."""

    row_positions: Tensor  # (N,) int64
    column_positions: Tensor  # (M,) int64
    low: Tensor  # (N,) int64, of each row
    high: Tensor

    @classmethod
    def of(cls, part: PatternPart, context: int) -> _Whole:
        # Not by a view's own vectors, which would be kept: what is made of these is.
        seen = view(part, context, "queries")
        orders = (positions_of(order) for order in (seen.row_order, seen.column_order))
        rows, columns = (torch.arange(context) if order is None else order for order in orders)
        return cls(rows, columns, *intervals_of(seen.bounds))

    def of_queries(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Positions and intervals of the rows first … last-1 that read anything, in the part's order."""
        reads = (self.row_positions >= first) & (self.row_positions < last) & (self.low < self.high)
        mine = reads.nonzero().squeeze(1)
        return self.row_positions[mine], self.low[mine], self.high[mine]


class _Cut(NamedTuple):
    """A part cut down to some queries, those without keys left out, and some keys."""

    queries: Tensor  # (R,) int64, the place of each among all queries of the section
    keys: Tensor  # (M,) int64, the place of each among the keys of its head
    low: Tensor  # (R,) int64
    high: Tensor

    def laid(self, queries: range, length: int, device: torch.device) -> Part:
        """As a part of so many rows and columns, for a run of queries that has its own; the last ones read nothing."""
        rows = self._all(self.queries - queries.start, length)
        columns = self._all(self.keys, length)
        rest = self.high[-1:].expand(length - len(self.high))
        low, high = (torch.cat([bound, rest]) for bound in (self.low, self.high))
        natural = torch.arange(length)
        orders = (None if torch.equal(order, natural) else order for order in (rows, columns))
        # Moved alone: that of several heads which are alike would become one for each.
        tensors = (None if x is None else x.int()[None, None].to(device) for x in (*orders, low, high))
        return Part(*tensors)  # type: ignore[arg-type]

    @staticmethod
    def _all(places: Tensor, length: int) -> Tensor:
        """Some of 0 … length-1, and behind them all others."""
        others = torch.ones(length, dtype=torch.bool)
        others[places] = False
        return torch.cat([places, others.nonzero().squeeze(1)])


def _cuts(patterns: tuple[Pattern, ...], keys: Sequence[Tensor], section: range, context: int) -> list[list[_Cut]]:
    """For each head the parts of its pattern, cut down to a section's queries and some keys (positions, by key head).

    Equal ones are one object.
    """
    group = len(patterns) // len(keys)
    known: dict[tuple[PatternPart, bytes], _Cut | None] = {}
    by_head = []
    for head, pattern in enumerate(patterns):
        mine = keys[head // group]
        written = mine.numpy().tobytes()
        for part in pattern.parts():
            if (part, written) not in known:
                known[part, written] = _cut(part, mine, section, context)
        cuts = (known[part, written] for part in pattern.parts())
        by_head.append([cut for cut in cuts if cut is not None])
    return by_head


def _reading(by_head: list[list[_Cut]]) -> range:
    """The queries from the first to the last one that reads anything."""
    read = [cut.queries for cuts in by_head for cut in cuts]
    return range(min(int(each.min()) for each in read), max(int(each.max()) for each in read) + 1)


def _laid(by_head: list[list[_Cut]], queries: range, length: int, device: torch.device) -> Selection:
    """All heads' parts for a run of queries as a selection of so many rows."""
    known = {id(cut): cut.laid(queries, length, device) for cuts in by_head for cut in cuts}
    parts = [[known[id(cut)] for cut in cuts] for cuts in by_head]
    whole = [
        stacked([of_head[number] if number < len(of_head) else None for of_head in parts], 1, length, device)
        for number in range(max(1, *map(len, parts)))
    ]
    return Selection(tuple(whole), max(int((part.high - part.low).max()) for part in whole))


def _cut(part: PatternPart, keys: Tensor, section: range, context: int) -> _Cut | None:
    """A part cut down to a section's queries and to some keys, (M,) positions; None where they have no pair."""
    whole = _Whole.of(part, context)
    place = torch.full((context,), -1)
    place[keys] = torch.arange(len(keys))
    columns = place[whole.column_positions]
    before = torch.cat([columns.new_zeros(1), (columns >= 0).cumsum(0)])
    queries, low, high = whole.of_queries(section.start, section.stop)
    low, high = before[low], before[high]
    reads = low < high
    if not reads.any():
        return None
    return _Cut(queries[reads] - section.start, columns[columns >= 0], low[reads], high[reads])
