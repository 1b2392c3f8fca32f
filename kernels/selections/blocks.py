"""Queries that read chosen blocks of keys. Letters: B batch, H heads, N positions, T chosen blocks of a query."""

from __future__ import annotations

import torch
from torch import Tensor

from longstride.kernels.selections.base import Part, Selection


def chosen_blocks(numbers: Tensor, block: int) -> Selection:
    """Each query reads its own block up to itself, and the whole of some blocks before that.

    Args:
        numbers: (B, H, N, T) integers, the blocks that each query chooses: each before its own one, none twice; -1 for
            none. T may be 0.
        block: positions of one; the last block may be shorter.

    Returns:
        A disjoint selection of 1 + T parts: the own blocks, and the r-th choice of all queries, by block.
    """
    batch, heads, context, choices = numbers.shape
    position = torch.arange(context, dtype=torch.int32, device=numbers.device)
    own = (position // block * block, position + 1)
    parts = [Part(None, None, *(bound.expand(batch, heads, context) for bound in own))]
    for choice in range(choices):
        codes = (numbers[..., choice].long() * context + position).sort(-1).values  # no choice comes first
        number = codes.div(context, rounding_mode="floor")
        low = (number * block).clamp_min(0)
        high = (number + 1) * block
        parts.append(Part((codes - number * context).int(), None, low.int(), high.int()))
    return Selection(tuple(parts), block)
