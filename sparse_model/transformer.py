"""The Sparse Transformer from tokens to logits (Child et al. 2019, section 5), and its initial values.

Letters: B batch, N positions, C width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from longstride.kernels.patterns import Pattern
from longstride.sparse_model.attention import Attention
from longstride.sparse_model.cache import KeyValues
from longstride.sparse_model.config import ModelConfig
from longstride.sparse_model.embedding import Embedding
from longstride.sparse_model.feed_forward import FeedForward
from longstride.sparse_model.output import Logits


class SparseTransformer(nn.Module):
    """A deep pre-activation residual network whose blocks attend over patterns (Child et al. 2019, section 5)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(ResidualBlock(config, patterns) for patterns in config.layer_patterns())
        self.norm = nn.LayerNorm(config.width)
        self.logits = Logits(config.width, config.vocabulary, bias=False)
        # Where set, called as (block, h) in place of each block, to recompute activations in the backward pass.
        self.activation_checkpoint: Callable[..., Tensor] | None = None
        initialize(self, config)

    @staticmethod
    def num_parameters(config: ModelConfig) -> int:
        """Parameters of the model of a configuration, without allocating it."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in SparseTransformer(config).parameters())

    def forward(self, tokens: Tensor, return_nats: bool = False) -> Tensor:
        """Row i predicts tokens[:, i] from tokens[:, :i].

        Args:
            tokens: (B, N) integers of any type, N at most the configured context; the last one is a target only.
                As bytes, they reach a device with an eighth of the traffic of int64.
            return_nats: return each token's cross-entropy instead of the logits, which are then never in memory whole.

        Returns:
            Logits (B, N, V), or nats (B, N) in fp32.

        Raises:
            ValueError: tokens are not (B, N) with 1 to ``context`` positions.
        """
        if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= self.config.context:
            raise ValueError(f"tokens {tuple(tokens.shape)} must be (B, N) with N from 1 to {self.config.context}")
        tokens = tokens.long()
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h) if self.activation_checkpoint is None else self.activation_checkpoint(block, h)
        return self.logits(self.norm(h), tokens if return_nats else None)

    def through(self, h: Tensor, caches: Sequence[KeyValues], first: int) -> Tensor:
        """All residual blocks, for positions after those in the caches.

        Args:
            h: (B, n, C), embedded positions from ``first`` on: any one, or the first n.
            caches: one a block; rows before ``first`` are read, those of ``h`` are written.
            first: position of the first row of ``h``.

        Returns:
            (B, n, C), as in ``forward`` before the last norm.

        Raises:
            ValueError: several rows that do not begin at 0.
        """
        for block, cache in zip(self.blocks, caches, strict=True):
            h = block(h, cache, first)
        return h


class ResidualBlock(nn.Module):
    """H + a + b with a = dropout(attention(LN(H))) and b = dropout(ff(LN(H + a))) (section 5.2)."""

    def __init__(self, config: ModelConfig, patterns: tuple[Pattern, ...]) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, patterns)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, cache: KeyValues | None = None, first: int = 0) -> Tensor:
        """(B, N, C) to (B, N, C). With a cache: one position, which attends to the cached ones too, or the first N."""
        h = h + self._dropped(self.attention(self.attention_norm(h), cache, first))
        return h + self._dropped(self.feed_forward(self.feed_forward_norm(h)))

    def _dropped(self, h: Tensor) -> Tensor:
        # Tested here and not in the module: for a single row, calling it takes longer than an addition.
        return self.dropout(h) if self.dropout.training else h


def initialize(model: nn.Module, config: ModelConfig) -> None:
    """Set every parameter of a SparseTransformer from torch's global generator (section 5.2; the released code).

    Linear weights and embeddings are normal, biases, output logits and n-gram tables 0, norms 1 and 0. The two
    projections that write into the residual stream are scaled by 1/√(2·layers), so that the stream keeps its size with
    depth.
    """
    residual = 1 / math.sqrt(2 * config.layers)
    tables = len(config.embedding.table_sizes(config.context))
    for name, parameter in model.named_parameters():
        owner = name.rsplit(".", 2)[-2]
        if owner == "ngrams":
            continue  # zeros already, which take no memory as long as nothing writes them
        if name == "logits.weight" or name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif owner.endswith("norm"):
            nn.init.ones_(parameter)
        elif name.startswith("embedding.positions."):
            nn.init.normal_(parameter, std=standard_deviation(config, config.width * tables))
        elif name.startswith("embedding."):
            nn.init.normal_(parameter, std=standard_deviation(config, config.width))
        else:
            scale = residual if owner in ("projection", "contract") else 1.0
            nn.init.normal_(parameter, std=scale * standard_deviation(config, parameter.shape[1]))


def standard_deviation(config: ModelConfig, fan_in: int) -> float:
    """The standard deviation of a tensor with this many inputs.

    The paper writes N(0, 0.125/√d). Read as a standard deviation ("paper") that is 0.125/√d; the authors' later code
    takes it for a variance ("released"), std = √(0.125/d).
    """
    if config.initialization == "paper":
        return 0.125 / math.sqrt(fan_in)
    return math.sqrt(0.125 / fan_in)
