"""Patterns cut down to some queries: M rows of a pattern over N positions, for queries behind a cache.

Letters: B batch, H heads, M queries, N positions, W keys that the queries read in a part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longstride.kernels.cache import cached
from longstride.kernels.forms import Bounds, positions_of
from longstride.kernels.patterns import Pattern, PatternPart
from longstride.kernels.plan import positions_at, view
from longstride.kernels.selections.base import Part, Selection


@cached
@torch.inference_mode(False)  # training may use what an evaluation has made
def queries_behind(
    patterns: tuple[Pattern, ...], batch: int, first: int, count: int, context: int, device: torch.device
) -> Selection:
    """Return what ``count`` queries from position ``first`` on read of ``context`` keys; cached.

    Unlike other selections it has M rows and N positions of keys. Backends accept that where parts are disjoint, as
    those of patterns are.

    Args:
        patterns: one per head, resolved.
        batch: B.
        first, count, context: position of the first query, M and N.
        device: of the result.
    """
    known = {part: _rows_of(part, first, count, context) for pattern in patterns for part in pattern.parts()}
    nothing = torch.zeros(count, dtype=torch.int64)
    empty = _Rows(None, torch.empty(0, dtype=torch.int64), nothing, nothing)
    parts = []
    for number in range(max(len(pattern.parts()) for pattern in patterns)):
        several = [pattern.parts()[number : number + 1] for pattern in patterns]
        heads = [known[part[0]] if part else empty for part in several]
        parts.append(_stacked(heads, batch, context, device))
    return Selection(tuple(parts), max(int((rows.high - rows.low).max()) for rows in known.values()))


class _Rows(NamedTuple):
    """The rows of a part that belong to the queries."""

    query_order: Tensor | None  # (M,) int64, the query of each row; None: natural
    keys: Tensor  # (W,) int64, the position of each column
    low: Tensor  # (M,) int64, of these columns
    high: Tensor


def _rows_of(part: PatternPart, first: int, count: int, context: int) -> _Rows:
    seen = view(part, context, "queries")
    queries = positions_of(seen.row_order)
    if queries is None:
        rows, query_order = torch.arange(first, first + count), None
    else:
        rows = ((queries >= first) & (queries < first + count)).nonzero().squeeze(1)
        query_order = queries[rows] - first
    bounds = seen.bounds
    low, high = bounds(rows) if isinstance(bounds, Bounds) else (end[rows] for end in bounds)
    start, stop = int(low[0]), int(high[-1])  # neither bound ever decreases
    low, high = low - start, high - start
    opened = torch.zeros(stop - start + 1, dtype=torch.int64)
    opened.index_add_(0, low, torch.ones_like(low)).index_add_(0, high, torch.full_like(high, -1))
    is_read = opened.cumsum(0)[:-1] > 0
    place = torch.cat([low.new_zeros(1), is_read.cumsum(0)])  # among the columns that are read
    columns = torch.arange(start, stop)[is_read]
    return _Rows(query_order, positions_at(seen.column_order, columns), place[low], place[high])


def _stacked(heads: list[_Rows], batch: int, context: int, device: torch.device) -> Part:
    """Return the rows of all heads as a part, (B, H, ·) each; where heads are alike, their axis is expanded."""
    width = max(1, *(len(rows.keys) for rows in heads))
    natural_keys, natural_queries = torch.arange(context), torch.arange(len(heads[0].low))
    is_alike = all(rows is heads[0] for rows in heads)

    def of_heads(vectors: list[Tensor]) -> Tensor:
        stacked = torch.stack(vectors[:1] if is_alike else vectors).int().to(device)
        return stacked[None].expand(batch, len(heads), -1)

    query_order = key_order = None
    if any(rows.query_order is not None for rows in heads):
        query_order = of_heads([natural_queries if r.query_order is None else r.query_order for r in heads])
    if not all(torch.equal(rows.keys, natural_keys) for rows in heads):
        key_order = of_heads([_extended(rows.keys, width, context) for rows in heads])
    return Part(query_order, key_order, of_heads([r.low for r in heads]), of_heads([r.high for r in heads]))


def _extended(keys: Tensor, width: int, context: int) -> Tensor:
    """Return W keys followed by others, which no row reads, up to this width: heads of a part have equally many."""
    if len(keys) == width:
        return keys
    others = torch.ones(context, dtype=torch.bool)
    others[keys] = False
    return torch.cat([keys, others.nonzero().squeeze(1)[: width - len(keys)]])
