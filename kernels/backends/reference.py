"""Dense attention under a mask: the specification that every other backend is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.autograd import accumulator_dtype
from kernels.patterns.base import Pattern


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Runs everywhere; memory and time grow with N^2."""
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, Dv) and logsumexp (B, H, N) by torch's own differentiable operations, in fp32 or fp64 inside."""
    wide = accumulator_dtype(q.dtype)
    allowed = pattern_mask(patterns, q.shape[2], q.device)
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * scale
    scores = scores.masked_fill(~allowed, float("-inf"))
    # A query without keys has only -inf: a maximum of 0 keeps its weights exp(-inf) = 0 and its gradients 0.
    maximum = scores.amax(-1, keepdim=True).detach()
    maximum = torch.where(maximum == float("-inf"), 0.0, maximum)
    weights = torch.exp(scores - maximum)
    total = weights.sum(-1, keepdim=True)
    blind = ~allowed.any(-1, keepdim=True)
    total = total.masked_fill(blind, 1.0)
    out = (weights / total) @ v.to(wide)
    lse = (maximum + torch.log(total)).masked_fill(blind, float("-inf"))
    return out.to(q.dtype), lse.squeeze(-1)


def pattern_mask(patterns: tuple[Pattern, ...], context: int, device: torch.device) -> Tensor:
    """The masks of all heads, (H, N, N) bool: [h, i, j] is True where query i of head h attends to key j."""
    position = torch.arange(context, device=device)
    return torch.stack([pattern.mask(position[:, None], position[None, :]) for pattern in patterns])
