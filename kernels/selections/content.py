"""Selections by content: chosen blocks of keys, keys of the query's cluster, matches, and rounds of hashing.

Letters: B batch, H heads, N positions, T chosen blocks of a query, R rounds of hashing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longstride.kernels.selections.base import Part, Selection


def chosen_blocks(numbers: Tensor, block: int, places: Tensor | None = None) -> Selection:
    """Let each query read its own block up to itself, and some earlier blocks.

    Args:
        numbers: (B, H, N, T) integers, the blocks that each query chooses: earlier than its own, none twice; -1 for no
            block. T may be 0.
        block: positions per block; the last block may be shorter.
        places: (B, N) int64, each position's place in its document. Blocks are then counted from the start of the
            query's document. None: from position 0.

    Returns:
        A disjoint selection of 1 + T parts: the own blocks, and the r-th choice of all queries, sorted by block.
    """
    batch, heads, context, choices = numbers.shape
    position = torch.arange(context, device=numbers.device)
    place = position[None] if places is None else places
    bounds = ((position - place % block).int()[:, None], position.int() + 1)  # of the query's block
    parts = [Part(None, None, *(bound.expand(batch, heads, context) for bound in bounds))]
    start = (position - place)[:, None]
    for choice in range(choices):
        number = numbers[..., choice].long()
        first = (number * block + start).where(number >= 0, -block)  # of the chosen block
        codes = (first * context + position).sort(-1).values  # queries without a choice are first
        first = codes.div(context, rounding_mode="floor")
        parts.append(Part((codes - first * context).int(), None, first.clamp_min(0).int(), (first + block).int()))
    return Selection(tuple(parts), block)


def listed_positions(numbers: Tensor, block: int, query: Tensor) -> Tensor:
    """Return the positions of the keys in the blocks that queries list, up to each query itself.

    Args:
        numbers: (…, T) integers, of blocks counted from position 0; -1 for none.
        block: L positions.
        query: (…), the position of each query.

    Returns:
        (…, T · L) int64; -1 for none.
    """
    keys = numbers.long()
    if block > 1:
        keys = (keys[..., None] * block + torch.arange(block, device=keys.device)).where(keys[..., None] >= 0, -1)
        keys = keys.flatten(-2)
    return keys.where(keys <= query[..., None], -1)


def recent_members(
    queries: Tensor,
    keys: Tensor | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    itself: bool = True,
) -> Part:
    """Let each query read the most recent earlier keys of its cluster, so that the selection is causal.

    A query must not read all keys of a cluster, and clusters must not be cut into runs of equal size: later positions
    would then decide what a query reads (as in the code of Roy et al. 2020 and Kitaev et al. 2020).

    Args:
        queries: (B, H, N) integers from 0, the cluster of each position as a query.
        keys: (B, H, N), the cluster of each position as a key. Default: ``queries``.
        window: maximum number of keys of a query. Default: all earlier keys of its cluster.
        chunk: alternative to ``window``. Keys of a cluster, counted from its first, form chunks of this size. A query
            with m earlier keys reads those in its chunk, m // chunk, and in the chunk before.
        itself: whether a query reads the key of its own position, if that is in its cluster.

    Returns:
        A part with a span of ``window`` or 2 ``chunk`` (N if both are None).
    """
    context = queries.shape[-1]
    position = torch.arange(context, device=queries.device)
    query_codes, query_order = (queries.long() * context + position).sort(-1)  # by cluster, then by position
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


def recent_matches(queries: Tensor, keys: Tensor, starts: Tensor, *, behind: int, count: int) -> Part:
    """Let each query read the most recent keys of its cluster that lie some positions before it.

    Args:
        queries: (B, H, N) integers from 0, the cluster of each position as a query.
        keys: (B, H, N), the cluster of each position as a key; -1 for none.
        starts: (B, H, N) int64, the first position whose key a query may read; they never decrease along N.
        behind: how many positions a key lies before the query at least.
        count: maximum number of keys of a query.

    Returns:
        A part with a span of ``count``. Queries without keys are its last rows, where they cost nothing.
    """
    context = queries.shape[-1]
    position = torch.arange(context, device=queries.device)
    cluster = queries.long() * context
    key_codes, key_order = (keys.long() * context + position).sort(-1)  # by cluster, then by position
    first = torch.searchsorted(key_codes, cluster + starts)
    high = torch.searchsorted(key_codes, cluster + position - behind, right=True)
    high, query_order = high.where(high > first, context + 1).sort(dim=-1, stable=True)
    low = torch.maximum(first.gather(-1, query_order), high - count)
    low, high = (bound.where(high <= context, context) for bound in (low, high))
    return Part(query_order.int(), key_order.int(), low.int(), high.int())


def hash_rounds(buckets: Tensor, chunk: int) -> Selection:
    """Let each query read earlier keys of its bucket in any round: those in its chunk and in the chunk before.

    Chunks count the members of a bucket so far. In the paper they are cut from all positions sorted by bucket, so later
    positions decide where a chunk begins (Kitaev et al. 2020, section 2). As in the paper, a query reads its own key
    only if it reads no other key in any round. The first part has these pairs.

    Args:
        buckets: (B, H, R, N) integers from 0, the bucket of each position in R rounds.
        chunk: members per chunk.

    Returns:
        A selection with one part per round; rounds may share pairs.
    """
    parts = [recent_members(round_buckets, chunk=chunk, itself=False) for round_buckets in buckets.unbind(2)]
    is_alone = torch.ones_like(parts[0].low, dtype=torch.bool)  # by position
    for query_order, _, low, high in parts:
        assert query_order is not None
        is_alone &= torch.empty_like(is_alone).scatter_(-1, query_order.long(), low == high)
    first = parts[0]
    assert first.query_order is not None
    # A query without earlier members is the first of its bucket, so its own key is at its upper bound.
    parts[0] = first._replace(high=first.high + is_alone.gather(-1, first.query_order.long()).int())
    return Selection(tuple(parts), 2 * chunk, disjoint=len(parts) == 1)
