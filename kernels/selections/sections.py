"""Contexts cut into sections: the keys that a section's queries read outside of it, and selections of these keys.

Letters: U sections, N positions of a context, n = N / U of a section, H heads of queries, K of keys and values, M keys.

In a part of a pattern each query has one interval of columns, and the bounds never decrease. That also holds for the
queries of one section. So running sums over N columns tell what they read. A part that is restricted to some queries
and some keys has intervals again: it is a selection.
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
from longstride.kernels.plan import view
from longstride.kernels.selections.base import Part, Selection, columns_read, followed_by_others, stacked


@cached
def keys_outside(patterns: tuple[Pattern, ...], context: int, sections: int) -> tuple[Tensor, ...]:
    """Return for each section the positions of others that its queries read in any pattern: (M,) int64, ascending.

    Args:
        patterns: patterns of heads, resolved.
        context: N.
        sections: U, which divides it.
    """
    rows = context // sections
    is_read = torch.zeros(sections, context, dtype=torch.bool)
    for part in dict.fromkeys(part for pattern in patterns for part in pattern.parts()):
        full = _FullPart.of(part, context)
        for section in range(sections):
            _, low, high = full.of_queries(section * rows, (section + 1) * rows)
            columns = columns_read(low, high, len(full.column_positions))
            is_read[section, full.column_positions[columns]] = True
    for section in range(sections):
        is_read[section, section * rows : (section + 1) * rows] = False
    return tuple(of_section.nonzero().squeeze(1) for of_section in is_read)


@cached
def rows_sent(patterns: tuple[Pattern, ...], key_heads: int, context: int, sections: int) -> Tensor:
    """Return (U, U) int64: how many rows of keys section [0] sends to section [1], summed over the K heads of keys.

    A row that is read by several heads of queries that share a head of keys counts once.
    """
    counts = torch.zeros(sections, sections, dtype=torch.int64)
    edges = torch.arange(sections + 1) * (context // sections)
    for distinct, heads in Counter(_by_key_head(patterns, key_heads)).items():
        for section, keys in enumerate(keys_outside(distinct, context, sections)):
            counts[:, section] += heads * torch.searchsorted(keys, edges).diff()
    return counts


@dataclass(frozen=True, eq=False)
class Piece:
    """Some keys from outside a section, and the run of its queries from the first to the last that reads any of them.

    A selection has as many queries as keys, so the shorter of both is padded.
    """

    count: int  # M, keys of each head
    queries: slice  # among the section's rows
    selection: Selection  # tensors (1, H, L); padding reads nothing and is not read
    length: int  # L


@dataclass(frozen=True, eq=False)
class SectionReads:
    """The keys that the queries of one section read: in their own section, and in rows that other sections send.

    Received rows and rows to send are sorted by section, then by head, then by position.
    """

    sent_heads: Tensor  # (S,) int64, the head of each row to send
    sent_rows: Tensor  # (S,) int64, its index in this section
    sent: tuple[int, ...]  # number of rows sent to each section
    received: tuple[int, ...]  # number of rows received from each section
    travels: bool  # any section sends rows
    own: Selection | None  # tensors (1, H, n), keys of the section itself; None: the patterns as they are
    keys: Tensor  # int64, (K, M) numbers of received rows for each piece; arbitrary for padding
    pieces: tuple[Piece, ...]  # disjoint, of at most n keys each


@cached
@torch.inference_mode(False)  # training may reuse the result of an evaluation
def section_reads(
    patterns: tuple[Pattern, ...], key_heads: int, context: int, sections: int, section: int, device: torch.device
) -> SectionReads:
    """Return what one section exchanges with the others, and what it then computes; cached.

    Args:
        patterns: one for each of H heads of queries, resolved.
        key_heads: K.
        context, sections: N and U.
        section: number of the section.
        device: device of the tensors.
    """
    rows = context // sections
    first = section * rows
    by_key_head = [keys_outside(distinct, context, sections) for distinct in _by_key_head(patterns, key_heads)]
    sent = [
        _within(of_head[receiver], first, first + rows) - first
        for receiver in range(sections)
        for of_head in by_key_head
    ]
    outside = [of_head[section] for of_head in by_key_head]
    received = _received_numbers(outside, rows, sections)
    total = sum(map(len, outside))
    pieces, listed_keys = [], [torch.arange(0)]
    for start in range(0, max(map(len, outside)), rows):
        keys = [of_head[start : start + rows] for of_head in outside]
        cuts = _cuts(patterns, keys, range(first, first + rows), context)
        readers = torch.cat([cut.queries for by_head in cuts for cut in by_head])
        queries = range(int(readers.min()), int(readers.max()) + 1)
        length = max(*map(len, keys), len(queries))
        selection = _stack_cuts(cuts, queries, length, device)
        numbers = (torch.arange(max(map(len, keys))) % total).repeat(key_heads, 1)
        for head, of_head in enumerate(received):
            numbers[head, : len(keys[head])] = of_head[start : start + rows]
        pieces.append(Piece(numbers.shape[1], slice(queries.start, queries.stop), selection, length))
        listed_keys.append(numbers.flatten())
    local = None
    if first and not all((period := pattern.period()) and first % period == 0 for pattern in patterns):
        keys = [torch.arange(first, first + rows)] * key_heads
        cuts = _cuts(patterns, keys, range(first, first + rows), context)
        local = _stack_cuts(cuts, range(rows), rows, device)
    heads = torch.arange(key_heads).repeat(sections).repeat_interleave(torch.tensor(list(map(len, sent))))
    counts = rows_sent(patterns, key_heads, context, sections)
    return SectionReads(
        heads.to(device),
        torch.cat(sent).to(device),
        tuple(counts[section].tolist()),
        tuple(counts[:, section].tolist()),
        bool(counts.any()),
        local,
        torch.cat(listed_keys).to(device),
        tuple(pieces),
    )


def _by_key_head(patterns: tuple[Pattern, ...], key_heads: int) -> list[tuple[Pattern, ...]]:
    """Return for each head of keys the distinct patterns of the heads of queries that share it."""
    group = len(patterns) // key_heads
    return [tuple(dict.fromkeys(patterns[head : head + group])) for head in range(0, len(patterns), group)]


def _within(ascending: Tensor, first: int, last: int) -> Tensor:
    start, stop = torch.searchsorted(ascending, torch.tensor([first, last])).tolist()
    return ascending[start:stop]


def _received_numbers(outside: list[Tensor], rows: int, sections: int) -> list[Tensor]:
    """Number the keys from outside, in each head by position, among all rows that a section receives."""
    numbers: list[list[Tensor]] = [[torch.arange(0)] for _ in outside]
    total = 0
    for sender in range(sections):
        for head, keys in enumerate(outside):
            count = len(_within(keys, sender * rows, (sender + 1) * rows))
            numbers[head].append(torch.arange(total, total + count))
            total += count
    return [torch.cat(of_head) for of_head in numbers]


class _FullPart(NamedTuple):
    """A part over a full context, as vectors."""

    row_positions: Tensor  # (N,) int64
    column_positions: Tensor  # (M,) int64
    low: Tensor  # (N,) int64, of each row
    high: Tensor

    @classmethod
    def of(cls, part: PatternPart, context: int) -> _FullPart:
        # The vectors of a view would be cached; here only the results are.
        by_query = view(part, context, "queries")
        orders = (positions_of(order) for order in (by_query.row_order, by_query.column_order))
        rows, columns = (torch.arange(context) if order is None else order for order in orders)
        return cls(rows, columns, *intervals_of(by_query.bounds))

    def of_queries(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return positions and intervals of the non-empty rows of queries first … last-1, in the part's order."""
        is_read = (self.row_positions >= first) & (self.row_positions < last) & (self.low < self.high)
        rows = is_read.nonzero().squeeze(1)
        return self.row_positions[rows], self.low[rows], self.high[rows]


