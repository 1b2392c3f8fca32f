"""Attention of one residual block. Letters: B batch, H heads, N positions, C width, D head width."""

from __future__ import annotations

from torch import Tensor, nn

from kernels import sparse_attention
from kernels.patterns.base import Pattern
from sparse_model.cache import KeyValues
from sparse_model.config import ModelConfig


class Attention(nn.Module):
    """Projects to heads, attends over each head's pattern, and projects back (section 5.2)."""

    def __init__(self, config: ModelConfig, patterns: tuple[Pattern, ...]) -> None:
        super().__init__()
        self.heads, self.backend, self.patterns = config.heads, config.backend, patterns
        self.widths = (config.query_key_width, config.query_key_width, config.width)
        self.query_key_value = nn.Linear(config.width, sum(self.widths))
        self.projection = nn.Linear(config.width, config.width)

    def forward(self, h: Tensor, cache: KeyValues | None = None, first: int = 0) -> Tensor:
        """(B, N, C) to (B, N, C); with a cache, positions from ``first`` on that attend to the known ones too."""
        q, k, v = (self._split(part) for part in self.query_key_value(h).split(self.widths, dim=-1))  # (B, H, N, D)
        if cache is None:
            out = sparse_attention(q, k, v, self.patterns, backend=self.backend)
        else:
            out = cache.attend(q, k, v, self.patterns, first, self.backend)
        return self.projection(out.transpose(1, 2).flatten(2))

    def _split(self, h: Tensor) -> Tensor:
        """(B, N, H·D) to (B, H, N, D)."""
        return h.view(*h.shape[:2], self.heads, -1).transpose(1, 2)
