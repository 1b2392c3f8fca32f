"""Patterns that stay within documents, for contexts of several documents.

Letters: B batch, H heads, N positions, M keys that a part of a pattern reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longstride.kernels.cache import cached
from longstride.kernels.patterns import Pattern, PatternPart
from longstride.kernels.plan import view
from longstride.kernels.selections.base import Part, Selection, stacked


def within_documents(patterns: Sequence[Pattern], starts: Tensor) -> Selection:
    """Treat each document as a context of its own.

    Query i reads key j if both are in a document that starts at s and the pattern allows (i - s, j - s). A document is
    then computed as it would be alone. The orders are those of the pattern, one document after another; natural orders
    stay natural.

    Args:
        patterns: one per head.
        starts: (B, N) integers, the first position of each position's document; they never decrease along N.

    Returns:
        A selection with disjoint parts. Heads with fewer parts than others get empty ones.
    """
    batch, context = starts.shape
    begin = starts.long() * context  # codes sort by document, then by rank of the pattern within it
    positions = torch.arange(context, device=starts.device)
    codes = begin + positions - starts
    of_one_head: dict[PatternPart, Part] = {}
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
            if part not in of_one_head:
                of_one_head[part] = _part_within(ranks, begin, codes, positions)
            by_head.append(of_one_head[part])
        parts.append(stacked(by_head, batch, context, starts.device))
    return Selection(tuple(parts), span)


class _Ranks(NamedTuple):
    """A part of a pattern over the full context: the rank of each position, and what it reads."""

    is_reordered: bool  # queries have an order other than the natural one
    queries: Tensor  # (N,) int64, the row of each position
    keys: Tensor | None  # (N,) int64, the column of each position, N if it is not read; None: natural
    low: Tensor  # (N,) int64, of each row
    high: Tensor
    span: int  # maximum number of keys of a row


@cached
def _ranks(part: PatternPart, context: int, device: torch.device) -> _Ranks:
    by_query = view(part, context, "queries")
    natural = torch.arange(context)
    keys = None
    if by_query.column_positions is not None:
        keys = torch.full_like(natural, context)
        keys[by_query.column_positions] = natural[: by_query.num_columns]
        keys = keys.to(device)
    is_reordered = by_query.row_positions is not None
    queries = by_query.row_of_position if is_reordered else natural
    low, high = by_query.intervals
    span = int((high - low).max())
    return _Ranks(is_reordered, queries.to(device), keys, low.to(device), high.to(device), span)


def _part_within(ranks: _Ranks, begin: Tensor, codes: Tensor, positions: Tensor) -> Part:
    """Return the part of one head, (B, 1, N) each.

    A mask is the same at any length, so orders at the context's length also order a shorter document. The document's
    rows and columns are those of the full context, without the positions that it lacks.
    """
    context = codes.shape[-1]
    key_codes, key_order = codes, None
    if ranks.keys is not None:
        column = ranks.keys[codes - begin]
        last = context * (context + 1) + positions  # after all documents, where no row reads
        key_codes, key_order = (begin + column).where(column < context, last).sort(-1)
    query_codes, query_order = codes, None
    if ranks.is_reordered:
        query_codes, query_order = (begin + ranks.queries[codes - begin]).sort(-1)
    row = query_codes % context
    first = query_codes - row  # the document's first code
    low, high = (torch.searchsorted(key_codes, first + bound[row]) for bound in (ranks.low, ranks.high))
    query_order, key_order = (None if order is None else order.int()[:, None] for order in (query_order, key_order))
    return Part(query_order, key_order, low.int()[:, None], high.int()[:, None])
