"""One query on the CPU: the rows of the cache that it reads, through views where they lie regularly.

Letters: B batch, H heads of one pattern, N positions, M keys that are read, D and E widths of keys and values.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from kernels.autograd import accumulator_dtype
from kernels.patterns.base import Pattern
from kernels.reads import Read, reads


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Reads CPU memory."""
    return None if q.device.type == "cpu" else f"it needs CPU tensors, not {q.device}"


def attend_one(
    q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], position: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (B, H, E) in v's dtype and logsumexp (B, H) in fp32 (fp64 for fp64)."""
    if torch.is_autocast_enabled("cpu"):  # it would take the products down to 16 bits
        with torch.autocast("cpu", enabled=False):
            return attend_one(q, k, v, patterns, position, scale)
    context, groups = k.shape[2], _groups(patterns)
    if len(groups) == 1:
        return _attend(q, k, v, reads(patterns[0], position, context), scale)
    out = v.new_empty(*q.shape[:2], v.shape[3])
    lse = q.new_empty(q.shape[:2], dtype=accumulator_dtype(q.dtype))
    for pattern, heads in groups:
        found = _attend(q[:, heads], k[:, heads], v[:, heads], reads(pattern, position, context), scale)
        out[:, heads], lse[:, heads] = found
    return out, lse


@lru_cache(maxsize=64)
def _groups(patterns: tuple[Pattern, ...]) -> tuple[tuple[Pattern, slice], ...]:
    """Each distinct pattern with its heads, once as a slice if they lie regularly, else head by head."""
    groups: list[tuple[Pattern, slice]] = []
    for pattern in dict.fromkeys(patterns):
        heads = [head for head, other in enumerate(patterns) if other == pattern]
        step = heads[1] - heads[0] if len(heads) > 1 else 1
        regular = slice(heads[0], heads[-1] + 1, step)
        if list(range(len(patterns))[regular]) == heads:
            groups.append((pattern, regular))
        else:
            groups += [(pattern, slice(head, head + 1)) for head in heads]
    return tuple(groups)


def _attend(q: Tensor, k: Tensor, v: Tensor, wanted: list[Read], scale: float) -> tuple[Tensor, Tensor]:
    """One softmax over all that is read."""
    wide = accumulator_dtype(q.dtype)
    if not wanted:
        return v.new_zeros(*q.shape[:2], v.shape[3]), q.new_full(q.shape[:2], -math.inf, dtype=wide)
    batch, heads, width = q.shape
    query = q.reshape(batch * heads, 1, width).to(wide)
    # Three axes and sums within the products: a call is a handful of small operations, each of which costs its start.
    unread = query.new_empty(1)
    found = [torch.baddbmm(unread, query, _flat(read, k, wide).transpose(1, 2), beta=0, alpha=scale) for read in wanted]
    scores = torch.cat(found, 2) if len(found) > 1 else found[0]  # (B·H, 1, M)
    peak = scores.amax(2, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(2, keepdim=True)
    out, first = torch.bmm(weights[:, :, : len(wanted[0])], _flat(wanted[0], v, wide)), len(wanted[0])  # (B·H, 1, E)
    for read in wanted[1:]:
        out.baddbmm_(weights[:, :, first : first + len(read)], _flat(read, v, wide))
        first += len(read)
    return out.div_(total).view(batch, heads, v.shape[3]).to(v.dtype), total.log_().add_(peak).view(batch, heads)


def _flat(read: Read, x: Tensor, wide: torch.dtype) -> Tensor:
    """The rows that are read, (B·H, M, ·): a view of the cache where it can be one."""
    return read.rows_of(x).to(wide).flatten(0, 1)
