"""A feed-forward that counts the real rows it has seen in training, in a buffer: what buffers have to go through."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from longstride.sparse_model.feed_forwards import FEED_FORWARDS
from longstride.sparse_model.feed_forwards.dense import FeedForward
from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.part import FeedForwardConfig, Mixed

NAME = "counting"


class CountingConfig(FeedForwardConfig):
    """Dense, and counting."""

    type: Literal["counting"]

    def make(self, network: NetworkConfig) -> Counting:
        return Counting(network, "squared_relu")


class Counting(FeedForward):
    """The buffer holds the rows of all taken steps, and how often they were told."""

    seen: Tensor

    def __init__(self, network: NetworkConfig, kind: str) -> None:
        super().__init__(network, kind)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, h: Tensor, real: Tensor | None = None) -> Any:
        rows = super().forward(h)
        count = h.shape[:-1].numel() if real is None else int(real.sum())
        return Mixed(rows, None, (h.new_full((1,), count, dtype=torch.float32),)) if self.training else rows

    def observe(self, total: Tensor) -> None:
        self.seen += torch.cat([total, total.new_ones(1)]).to(self.seen)


def register() -> None:
    """As a line in the registry does."""
    FEED_FORWARDS[NAME] = CountingConfig
