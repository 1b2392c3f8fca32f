"""Patterns as selections: all rows of a pattern, or the rows of M queries behind a cache of N positions.

Letters: B batch, H heads, M queries, N positions, W keys that the queries read in a part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longstride.kernels.cache import cached
from longstride.kernels.forms import Bounds, intervals_of, positions_of
from longstride.kernels.patterns import Pattern, PatternPart
from longstride.kernels.plan import positions_at, view
from longstride.kernels.selections.base import Part, Selection, columns_read, followed_by_others, stacked


def pattern_parts(pattern: Pattern, context: int) -> tuple[Part, ...]:
    """Return the parts of a head's pattern at N = ``context`` positions, each tensor (1, 1, ·) on the CPU.

    For mixers that process a pattern's keys in their own way.
    """

    return tuple(
        Part(
            positions_of(part.query_order(context)),
            positions_of(part.key_order(context)),
            *intervals_of(part.by_query(context)),
        ).of_head(torch.device("cpu"))
        for part in pattern.parts()
    )


@cached
@torch.inference_mode(False)  # training may reuse the result of an evaluation
def queries_behind(
    patterns: tuple[Pattern, ...], batch: int, first: int, count: int, context: int, device: torch.device
) -> Selection:
    """Return what ``count`` queries from position ``first`` on read of ``context`` keys; cached.

    Unlike other selections it has M rows and N positions of keys. Backends accept that for disjoint parts, as those of
    patterns are.

    Args:
        patterns: one per head, resolved.
        batch: B.
        first, count, context: position of the first query, M and N.
        device: device of the result.
    """
    rows_of_part = {part: _rows_of(part, first, count, context) for pattern in patterns for part in pattern.parts()}
    zeros = torch.zeros(count, dtype=torch.int64)
    empty = _Rows(None, torch.empty(0, dtype=torch.int64), zeros, zeros)
    parts = []
    for number in range(max(len(pattern.parts()) for pattern in patterns)):
        numbered = [pattern.parts()[number : number + 1] for pattern in patterns]
        heads = [rows_of_part[part[0]] if part else empty for part in numbered]
        parts.append(_stack_heads(heads, batch, context, device))
    return Selection(tuple(parts), max(int((rows.high - rows.low).max()) for rows in rows_of_part.values()))


class _Rows(NamedTuple):
    """The rows of a part that belong to the queries."""

    query_order: Tensor | None  # (M,) int64, the query of each row; None: natural
    keys: Tensor  # (W,) int64, the position of each column
    low: Tensor  # (M,) int64, of these columns
    high: Tensor


def _rows_of(part: PatternPart, first: int, count: int, context: int) -> _Rows:
    by_query = view(part, context, "queries")
    queries = positions_of(by_query.row_order)
    if queries is None:
        rows, query_order = torch.arange(first, first + count), None
    else:
        rows = ((queries >= first) & (queries < first + count)).nonzero().squeeze(1)
        query_order = queries[rows] - first
    bounds = by_query.bounds
    low, high = bounds(rows) if isinstance(bounds, Bounds) else (end[rows] for end in bounds)
    start, stop = int(low[0]), int(high[-1])  # neither bound ever decreases
    low, high = low - start, high - start
    is_read = columns_read(low, high, stop - start)
    place = torch.cat([low.new_zeros(1), is_read.cumsum(0)])  # among the columns that are read
    columns = torch.arange(start, stop)[is_read]
    return _Rows(query_order, positions_at(by_query.column_order, columns), place[low], place[high])


def _stack_heads(heads: list[_Rows], batch: int, context: int, device: torch.device) -> Part:
    """Return the rows of all heads as a part, (B, H, ·) each."""
    width = max(1, *(len(rows.keys) for rows in heads))
    reads_all = all(torch.equal(rows.keys, torch.arange(context)) for rows in heads)

    def part_of(rows: _Rows) -> Part:
        # Heads of a part have equally many keys: shorter ones are padded with keys that no row reads.
        keys = None if reads_all else followed_by_others(rows.keys, context)[:width]
        return Part(rows.query_order, keys, rows.low, rows.high).of_head(device)

    parts = {id(rows): part_of(rows) for rows in heads}
    part = stacked([parts[id(rows)] for rows in heads], 1, len(heads[0].low), device)
    return part.mapped(lambda tensor: tensor.expand(batch, -1, -1))
