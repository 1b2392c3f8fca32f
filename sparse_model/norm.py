"""Layer norm and RMS norm. Letters: B batch, N positions, C width, R rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.part import Part
from longstride.sparse_model.tiles import EPS, inverse_rms, tiles, wide_of


class LayerNorm(Part, nn.LayerNorm):
    """Mean 0 and variance 1, then a weight and a bias for each channel (section 5.2)."""

    part = "norms"


class RMSNorm(Part):
    """x / √(mean x² + ε) over the channels, then a weight for each channel (Zhang & Sennrich 2019).

    The statistics are computed in fp32 (fp64 for fp64), whatever the precision of x.
    """

    part = "norms"

    def __init__(self, width: int, eps: float = EPS) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, h: Tensor) -> Tensor:
        """Normalise the last axis of h (…, C)."""
        if h.device.type != "cpu":
            return F.rms_norm(h, h.shape[-1:], self.weight, self.eps)
        if h.shape[-2] == 1:  # a single row: fewer calls
            return (h * inverse_rms(h, eps=self.eps)).mul_(self.weight).to(h.dtype)
        return TiledRMSNorm.apply(h.flatten(0, -2), self.weight, self.eps).view(h.shape)


def norm_of(network: NetworkConfig) -> nn.Module:
    """Make the norm of a configuration, with weights 1 and biases 0."""
    kind = RMSNorm if network.norm == "rms" else LayerNorm
    return kind(network.width) if network.norm_epsilon is None else kind(network.width, eps=network.norm_epsilon)


class TiledRMSNorm(torch.autograd.Function):
    """RMS norm for CPUs, where torch's own runs single operations over all rows and takes several times as long.

    Takes x (R, C) and the weight (C,), and saves both with one number for each row. Intermediate values are fp32 (fp64
    for fp64).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
        out, scales = torch.empty_like(x), x.new_empty(x.shape[0], 1, dtype=wide_of(x))
        weights = weight.to(wide_of(x))
        for place, (rows,) in tiles(x, 0, scratch=1):
            scale = inverse_rms(rows.copy_(x[place]), out=scales[place], eps=eps)
            out[place] = rows.mul_(scale).mul_(weights)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        grad_x, weights = torch.empty_like(x), weight.to(scales.dtype)
        grad_weight = torch.zeros_like(weights)
        for place, (rows, grad, products) in tiles(x, 0, scratch=3):
            rows.copy_(x[place]).mul_(scales[place])
            torch.mul(rows, grad.copy_(grad_out[place]), out=products)
            grad_weight += products.sum(0)
            # What is along a row does not change its direction, which is all that the output has of it.
            along = (products @ weights).div_(-x.shape[1])[:, None]
            grad_x[place] = grad.mul_(weights).addcmul_(rows, along).mul_(scales[place])
        return grad_x, grad_weight.to(weight.dtype), None
