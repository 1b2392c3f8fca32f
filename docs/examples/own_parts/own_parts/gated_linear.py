"""A feed-forward whose inner rows are gated (Shazeer 2020, "GLU Variants Improve Transformer": SwiGLU)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.sparse_model import BlockContext, MixerOutput, Work
from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.part import PLAIN, FeedForward, FeedForwardConfig, draw_linear


class GatedLinear(FeedForwardConfig):
    """The JSON object ``{"type": "gated_linear"}``."""

    supports: ClassVar = frozenset({"padding", "reversible", "sections"})
    type: str = Field(description="two projections up, one of which gates the other, and one down")

    def make(self, network: NetworkConfig) -> GatedLinearLayer:
        """Make the module."""
        return GatedLinearLayer(network)


class GatedLinearLayer(FeedForward):
    """Computes silu(gate x) · expand x, and projects it back."""

    part = "feed-forward"

    def __init__(self, network: NetworkConfig) -> None:
        """Make the three projections."""
        super().__init__()
        self.network = network
        self.gate = nn.Linear(network.width, network.feed_forward_width, bias=False)
        self.expand = nn.Linear(network.width, network.feed_forward_width, bias=False)
        self.contract = nn.Linear(network.feed_forward_width, network.width, bias=False)

    def initialize(self) -> None:
        """Set the first values of the projections."""
        draw_linear(self.gate, self.network)
        draw_linear(self.expand, self.network)
        draw_linear(self.contract, self.network, into_stream=True)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """(B, N, C) to (B, N, C)."""
        return MixerOutput(self.contract(F.silu(self.gate(h)) * self.expand(h)))

    def work(self, positions: int, batch: int) -> Work:
        """Count three products a position."""
        return Work(linear=3 * 2 * positions * self.expand.weight.numel())
