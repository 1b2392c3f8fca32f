"""From the last residual block to logits, or to each token's nats without all logits of a context in memory.

Letters: R rows (positions of all contexts), C width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.sparse_model.part import Part, Work

CHUNK_ROWS = 1 << 14  # rows of logits in memory at once


class Logits(Part, nn.Linear):
    """The projection to logits (section 5.2); given the targets, their cross-entropy instead."""

    part = trained_as = "output"

    def initialize(self) -> None:
        """Make every token equally likely."""
        nn.init.zeros_(self.weight)

    def work(self, positions: int, batch: int) -> Work:
        """Count the products twice: logits are not stored, and the backward pass computes them again."""
        products = 2 * positions * self.weight.numel()
        return Work(linear=products, again=products)

    def forward(self, h: Tensor, targets: Tensor | None = None) -> Tensor:
        """Map (B, N, C) to logits (B, N, V), or with ``targets`` (B, N) int64 to nats (B, N) in fp32.

        Nats are fp64 for fp64 rows.
        """
        if targets is None:
            return super().forward(h)
        nats = CrossEntropyInChunks.apply(h.flatten(0, -2), self.weight, targets.flatten(), CHUNK_ROWS)
        return nats.view(targets.shape)


class CrossEntropyInChunks(torch.autograd.Function):
    """The cross-entropy of each row with memory for only ``rows`` rows of logits, which are computed twice.

    Saves its inputs for the backward pass: h (R, C), the projection's weight (V, C) and targets (R,) int64. Returns
    nats (R,) in fp32 (fp64 for fp64), in which the weight's gradient is summed too.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(h, weight, targets)
        ctx.rows = rows
        wide = torch.promote_types(h.dtype, torch.float32)
        pieces = zip(h.split(rows), targets.split(rows), strict=True)
        return torch.cat([F.cross_entropy(F.linear(x, weight).to(wide), t, reduction="none") for x, t in pieces])

    @staticmethod
    def backward(ctx: Any, grad_nats: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, targets = ctx.saved_tensors
        grad_h = torch.empty_like(h)
        grad_weight = torch.zeros_like(weight, dtype=grad_nats.dtype)
        pieces = zip(*(x.split(ctx.rows) for x in (h, targets, grad_nats, grad_h)), strict=True)
        for chunk, labels, grad, target in pieces:
            # d nats / d logits = softmax - one-hot
            slope = F.linear(chunk, weight).to(grad.dtype).softmax(1)
            slope.scatter_add_(1, labels[:, None], torch.full_like(slope[:, :1], -1))
            slope = slope.mul_(grad[:, None]).to(h.dtype)
            target.copy_(slope @ weight)
            grad_weight.add_(slope.t() @ chunk)
        return grad_h, grad_weight.to(weight.dtype), None, None
