"""What normalises the rows that enter a part. Letters: B batch, N positions, C width, R rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.sparse_model.config import ModelConfig

EPS = 1e-6  # added to the mean square


class LayerNorm(nn.LayerNorm):
    """Mean 0 and variance 1, then a weight and a bias a channel (section 5.2)."""

    part = "norms"


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) over the channels, then a weight a channel (Zhang & Sennrich 2019).

    The statistics are kept in fp32 (fp64 for fp64), whatever the precision of x.
    """

    part = "norms"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, h: Tensor) -> Tensor:
        """(…, C) to (…, C)."""
        if h.shape[-2] == 1:  # a row: one call is faster than few passes
            return F.rms_norm(h, (h.shape[-1],), self.weight, EPS)
        return RMSNormInFewPasses.apply(h, self.weight)


def norm_of(config: ModelConfig) -> nn.Module:
    """The norm that a configuration asks for, at its first values: weights 1, biases 0."""
    return RMSNorm(config.width) if config.norm == "rms" else LayerNorm(config.width)


def inverse_rms(x: Tensor) -> Tensor:
    """1 / √(mean x² + ε) over the last axis: (…, C) to (…, 1)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().div_(x.shape[-1]).add_(EPS).rsqrt_()


class RMSNormInFewPasses(torch.autograd.Function):
    """torch's own on a CPU is composed of single operations, and takes four times as long as its layer norm there.

    It takes x (…, C) and the weight (C,), and saves both with a number a row. All that is between its input and its
    output is in fp32 (fp64 for fp64).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = inverse_rms(wide)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        grad, wide = grad_out.to(scale.dtype), x.to(scale.dtype)
        products = (grad * wide).flatten(0, -2)  # (R, C)
        grad_weight = scale.flatten() @ products
        # d (x · scale) = scale · (1 - x xᵀ scale² / C): what is along x does not change the output.
        along = (products @ weight.to(scale.dtype)).view_as(scale).mul_(scale**3).div_(-x.shape[-1])
        grad_x = (grad * weight).mul_(scale).addcmul_(wide, along)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype)
