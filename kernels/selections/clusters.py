"""Queries that read the keys of their own cluster. Letters: B batch, H heads, N positions."""

from __future__ import annotations

import torch
from torch import Tensor

from longstride.kernels.selections.base import Part, Selection


def recent_members(
    queries: Tensor,
    keys: Tensor | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    itself: bool = True,
) -> Part:
    """Each query reads the most recent earlier keys of its cluster, so that nothing of the future is seen.

    To read a cluster's keys whatever their number, or to cut clusters into runs of equal size, would let positions to
    come decide who reads whom (Roy et al. 2020 and Kitaev et al. 2020 in their authors' code do).

    Args:
        queries: (B, H, N) integers from 0, the cluster of each position as a query.
        keys: likewise as a key; None: the same.
        window: the most keys of a query; None: all earlier ones of its cluster.
        chunk: in place of ``window``: keys of a cluster, counted from its first, make chunks of so many. A query with
            m earlier keys reads those of chunk m // chunk, in which it stands, and of the chunk before.
        itself: a query reads the key of its own position, where that is of its cluster.

    Returns:
        A part, of a span of ``window`` or 2 ``chunk`` (N where both are None).
    """
    context = queries.shape[-1]
    position = torch.arange(context, device=queries.device)
    query_codes = queries.long() * context + position  # of a cluster first, then of a position
    query_codes, query_order = query_codes.sort(-1)
    key_codes, key_order, high = query_codes, query_order, (position + itself).expand(query_codes.shape)
    if keys is not None:
        key_codes, key_order = (keys.long() * context + position).sort(-1)
        high = torch.searchsorted(key_codes, query_codes, right=itself)
    start = torch.searchsorted(key_codes, (query_codes // context * context).contiguous())
    low = start
    if window is not None:
        low = torch.maximum(start, high - window)
    elif chunk is not None:
        earlier = torch.searchsorted(key_codes, query_codes) if itself else high
        low = start + ((earlier - start) // chunk - 1).clamp_min(0) * chunk
    rows = query_order.int()
    return Part(rows, rows if keys is None else key_order.int(), low.int(), high.int())


def hash_rounds(buckets: Tensor, chunk: int) -> Selection:
    """Each query reads earlier keys of its bucket in any round: its own chunk of them and the one before.

    Chunks count the members of a bucket so far. In the paper they are cut from all positions sorted by bucket, so that
    positions to come decide where a chunk begins and who reads whom (Kitaev et al. 2020, section 2). As there, a query
    reads its own key only where it has nothing else in any round: the first part then has it.

    Args:
        buckets: (B, H, R, N) integers from 0, the bucket of each position in R rounds.
        chunk: members of a chunk.

    Returns:
        A part a round; rounds may share pairs.
    """
    parts = [recent_members(each, chunk=chunk, itself=False) for each in buckets.unbind(2)]
    alone = torch.ones_like(parts[0].low, dtype=torch.bool)  # by position
    for query_order, _, low, high in parts:
        assert query_order is not None
        alone &= torch.empty_like(alone).scatter_(-1, query_order.long(), low == high)
    first = parts[0]
    assert first.query_order is not None
    # Who has no earlier member is the first of its bucket. So it stands at its own bound, and the next one's is higher.
    parts[0] = first._replace(high=first.high + alone.gather(-1, first.query_order.long()).int())
    return Selection(tuple(parts), 2 * chunk, disjoint=len(parts) == 1)
