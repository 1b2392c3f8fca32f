"""The feed-forward part of one residual block. Letters: B batch, N positions, C width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparse_model.config import ModelConfig


def sigmoid_gelu(x: Tensor) -> Tensor:
    """x·sigmoid(1.702 x), any shape: the approximation of GELU that the paper uses (section 5.2)."""
    return x * torch.sigmoid(1.702 * x)


class FeedForward(nn.Module):
    """Two projections around the activation (section 5.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, config.feed_forward_width)
        self.contract = nn.Linear(config.feed_forward_width, config.width)

    def forward(self, h: Tensor) -> Tensor:
        """(B, N, C) to (B, N, C)."""
        return self.contract(sigmoid_gelu(self.expand(h)))
