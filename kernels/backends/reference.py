"""Dense attention under a mask: the specification that every other backend is tested against."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from longstride.kernels.backends import accumulator_dtype
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import Selection, selection_mask


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Runs everywhere; memory and time grow with N^2."""
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, Dv) and logsumexp (B, H, N) by torch's own differentiable operations, in fp32 or fp64 inside."""
    if torch.compiler.is_exporting() and len(set(patterns)) == 1:
        patterns = patterns[:1]  # one mask for all heads
    return _attend(q, k, v, pattern_mask(patterns, q.shape[2], q.device), scale)


def attend_selected(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> tuple[Tensor, Tensor]:
    """``attend`` over a selection."""
    return _attend(q, k, v, selection_mask(selection, q.shape[2]), scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Under a mask (H, N, N) or (B, H, N, N)."""
    if torch.compiler.is_exporting():
        return _exported(q, k, v, allowed, scale)
    wide = accumulator_dtype(q.dtype)
    blind = ~allowed.any(-1, keepdim=True)  # queries without keys: computed from zeros, then masked
    shared = (k.shape[0], k.shape[1], q.shape[1] // k.shape[1] * q.shape[2])  # rows that read the same head of k
    by_key_head = allowed.unflatten(-3, (k.shape[1], -1)).flatten(-3, -2)
    with _without_autocast(q.device.type):
        scores = _PairProducts.apply(q.to(wide).reshape(*shared, q.shape[3]), k.to(wide), by_key_head)
        scores = scores.view(*q.shape[:3], k.shape[2]) * scale
        scores = scores.masked_fill(~allowed, float("-inf")).masked_fill(blind, 0.0)
        weights = torch.softmax(scores, -1).masked_fill(~allowed, 0.0)  # those of NaN are NaN, all of them
        lse = torch.logsumexp(scores, -1).masked_fill(blind.squeeze(-1), float("-inf"))
        out = _RowSums.apply(weights.view(*shared, k.shape[2]), v.to(wide), by_key_head)
        return out.view(*q.shape[:3], v.shape[3]).to(q.dtype), lse


def _exported(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same as a program for other runtimes has it: plain products of any number of positions, and no autograd.

    What is not finite reaches more rows there than those that read it.
    """
    wide = accumulator_dtype(q.dtype)
    if k.shape[1] < q.shape[1]:
        served = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1])
        k, v = (x.index_select(1, served) for x in (k, v))
    blind = ~allowed.any(-1, keepdim=True)
    scores = (q.to(wide) @ k.to(wide).mT) * scale
    scores = scores.masked_fill(~allowed, float("-inf")).masked_fill(blind, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(blind, 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(blind.squeeze(-1), float("-inf"))
    return (weights @ v.to(wide)).to(q.dtype), lse


class _PairProducts(torch.autograd.Function):
    """a_i . b_j of all pairs: (…, R, D), (…, N, D) to (…, R, N); what comes back must be 0 for forbidden ones."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, allowed: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, allowed)
        return a @ b.mT

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b, allowed = ctx.saved_tensors
        return _RowSums.apply(grad, b, allowed), _RowSums.apply(grad.mT, a, allowed.mT), None


class _RowSums(torch.autograd.Function):
    """Sums of rows b_j by weights that are 0 for forbidden pairs: (…, R, N), (…, N, D) to (…, R, D).

    What is not finite in b_j reaches the rows that read j, as NaN; a plain product brings 0 * NaN to every row.
    """

    @staticmethod
    def forward(ctx, weights: Tensor, b: Tensor, allowed: Tensor) -> Tensor:
        ctx.save_for_backward(weights, b, allowed)
        bad = ~b.isfinite()
        if not torch.compiler.is_compiling() and not bad.any():  # as always; a compiled graph cannot ask
            return weights @ b
        met = allowed.to(b.dtype) @ bad.to(b.dtype) > 0
        return (weights @ b.masked_fill(bad, 0.0)).masked_fill(met, float("nan"))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, b, allowed = ctx.saved_tensors
        return _PairProducts.apply(grad, b, allowed), _RowSums.apply(weights.mT, grad, allowed.mT), None


def prepare(
    k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, once: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Attention of one query after another from these caches, as (q, position, return_lse); nothing is kept."""
    return partial(_attend_one, k, v, patterns, scale)


def _attend_one(
    k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, q: Tensor, position: int, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Output (B, H, Dv) and logsumexp (B, H) of one query, q (B, H, D), from the row of the mask: N reads."""
    wide = accumulator_dtype(q.dtype)
    context = torch.arange(k.shape[2], device=q.device)
    allowed = torch.stack([pattern.mask(context[position], context) for pattern in patterns])  # (H, N)
    blind = ~allowed.any(-1, keepdim=True)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    k, v = (x.to(wide).masked_fill(~allowed[..., None], 0.0) for x in (k, v))  # rows that are not read may be NaN
    with _without_autocast(q.device.type):
        scores = (k @ q.to(wide)[..., None]).squeeze(-1) * scale
        scores = scores.masked_fill(~allowed, float("-inf")).masked_fill(blind, 0.0)
        weights = torch.softmax(scores, -1).masked_fill(blind, 0.0)
        lse = torch.logsumexp(scores, -1).masked_fill(blind.squeeze(-1), float("-inf"))
        return (weights[..., None, :] @ v).squeeze(-2).to(q.dtype), lse


def _without_autocast(device_type: str) -> AbstractContextManager:
    """Autocast, which not every device type has, would compute the products in 16 bits."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def pattern_mask(patterns: tuple[Pattern, ...], context: int, device: torch.device) -> Tensor:
    """The masks of all heads, (H, N, N) bool: [h, i, j] is True where query i of head h attends to key j."""
    position = torch.arange(context, device=device)
    masks = {pattern: pattern.mask(position[:, None], position[None, :]) for pattern in dict.fromkeys(patterns)}
    return torch.stack([masks[pattern] for pattern in patterns])
