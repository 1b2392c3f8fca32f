"""Queries that read the keys of their own cluster. Letters: B batch, H heads, N positions."""

from __future__ import annotations

import torch
from torch import Tensor

from longstride.kernels.selections.base import Part


def recent_members(
    queries: Tensor, keys: Tensor | None = None, *, window: int | None = None, itself: bool = True
) -> Part:
    """Each query reads the most recent earlier keys of its cluster, so that nothing of the future is seen.

    To read a cluster's keys whatever their number, or to cut clusters into runs of equal size, would let positions to
    come decide who reads whom (Roy et al. 2020 and Kitaev et al. 2020 in their authors' code do).

    Args:
        queries: (B, H, N) integers from 0, the cluster of each position as a query.
        keys: likewise as a key; None: the same.
        window: the most keys of a query; None: all earlier ones of its cluster.
        itself: a query reads the key of its own position, where that is of its cluster.

    Returns:
        A part, of a span of ``window`` (N where that is None).
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
    low = start if window is None else torch.maximum(start, high - window)
    rows = query_order.int()
    return Part(rows, rows if keys is None else key_order.int(), low.int(), high.int())
