"""One pre-activation residual block. Letters: B batch, N positions, C width."""

from __future__ import annotations

from torch import Tensor, nn

from longstride.kernels.patterns.base import Pattern
from longstride.sparse_model.attention import Attention
from longstride.sparse_model.cache import KeyValues
from longstride.sparse_model.config import ModelConfig
from longstride.sparse_model.feed_forward import FeedForward


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
        """(B, N, C) to (B, N, C); with a cache, one position that attends to the known ones too, or the first N."""
        h = h + self._dropped(self.attention(self.attention_norm(h), cache, first))
        return h + self._dropped(self.feed_forward(self.feed_forward_norm(h)))

    def _dropped(self, h: Tensor) -> Tensor:
        # Asked here and not in the module: where one row is computed at a time, its call takes longer than an addition.
        return self.dropout(h) if self.dropout.training else h