class _Cut(NamedTuple):
    """A part restricted to some queries, without those that read nothing, and to some keys."""

    queries: Tensor  # (R,) int64, indices among all queries of the section
    keys: Tensor  # (M,) int64, indices among the keys of the head
    low: Tensor  # (R,) int64
    high: Tensor

    def padded(self, queries: range, length: int, device: torch.device) -> Part:
        """Return a part with ``length`` rows and columns for a run of queries; the last rows read nothing."""
        rows = followed_by_others(self.queries - queries.start, length)
        columns = followed_by_others(self.keys, length)
        padding = self.high[-1:].expand(length - len(self.high))
        low, high = (torch.cat([bound, padding]) for bound in (self.low, self.high))
        natural = torch.arange(length)
        query_order, key_order = (None if torch.equal(order, natural) else order for order in (rows, columns))
        # Moved before heads are stacked, so that heads that are alike share one copy.
        return Part(query_order, key_order, low, high).of_head(device)


def _cuts(patterns: tuple[Pattern, ...], keys: Sequence[Tensor], section: range, context: int) -> list[list[_Cut]]:
    """Restrict the parts of each head's pattern to a section's queries and to some keys (positions, by key head).

    Equal cuts are one object.
    """
    group = len(patterns) // len(keys)
    distinct: dict[tuple[PatternPart, bytes], _Cut | None] = {}
    by_head = []
    for head, pattern in enumerate(patterns):
        head_keys = keys[head // group]
        key_bytes = head_keys.numpy().tobytes()
        for part in pattern.parts():
            if (part, key_bytes) not in distinct:
                distinct[part, key_bytes] = _cut(part, head_keys, section, context)
        cuts = (distinct[part, key_bytes] for part in pattern.parts())
        by_head.append([cut for cut in cuts if cut is not None])
    return by_head


def _cut(part: PatternPart, keys: Tensor, section: range, context: int) -> _Cut | None:
    """Restrict a part to a section's queries and to some keys, (M,) positions; None if no pair remains."""
    full = _FullPart.of(part, context)
    place = torch.full((context,), -1)
    place[keys] = torch.arange(len(keys))
    columns = place[full.column_positions]
    num_before = torch.cat([columns.new_zeros(1), (columns >= 0).cumsum(0)])
    queries, low, high = full.of_queries(section.start, section.stop)
    low, high = num_before[low], num_before[high]
    reads = low < high
    if not reads.any():
        return None
    return _Cut(queries[reads] - section.start, columns[columns >= 0], low[reads], high[reads])


def _stack_cuts(by_head: list[list[_Cut]], queries: range, length: int, device: torch.device) -> Selection:
    """Join the parts of all heads, for a run of queries, to a selection with ``length`` rows."""
    padded = {id(cut): cut.padded(queries, length, device) for cuts in by_head for cut in cuts}
    heads = [[padded[id(cut)] for cut in cuts] for cuts in by_head]
    parts = [
        stacked([head[number] if number < len(head) else None for head in heads], 1, length, device)
        for number in range(max(1, *map(len, heads)))
    ]
    return Selection(tuple(parts), max(int((part.high - part.low).max()) for part in parts))
