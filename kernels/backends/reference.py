"""Dense attention with a mask: the specification of all other backends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from longstride.kernels.backends import accumulator_dtype
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import Selection, selection_mask


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return None, as it runs everywhere. Memory and time grow with N^2."""
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, first_query: int
) -> tuple[Tensor, Tensor]:
    """Return output (B, H, M, Dv) and logsumexp (B, H, M), by torch's differentiable operations in fp32 or fp64."""
    if torch.compiler.is_exporting() and len(set(patterns)) == 1:
        patterns = patterns[:1]  # one mask for all heads
    queries = None
    if q.shape[2] != k.shape[2]:
        queries = torch.arange(first_query, first_query + q.shape[2], device=q.device)
    return _attend(q, k, v, pattern_mask(patterns, k.shape[2], q.device, queries), scale)


def attend_selected(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp of attention over a selection, as ``attend`` does."""
    return _attend(q, k, v, selection_mask(selection, k.shape[2]), scale)


def attend_indexed(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return output of attention to listed positions (B, N, S), -1 for none, and the mean weights of these."""
    missing = positions < 0
    allowed = torch.zeros(*positions.shape[:2], k.shape[2] + 1, dtype=torch.bool, device=q.device)
    allowed = allowed.scatter_(-1, positions.where(~missing, k.shape[2]), True)[:, None, :, :-1]
    out, lse = _attend(q, k, v, allowed, scale)
    with torch.no_grad(), _without_autocast(q.device.type):
        queries, keys = (x.to(lse.dtype) for x in (q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)))
        weights = ((queries @ keys.mT) * scale - lse[..., None]).exp().mean(1)
        return out, weights.gather(-1, positions.clamp_min(0)).masked_fill(missing, 0.0)


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp of attention with a mask, (H, M, N) or (B, H, M, N)."""
    dtype, wide = q.dtype, accumulator_dtype(q.dtype)
    q, k, v = (x.to(wide) for x in (q, k, v))
    if k.shape[1] < q.shape[1]:
        key_heads = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1])
        k, v = (x.index_select(1, key_heads) for x in (k, v))
    blind = ~allowed.any(-1, keepdim=True)  # queries without keys: their scores are 0 first, then masked
    with _without_autocast(q.device.type):
        scores = (q @ k.mT) * scale
        scores = scores.masked_fill(~allowed, float("-inf")).masked_fill(blind, 0.0)
        weights = torch.softmax(scores, -1).masked_fill(blind, 0.0)
        lse = torch.logsumexp(scores, -1).masked_fill(blind.squeeze(-1), float("-inf"))
        return (weights @ v).to(dtype), lse


def prepare(
    k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, once: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of (q, position, return_lse) that attends from single queries to these caches."""

    def attend_one(q: Tensor, position: int, return_lse: bool) -> tuple[Tensor, Tensor]:
        """Return output (B, H, Dv) and logsumexp (B, H) of one query, q (B, H, D). Reads all N keys."""
        context = torch.arange(k.shape[2], device=k.device)
        allowed = torch.stack([pattern.mask(context[position], context) for pattern in patterns])  # (H, N)
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        keys, values = (x.masked_fill(~allowed[..., None], 0.0) for x in (keys, values))  # others may be NaN
        out, lse = _attend(q[:, :, None], keys, values, allowed[:, None], scale)
        return out.squeeze(2), lse.squeeze(2)

    return attend_one


def _without_autocast(device_type: str) -> AbstractContextManager:
    """Disable autocast, which would compute products in 16 bits, unless exporting or the device has none."""
    if torch.compiler.is_exporting() or not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def pattern_mask(
    patterns: tuple[Pattern, ...], context: int, device: torch.device, queries: Tensor | None = None
) -> Tensor:
    """Return the masks of all heads, (H, N, N) bool: [h, i, j] is True where query i of head h attends to key j.

    With the positions of some ``queries`` (M,), return their masks: (H, M, N).
    """
    position = torch.arange(context, device=device)
    queries = position if queries is None else queries
    masks = {pattern: pattern.mask(queries[:, None], position[None, :]) for pattern in dict.fromkeys(patterns)}
    return torch.stack([masks[pattern] for pattern in patterns])
