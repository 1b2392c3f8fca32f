"""The feed-forward part of one residual block. Letters: R rows (positions of all contexts), C width, F inner width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.sparse_model.config import ModelConfig

LONG_ROWS = 1 << 17  # above so many rows, the backward pass computes the inner activations again
CHUNK_ROWS = 1 << 14  # rows at a time, then


def sigmoid_gelu(x: Tensor) -> Tensor:
    """x·sigmoid(1.702 x), any shape: the approximation of GELU that the paper uses (section 5.2)."""
    return x * torch.sigmoid(1.702 * x)


class FeedForward(nn.Module):
    """Two projections around the activation (section 5.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, config.feed_forward_width)
        self.contract = nn.Linear(config.feed_forward_width, config.width)

    def forward(self, h: Tensor) -> Tensor:
        """(B, N, C) to (B, N, C)."""
        if h.shape[:-1].numel() <= LONG_ROWS:
            return self.contract(sigmoid_gelu(self.expand(h)))
        parameters = (self.expand.weight, self.expand.bias, self.contract.weight, self.contract.bias)
        return FeedForwardInChunks.apply(h.flatten(0, -2), *parameters, CHUNK_ROWS).view(h.shape)


class FeedForwardInChunks(torch.autograd.Function):
    """The feed-forward part with memory for ``rows`` rows of inner activations, which are computed twice.

    It saves only its inputs for the backward pass: h (R, C), expand (F, C), its bias (F,), contract (C, F), its bias
    (C,). It returns (R, C). Gradients of parameters are summed in fp32 (fp64 for fp64).
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, expand: Tensor, expand_bias: Tensor, contract: Tensor, contract_bias: Tensor, rows: int
    ) -> Tensor:
        ctx.save_for_backward(h, expand, expand_bias, contract, contract_bias)
        ctx.rows = rows
        out = torch.empty_like(h)
        for chunk, target in zip(h.split(rows), out.split(rows), strict=True):
            inner = sigmoid_gelu(F.linear(chunk, expand, expand_bias))
            target.copy_(F.linear(inner, contract, contract_bias))
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        h, *parameters = ctx.saved_tensors
        expand, expand_bias, contract, _ = parameters
        wide = torch.promote_types(h.dtype, torch.float32)
        totals = [torch.zeros_like(parameter, dtype=wide) for parameter in parameters]
        grad_h = torch.empty_like(h)
        chunks = (x.split(ctx.rows) for x in (h, grad_out, grad_h))
        for chunk, grad, target in zip(*chunks, strict=True):
            x = F.linear(chunk, expand, expand_bias)
            gate = torch.sigmoid(1.702 * x)
            inner = x * gate
            slope = gate + 1.702 * inner * (1 - gate)  # of the activation
            grad_x = (grad @ contract).mul_(slope)
            target.copy_(grad_x @ expand)
            pieces = (grad_x.t() @ chunk, grad_x.sum(0, dtype=wide), grad.t() @ inner, grad.sum(0, dtype=wide))
            for total, piece in zip(totals, pieces, strict=True):
                total.add_(piece)
        return (grad_h, *(t.to(p.dtype) for t, p in zip(totals, parameters, strict=True)), None)
