"""Patterns that stay within documents, where several lie in one context.

Letters: B batch, H heads, N positions, M keys that a part of a pattern reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longstride.kernels.cache import cached
from longstride.kernels.patterns import Pattern, PatternPart
from longstride.kernels.plan import require_causal, view
from longstride.kernels.selections.base import Part, Selection, stacked


def within_documents(patterns: Sequence[Pattern], starts: Tensor) -> Selection:
    """Each document as a context of its own: query i reads key j where both are of one document, which begins at s,
    and the pattern has (i - s, j - s).

    So a document is computed as it would be alone, wherever it lies. The orders are a pattern's own, one document after
    the other; where they are natural, they stay so.

    Args:
        patterns: of each head, which must be causal.
        starts: (B, N) integers, the first position of each position's document; they never decrease along N.

    Returns:
        A selection. Heads with fewer parts than others have empty ones; parts are disjoint as those of patterns are.

    Raises:
        ValueError: a pattern is not causal.
    """
    batch, context = starts.shape
    require_causal(patterns, context)
    begin = starts.long() * context  # codes: documents in turn, and a rank of the pattern within each
    positions = torch.arange(context, device=starts.device)
    own = begin + positions - starts
    known: dict[PatternPart, Part] = {}  # of one head
    parts, span = [], 0
    for number in range(max(len(pattern.parts()) for pattern in patterns)):
        by_head: list[Part | None] = []
        for pattern in patterns:
            if number >= len(pattern.parts()):
                by_head.append(None)
                continue
            part = pattern.parts()[number]
            ranks = _ranks(part, context, starts.device)
            span = max(span, ranks.span)
            if part not in known:
                known[part] = _of_part(ranks, begin, own, positions)
            by_head.append(known[part])
        parts.append(stacked(by_head, batch, context, starts.device))
    return Selection(tuple(parts), span)


class _Ranks(NamedTuple):
    """A part of a pattern over a whole context: where each position stands, and what it reads."""

    query_order: bool  # whether queries have an order of their own, else the natural one
    queries: Tensor  # (N,) int64, the row of each position
    keys: Tensor | None  # (N,) int64, the column of each position, N for those that are not read; None: natural
    low: Tensor  # (N,) int64, of each row
    high: Tensor
    span: int  # the most keys of a row


@cached
def _ranks(part: PatternPart, context: int, device: torch.device) -> _Ranks:
    """Of a part, as plans are: known by its pattern alone."""
    seen = view(part, context, "queries")
    natural = torch.arange(context)
    keys = None
    if seen.column_positions is not None:
        keys = torch.full_like(natural, context)
        keys[seen.column_positions] = natural[: seen.num_columns]
        keys = keys.to(device)
    ordered = seen.row_positions is not None
    queries = seen.row_of_position if ordered else natural
    low, high = seen.intervals
    span = int((high - low).max())
    return _Ranks(ordered, queries.to(device), keys, low.to(device), high.to(device), span)


def _of_part(ranks: _Ranks, begin: Tensor, own: Tensor, positions: Tensor) -> Part:
    """For one head, (B, 1, N) each.

    A part's orders at the context's length order the positions of a shorter document too, as a causal pattern is the
    same at any length. So its rows and columns are those of the whole context, without what the document does not have.
    """
    context = own.shape[-1]
    key_codes, key_order = own, None
    if ranks.keys is not None:
        column = ranks.keys[own - begin]
        last = context * (context + 1) + positions  # behind all documents, where no row reads
        key_codes, key_order = (begin + column).where(column < context, last).sort(-1)
    query_codes, query_order = own, None
    if ranks.query_order:
        query_codes, query_order = (begin + ranks.queries[own - begin]).sort(-1)
    row = query_codes % context
    first = query_codes - row  # the document's first code
    low, high = (torch.searchsorted(key_codes, first + bound[row]) for bound in (ranks.low, ranks.high))
    query_order, key_order = (None if order is None else order.int()[:, None] for order in (query_order, key_order))
    return Part(query_order, key_order, low.int()[:, None], high.int()[:, None])
