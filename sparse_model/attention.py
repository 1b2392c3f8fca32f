"""Attention of one residual block. Letters: B batch, H heads, N positions, C width, D head width."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from longstride.kernels import sparse_attention
from longstride.kernels.patterns import Pattern
from longstride.sparse_model.cache import KeyValues
from longstride.sparse_model.config import ModelConfig


class Attention(nn.Module):
    """Projects to heads, attends over each head's pattern, and projects back (section 5.2)."""

    def __init__(self, config: ModelConfig, patterns: tuple[Pattern, ...]) -> None:
        super().__init__()
        self.heads, self.backend, self.patterns = config.heads, config.backend, patterns
        self.widths = (config.query_key_width, config.query_key_width, config.width)
        self.equal_widths = len(set(self.widths)) == 1
        self.stacked_rows = {"query_key_value": self.widths}  # three matrices in one, see ``parameter_roles``
        self.query_key_value = nn.Linear(config.width, sum(self.widths))
        self.projection = nn.Linear(config.width, config.width)

    def forward(self, h: Tensor, cache: KeyValues | None = None, first: int = 0) -> Tensor:
        """(B, N, C) to (B, N, C). With a cache: one position, which attends to the cached ones too, or the first N.

        Raises:
            ValueError: several positions that do not begin at 0.
        """
        rows = self.query_key_value(h)
        if cache is not None and h.shape[1] == 1:
            q, k, v = self._heads_of_one(rows)
            return self.projection(cache.step(q, k, v, first).view(h.shape))
        if first:
            raise ValueError(f"first={first}: {h.shape[1]} rows at once must begin at position 0")
        parts = rows.split(self.widths, dim=-1)
        q, k, v = (part.view(*h.shape[:2], self.heads, -1).transpose(1, 2) for part in parts)  # (B, H, N, D)
        if cache is None:
            out = sparse_attention(q, k, v, self.patterns, backend=self.backend)
        else:
            out = cache.begin(q, k, v)
        return self.projection(out.transpose(1, 2).flatten(2))

    def _heads_of_one(self, row: Tensor) -> Iterable[Tensor]:
        """q, k and v (B, H, D) of one position, (B, 1, ·), with few views: each takes as long as a row's arithmetic."""
        if self.equal_widths:
            return row.view(len(row), 3, self.heads, -1).unbind(1)
        return [part.view(len(row), self.heads, -1) for part in row.split(self.widths, dim=-1)]
