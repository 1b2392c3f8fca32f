"""The Sparse Transformer from tokens to logits (Child et al. 2019, section 5), and its initial values.

Letters: B batch, N positions, C width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from longstride.kernels.patterns import Pattern
from longstride.sparse_model.attention import Attention
from longstride.sparse_model.cache import KeyValues
from longstride.sparse_model.config import ModelConfig
from longstride.sparse_model.feed_forward import FeedForward
from longstride.sparse_model.output import Logits

Index = TypeVar("Index", int, Tensor)  # one position, or a vector of them


class Role(NamedTuple):
    """What an optimiser has to know of a parameter."""

    part: str  # of the network: matrices, embeddings, vectors or output
    rows: tuple[int, ...] = ()  # of the matrices that lie below each other in it; none: it is one


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

    def parameter_roles(self) -> dict[str, Role]:
        """The role of each parameter by name, in the order of ``named_parameters``.

        A module whose parameters are of another part than their kind says has an attribute ``part``; one with matrices
        stacked in a linear layer, their rows by the layer's name as ``stacked_rows``.
        """
        modules, roles = dict(self.named_modules()), {}
        for name, parameter in self.named_parameters():
            path, _, kind = name.rpartition(".")
            above, _, layer = path.rpartition(".")
            owner = modules[path]
            # Under ZeRO 3 a parameter at rest is empty; ds_shape is what it was.
            if len(getattr(parameter, "ds_shape", parameter.shape)) < 2:
                part = "vectors"
            else:
                part = getattr(owner, "part", "embeddings" if isinstance(owner, nn.Embedding) else "matrices")
            stacked = getattr(modules[above], "stacked_rows", {}) if kind == "weight" else {}
            roles[name] = Role(part, tuple(stacked.get(layer, ())))
        return roles

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


class Embedding(nn.Module):
    """Token embedding plus one position embedding a table, the input shifted right (section 5.1; released code)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.sizes = config.embedding.table_sizes(config.context)
        self.positions = nn.ModuleList(nn.Embedding(size, config.width) for size in self.sizes)
        self.start = nn.Parameter(torch.empty(config.width))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N) int64 to (B, N, C): row i holds token i - 1 and position i."""
        batch, length = tokens.shape
        start = self.start.expand(batch, 1, -1)
        h = torch.cat([start, self.tokens(tokens[:, :-1])], dim=1)
        for table, index in self._places(torch.arange(length, device=tokens.device)):
            h = h + table(index)
        return h

    def row(self, token: Tensor | None, position: int, batch: int) -> Tensor:
        """Row ``position`` of ``forward``, (B, 1, C), from the token before it (B,) int64; None before the first."""
        h = self.start.expand(batch, -1) if token is None else self.tokens(token)
        for table, index in self._places(position):
            h = h + table.weight[index]
        return h.unsqueeze(1)

    def _places(self, index: Index) -> Iterator[tuple[nn.Embedding, Index]]:
        """Each position table, with the index of the positions in it."""
        # Mixed radix, last table fastest: row-major (row, column[, channel]).
        for size, table in reversed(list(zip(self.sizes, self.positions, strict=True))):
            assert isinstance(table, nn.Embedding)
            yield table, index % size
            index = index // size


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

    Linear weights and embeddings are normal, biases and output logits 0, norms 1 and 0. The two projections that write
    into the residual stream are scaled by 1/√(2·layers), so that the stream keeps its size with depth.
    """
    residual = 1 / math.sqrt(2 * config.layers)
    tables = len(config.embedding.table_sizes(config.context))
    for name, parameter in model.named_parameters():
        owner = name.rsplit(".", 2)[-2]
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
