"""From the last residual block to logits, or to each token's nats without all logits of a context in memory.

Letters: B contexts, N positions, R rows (positions of all contexts), C width, V vocabulary, K classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.sparse_model.embedding import Embedding
from longstride.sparse_model.network import NetworkConfig, OutputConfig
from longstride.sparse_model.norm import norm_of
from longstride.sparse_model.objectives import Classify, Objective
from longstride.sparse_model.part import Part, Work, draw_linear

CHUNK_ROWS = 1 << 14  # rows of logits in memory at once


class Transform(Part):
    """A linear layer, GELU and a norm, before the projection of a masked model (Devlin et al. 2019, released code)."""

    def __init__(self, network: NetworkConfig) -> None:
        super().__init__()
        self.network = network
        self.dense = nn.Linear(network.width, network.width, bias=network.bias)
        self.norm = norm_of(network)

    def initialize(self) -> None:
        draw_linear(self.dense, self.network)

    def forward(self, h: Tensor) -> Tensor:
        """Map (…, C) to (…, C)."""
        rows: Tensor = self.norm(F.gelu(self.dense(h)))
        return rows


class Logits(Part, nn.Linear):
    """The projection to logits (section 5.2); given the targets, their cross-entropy instead.

    A tied projection has no ``weight``. It reads the token table from ``embedding``, which is not registered as its
    submodule: the table has one name, and every tool that stores, shards or replaces parameters sees it once.
    """

    part = trained_as = "output"
    embedding: Embedding | None  # has the weight of a tied projection

    def __init__(self, network: NetworkConfig, embedding: Embedding) -> None:
        options = network.output or OutputConfig()
        # On the meta device, the weight that a tied projection lacks is not allocated.
        super().__init__(network.width, network.vocabulary, bias=False, device="meta" if options.tied else None)
        if options.tied:
            self.register_parameter("weight", None)
        object.__setattr__(self, "embedding", embedding if options.tied else None)
        if options.bias:
            self.bias = nn.Parameter(torch.zeros(network.vocabulary))
        self.transform = Transform(network) if options.transform else None

    @property
    def table(self) -> Tensor:
        """The weights of the projection, (V, C). A token table may have a row for masks more."""
        if self.embedding is None or self.weight is not None:
            return self.weight
        table = self.embedding.tokens.weight
        return table[: self.out_features] if self.embedding.config.objective.mask_rows else table

    def initialize(self) -> None:
        """Make every token equally likely, unless the token table decides."""
        if self.embedding is None:
            nn.init.zeros_(self.weight)

    def work(self, positions: int, batch: int) -> Work:
        """Count the products twice: logits are not stored, and the backward pass computes them again."""
        products = 2 * positions * self.table.numel()
        transform = 0 if self.transform is None else 2 * positions * self.transform.dense.weight.numel()
        return Work(linear=products + transform, again=products)

    def forward(self, h: Tensor, targets: Tensor | None = None) -> Tensor:
        """Map (B, N, C) to logits (B, N, V), or with ``targets`` (B, N) int64 to nats (B, N) in fp32.

        Nats are fp64 for fp64 rows.
        """
        if self.transform is not None:
            h = self.transform(h)
        if targets is None:
            return F.linear(h, self.table, self.bias)
        nats = CrossEntropyInChunks.apply(h.flatten(0, -2), self.table, self.bias, targets.flatten(), CHUNK_ROWS)
        return nats.view(targets.shape)


class ClassLogits(Part, nn.Linear):
    """A summary of each context's rows, and its projection to a logit for each class (Devlin et al. 2019, section 4).

    The pooler is a linear layer and tanh between both.
    """

    part = trained_as = "output"

    def __init__(self, network: NetworkConfig, objective: Objective) -> None:
        assert isinstance(objective, Classify)
        super().__init__(network.width, objective.classes)
        self.network, self.first = network, objective.pool == "first"
        self.pooler = nn.Linear(network.width, network.width) if objective.pooler else None

    def initialize(self) -> None:
        """Make every class equally likely."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        if self.pooler is not None:
            draw_linear(self.pooler, self.network)

    def work(self, positions: int, batch: int) -> Work:
        """Count the products of so many summaries."""
        pooler = 0 if self.pooler is None else self.pooler.weight.numel()
        return Work(linear=2 * positions * (self.weight.numel() + pooler))

    def forward(self, h: Tensor, real: Tensor | None = None) -> Tensor:
        """Map rows (B, N, C) to logits (B, 1, K). ``real``: (B, N) bool, False for padding; None: there is none."""
        if self.first:
            summary = h[:, :1]
        else:
            rows = h if real is None else h.where(real[..., None], 0.0)
            counts = h.shape[1] if real is None else real.sum(1).clamp_min(1)[:, None, None]
            total = rows.sum(1, keepdim=True, dtype=torch.promote_types(h.dtype, torch.float32))
            summary = (total / counts).to(h.dtype)
        if self.pooler is not None:
            summary = self.pooler(summary).tanh()
        return F.linear(summary, self.weight, self.bias)

    @staticmethod
    def nats(logits: Tensor, labels: Tensor | None) -> Tensor:
        """Return the cross-entropy (B, 1) of labels (B, 1) int64 in fp32 (fp64 for fp64), 0 for the label -1.

        Without labels it is the mean over all classes. So a check fails for any wrong logit, and the result is at least
        the logarithm of K: a confident model's loss would be of the size of rounding.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if labels is None:
            return -logits.log_softmax(-1).mean(-1)
        return F.cross_entropy(logits.mT, labels, reduction="none", ignore_index=-1)


class CrossEntropyInChunks(torch.autograd.Function):
    """The cross-entropy of each row with memory for only ``rows`` rows of logits, which are computed twice.

    Saves its inputs for the backward pass: h (R, C), the projection's weight (V, C) and bias (V,) or None, and targets
    (R,) int64. Returns nats (R,) in fp32 (fp64 for fp64), in which gradients of parameters are summed too.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(h, weight, bias, targets)
        ctx.rows = rows
        wide = torch.promote_types(h.dtype, torch.float32)
        pieces = zip(h.split(rows), targets.split(rows), strict=True)
        return torch.cat([F.cross_entropy(F.linear(x, weight, bias).to(wide), t, reduction="none") for x, t in pieces])

    @staticmethod
    def backward(ctx: Any, grad_nats: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, bias, targets = ctx.saved_tensors
        grad_h = torch.empty_like(h)
        grad_weight = torch.zeros_like(weight, dtype=grad_nats.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=grad_nats.dtype)
        pieces = zip(*(x.split(ctx.rows) for x in (h, targets, grad_nats, grad_h)), strict=True)
        for chunk, labels, grad, target in pieces:
            # d nats / d logits = softmax - one-hot
            slope = F.linear(chunk, weight, bias).to(grad.dtype).softmax(1)
            slope.scatter_add_(1, labels[:, None], torch.full_like(slope[:, :1], -1))
            slope.mul_(grad[:, None])
            if grad_bias is not None:
                grad_bias.add_(slope.sum(0))
            slope = slope.to(h.dtype)
            target.copy_(slope @ weight)
            grad_weight.add_(slope.t() @ chunk)
        gradients = (None if total is None else total.to(weight.dtype) for total in (grad_weight, grad_bias))
        return grad_h, *gradients, None, None
