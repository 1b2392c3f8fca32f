"""The Sparse Transformer from tokens to logits. Letters: B batch, N positions, C width, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from longstride.sparse_model.block import ResidualBlock
from longstride.sparse_model.cache import KeyValues
from longstride.sparse_model.config import ModelConfig
from longstride.sparse_model.embedding import Embedding
from longstride.sparse_model.initialization import initialize
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
        # Called as (block, h) around every residual block where set, to recompute activations in the backward pass.
        self.activation_checkpoint: Callable[..., Tensor] | None = None
        initialize(self, config)

    def forward(self, tokens: Tensor, return_nats: bool = False) -> Tensor:
        """Row i predicts tokens[:, i] from tokens[:, :i].

        Args:
            tokens: (B, N) integers of any type, N at most the configured context; the last one is a target only.
                Bytes take an eighth of the way that int64 takes to a device.
            return_nats: return each token's cross-entropy instead of the logits, which never stand in memory whole.

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
        """All residual blocks, for positions that come after known ones.

        Args:
            h: (B, n, C), embedded positions from ``first`` on: any one, or the first n.
            caches: of each block; its rows before ``first`` are read, those of ``h`` written.
            first: position of the first row of ``h``.

        Returns:
            (B, n, C), as ``forward`` has it before the last norm.

        Raises:
            ValueError: several rows that are no beginning.
        """
        for block, cache in zip(self.blocks, caches, strict=True):
            h = block(h, cache, first)
        return h
