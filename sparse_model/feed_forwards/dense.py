"""The paper's feed-forward: two projections around an activation. Letters: R rows, C width, F inner width."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.part import (
    PLAIN,
    BlockContext,
    FeedForward,
    FeedForwardConfig,
    MixerOutput,
    Work,
    draw_linear,
)

LONG_ROWS = 1 << 17  # with more rows, the backward pass computes the inner activations again
CHUNK_ROWS = 1 << 14  # rows at a time in that case


def sigmoid_gelu(x: Tensor) -> Tensor:
    """Compute x·sigmoid(1.702 x), the approximation of GELU that the paper uses (section 5.2)."""
    return x * torch.sigmoid(1.702 * x)


def sigmoid_gelu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``sigmoid_gelu`` and its derivative."""
    gate = torch.sigmoid(1.702 * x)
    inner = x * gate
    return inner, gate + 1.702 * inner * (1 - gate)


def squared_relu(x: Tensor) -> Tensor:
    """Compute max(x, 0)² (So et al. 2021, Primer)."""
    return SquaredReLU.apply(x) if x.requires_grad else x.relu().square_()


def squared_relu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``squared_relu`` and its derivative."""
    positive = x.relu()
    return positive.square(), 2 * positive


def gelu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute x·Φ(x), with Φ the normal distribution (Hendrycks & Gimpel 2016), and its derivative."""
    share = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return F.gelu(x), share + x * density


class SquaredReLU(torch.autograd.Function):
    """max(x, 0)² in two passes, and its gradient in one; saves max(x, 0)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return torch.addcmul(positive.new_zeros(()), grad_out, positive, value=2)


# Each activation, and a function that also returns its derivative.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "sigmoid_gelu": (sigmoid_gelu, sigmoid_gelu_and_slope),
    "squared_relu": (squared_relu, squared_relu_and_slope),
    "gelu": (F.gelu, gelu_and_slope),
}


class DenseConfig(FeedForwardConfig):
    """Two projections around an activation (section 5.2)."""

    supports: ClassVar = frozenset({"padding", "reversible", "sections"})
    type: Literal["dense"] = Field(default="dense", description="two projections around an activation")
    activation: Literal["sigmoid_gelu", "squared_relu", "gelu"] = Field(
        default="sigmoid_gelu",
        description="sigmoid_gelu is the paper's, squared_relu that of So et al. 2021, gelu the exact one",
    )

    def make(self, network: NetworkConfig) -> DenseFeedForward:
        return DenseFeedForward(network, self.activation)


class DenseFeedForward(FeedForward):
    """Two projections around the activation (section 5.2)."""

    part = "feed-forward"

    def __init__(self, network: NetworkConfig, kind: str) -> None:
        """Make the layers; ``kind`` is the activation's."""
        super().__init__()
        self.network, self.kind = network, kind
        self.activation, _ = ACTIVATIONS[kind]
        self.expand = nn.Linear(network.width, network.feed_forward_width, bias=network.bias)
        self.contract = nn.Linear(network.feed_forward_width, network.width, bias=network.bias)

    def initialize(self) -> None:
        draw_linear(self.expand, self.network)
        draw_linear(self.contract, self.network, into_stream=True)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Map (B, N, C) to (B, N, C). Padding is computed like any row: rows that nothing reads give no gradient."""
        plain = isinstance(self.expand, nn.Linear) and isinstance(self.contract, nn.Linear)  # not replaced by adapters
        if torch.compiler.is_exporting() or h.shape[:-1].numel() <= LONG_ROWS or not plain:
            return MixerOutput(self.contract(self.activation(self.expand(h))))
        parameters = (self.expand.weight, self.expand.bias, self.contract.weight, self.contract.bias)
        rows = FeedForwardInChunks.apply(h.flatten(0, -2), *parameters, self.kind, CHUNK_ROWS)
        return MixerOutput(rows.view(h.shape))

    def work(self, positions: int, batch: int) -> Work:
        """Count the products. For long inputs the backward pass computes the first half again."""
        expand, contract = (2 * positions * linear.weight.numel() for linear in (self.expand, self.contract))
        long = batch * positions // self.division.size > LONG_ROWS  # of the rows of one process
        return Work(linear=expand + contract, again=expand if long else 0)


class FeedForwardInChunks(torch.autograd.Function):
    """The feed-forward with memory for only ``rows`` rows of inner activations, which are computed twice.

    Saves its inputs for the backward pass: h (R, C), expand (F, C), its bias (F,) or None, contract (C, F), its bias
    (C,) or None. Returns (R, C). Gradients of parameters are summed in fp32 (fp64 for fp64).
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        expand: Tensor,
        expand_bias: Tensor | None,
        contract: Tensor,
        contract_bias: Tensor | None,
        kind: str,
        rows: int,
    ) -> Tensor:
        ctx.save_for_backward(h, expand, expand_bias, contract, contract_bias)
        ctx.kind, ctx.rows = kind, rows
        activation, _ = ACTIVATIONS[kind]
        out = torch.empty_like(h)
        for chunk, target in zip(h.split(rows), out.split(rows), strict=True):
            inner = activation(F.linear(chunk, expand, expand_bias))
            target.copy_(F.linear(inner, contract, contract_bias))
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        h, *parameters = ctx.saved_tensors
        expand, expand_bias, contract, _ = parameters
        _, activation_and_slope = ACTIVATIONS[ctx.kind]
        wide = torch.promote_types(h.dtype, torch.float32)
        totals = [None if x is None else torch.zeros_like(x, dtype=wide) for x in parameters]
        grad_h = torch.empty_like(h)
        chunks = (x.split(ctx.rows) for x in (h, grad_out, grad_h))
        for chunk, grad, target in zip(*chunks, strict=True):
            inner, slope = activation_and_slope(F.linear(chunk, expand, expand_bias))
            grad_x = (grad @ contract).mul_(slope)
            target.copy_(grad_x @ expand)
            pieces = (grad_x.t() @ chunk, grad_x.sum(0, dtype=wide), grad.t() @ inner, grad.sum(0, dtype=wide))
            for total, piece in zip(totals, pieces, strict=True):
                if total is not None:
                    total.add_(piece)
        gradients = (None if t is None else t.to(h.dtype) for t in totals)
        return (grad_h, *gradients, None, None)
