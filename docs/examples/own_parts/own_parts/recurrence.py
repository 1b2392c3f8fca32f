"""A gated linear recurrence as a mixer (Feng et al. 2024, "Were RNNs All We Needed?", section 3: minGRU).

Letters: B batch, N positions, C width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.kernels.patterns import Dense, Pattern
from longstride.sparse_model import BlockContext, MixerOutput, StrictModel, Work
from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.part import PLAIN, HeadWidths, Mixer, MixerConfig, draw_linear
from longstride.sparse_model.rotary import Rotary


class GatedRecurrence(MixerConfig, StrictModel):
    """The JSON object ``{"type": "gated_recurrence", "remember": 2.0}``."""

    supports: ClassVar = frozenset({"padding", "reversible"})  # everything else is refused for this mixer
    type: str = Field(description="a running mean of each channel, with gates")
    remember: float = Field(default=1.0, ge=0, description="initial bias of the gates: above 0 they keep more")

    @property
    def has_queries(self) -> bool:
        """It projects to gates and values alone, so rotary positions do not apply."""
        return False

    def check(self, network: NetworkConfig, context: int) -> None:
        """Any context will do."""

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        """Every position depends on all before it."""
        return (Dense(),) * network.heads

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        """It asks no attention kernel for anything."""
        return HeadWidths(0, network.width // network.heads, in_kernels=False)

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> RecurrenceMixer:
        """Make the module."""
        return RecurrenceMixer(network, self.remember)


class RecurrenceMixer(Mixer):
    """Computes h_t = k_t · h_(t-1) + (1 - k_t) · v_t, with k = sigmoid of a projection, and projects h back."""

    part = "recurrence"

    def __init__(self, network: NetworkConfig, remember: float) -> None:
        """Make the projections; ``remember`` is the initial bias of the gates."""
        super().__init__()
        self.network, self.remember = network, remember
        self.gate = nn.Linear(network.width, network.width)
        self.value = nn.Linear(network.width, network.width, bias=False)
        self.project = nn.Linear(network.width, network.width, bias=False)

    def initialize(self) -> None:
        """Set the first values of the projections."""
        draw_linear(self.gate, self.network)
        nn.init.constant_(self.gate.bias, self.remember)
        draw_linear(self.value, self.network)
        draw_linear(self.project, self.network, into_stream=True)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """(B, N, C) to (B, N, C). With a state, goes on from the hidden row before ``context.first``."""
        keep = self.gate(h).sigmoid()
        added = (1 - keep) * self.value(h)
        state: Any = context.state
        if state is not None and context.first:
            before = state.rows[:, context.first - 1].to(added.dtype)
            added = torch.cat([added[:, :1] + keep[:, :1] * before[:, None], added[:, 1:]], 1)
        rows = running_sum(keep, added)
        if state is not None:
            state.rows[:, context.first : context.first + h.shape[1]] = rows
        return MixerOutput(self.project(rows))

    def work(self, positions: int, batch: int) -> Work:
        """Count three products a position."""
        return Work(linear=3 * 2 * positions * self.network.width**2)

    def new_state(self, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int) -> HiddenRows:
        """Make room for the hidden rows of ``length`` positions."""
        return HiddenRows(torch.zeros(batch, length, self.network.width, device=device, dtype=dtype))


def running_sum(keep: Tensor, added: Tensor) -> Tensor:
    """Compute h_t = keep_t · h_(t-1) + added_t of (B, N, C) in log2(N) passes (Hillis & Steele 1986)."""
    distance, length = 1, keep.shape[1]
    while distance < length:
        shift = (0, 0, distance, 0)
        added = added + keep * F.pad(added, shift)[:, :length]
        keep = keep * F.pad(keep, shift, value=1.0)[:, :length]
        distance *= 2
    return added


@dataclass
class HiddenRows:
    """What generation keeps: the hidden row of every position, so that any of them can be gone back to."""

    rows: Tensor  # (B, N, C)

    def take(self, source: HiddenRows, order: Tensor, known: int, into: slice) -> None:
        """Copy the first ``known`` rows of contexts ``order`` of another state to the contexts ``into``."""
        self.rows[into, :known] = source.rows[order, :known]

    def truncate(self, length: int) -> None:
        """Nothing is left to do: rows from ``length`` on are written before they are read."""
