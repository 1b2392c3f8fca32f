"""A feed-forward that counts the real rows of training in a buffer, for tests of buffers."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from longstride.sparse_model.feed_forwards import FEED_FORWARDS
from longstride.sparse_model.feed_forwards.dense import DenseFeedForward
from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.part import PLAIN, BlockContext, FeedForwardConfig, MixerOutput

NAME = "counting"


class CountingConfig(FeedForwardConfig):
    """A dense feed-forward that counts."""

    supports: ClassVar = frozenset({"padding", "reversible", "sections"})
    type: Literal["counting"]

    def make(self, network: NetworkConfig) -> Counting:
        return Counting(network, "squared_relu")


class Counting(DenseFeedForward):
    """The buffer holds the number of rows of all steps, and the number of calls of ``observe``."""

    seen: Tensor

    def __init__(self, network: NetworkConfig, kind: str) -> None:
        super().__init__(network, kind)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        rows = super().forward(h).rows
        count = h.shape[:-1].numel() if context.real is None else int(context.real.sum())
        return MixerOutput(rows, None, (h.new_full((1,), count, dtype=torch.float32),) if self.training else ())

    def observe(self, total: Tensor) -> None:
        self.seen += torch.cat([total, total.new_ones(1)]).to(self.seen)


def register() -> None:
    """Add the feed-forward to the registry."""
    FEED_FORWARDS[NAME] = CountingConfig
