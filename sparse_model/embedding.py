"""Tokens and positions to vectors, shifted right behind a learned start vector.

Letters: B batch, N positions, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparse_model.config import ModelConfig


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
        index = torch.arange(length, device=tokens.device)
        # Mixed radix, last table fastest: row-major (row, column[, channel]).
        for size, table in reversed(list(zip(self.sizes, self.positions, strict=True))):
            h = h + table(index % size)
            index = index // size
        return h
