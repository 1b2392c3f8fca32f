"""Attention to a few learned mixtures of all keys (Wang et al. 2020, Linformer).

Letters: B batch, H heads of queries, K heads of keys and values, N positions, R mixtures, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.kernels import ConfigError, Problem
from longstride.kernels.patterns import Dense, Pattern
from longstride.sparse_model.mixers.attention import Attention, AttentionConfig, KeyValueHeads
from longstride.sparse_model.network import POSITIVE, NetworkConfig
from longstride.sparse_model.part import PLAIN, BlockContext, MixerOutput, Part, Work
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel


class LinformerConfig(AttentionConfig, StrictModel):
    """Attention to learned mixtures of the keys of all positions: two-sided, and linear in the context."""

    type: Literal["linformer"] = Field(description="attention to learned mixtures of all keys, to both sides")
    rows: Annotated[int, POSITIVE] = Field(description="mixtures; the paper's k")
    share: Literal["nothing", "heads", "keys_and_values", "layers"] = Field(
        default="keys_and_values",
        description="what has the same mixtures: nothing, a layer's heads, its keys and values too, or all layers too",
    )
    key_value_heads: KeyValueHeads = None

    supports: ClassVar = frozenset({"output_gate", "padding", "reversible", "sections"})

    def causality(self, network: NetworkConfig) -> dict[str, bool]:
        return {self.type: False}

    def check(self, network: NetworkConfig, context: int) -> None:
        super().check(network, context)
        if self.rows > context:
            raise ConfigError.at("rows", self.rows, f"must be at most context {context}")
        if network.rotary is not None:
            rule = "adds up keys of all positions, which rotary turns apart; set model.rotary to null"
            raise ConfigError.at("type", self.type, rule)

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return (Dense(causal=False),) * network.heads

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> MixtureAttention:
        return MixtureAttention(network, self)

    def make_shared(self, network: NetworkConfig) -> SharedMixtures | None:
        return SharedMixtures(network, self.rows) if self.share == "layers" else None


class SharedMixtures(Part):
    """The mixtures E = P (1, R, N) of all layers (section 4, layerwise sharing)."""

    part = "attention"

    def __init__(self, network: NetworkConfig, rows: int) -> None:
        super().__init__()
        self.mixtures = nn.Parameter(torch.empty(1, rows, network.context))

    def initialize(self) -> None:
        draw_mixtures(self.mixtures)

    def forward(self) -> Tensor:
        """Return a copy, as ZeRO 3 releases the parameter itself."""
        return self.mixtures.clone()


class MixtureAttention(Attention):
    """softmax(Q (E K)ᵀ / √D) (P V), with learned E and P (R, N) (equation 7).

    A context shorter than the model's reads the first columns of E and P. Each row depends on all positions.
    """

    def __init__(self, network: NetworkConfig, config: LinformerConfig) -> None:
        super().__init__(network, (), None, key_value_heads=config.key_value_heads)
        self.config, self.reads_shared = config, config.share == "layers"
        copies = self.key_value_heads if config.share == "nothing" else 1
        shape = copies, config.rows, network.context
        # E; of keys, and where they share it of values
        self.mixtures = None if self.reads_shared else nn.Parameter(torch.empty(shape))
        has_values = config.share in ("nothing", "heads")
        self.of_values = nn.Parameter(torch.empty(shape)) if has_values else None  # P

    def initialize(self) -> None:
        super().initialize()
        for mixtures in self.parameters(recurse=False):
            draw_mixtures(mixtures)

    def attend_in(self, context: BlockContext, q: Tensor, k: Tensor, v: Tensor, heads: slice) -> MixerOutput:
        if context.real is not None:
            k, v = (x * context.real[:, None, :, None] for x in (k, v))
        of_keys: Tensor | None = self.mixtures
        if of_keys is None and context.shared is not None:
            of_keys = context.shared[:]  # used once, so that recomputed gradients are summed in the same order
        assert of_keys is not None
        of_values = of_keys if self.of_values is None else self.of_values
        keys, values = (self._mixed(mixtures, x) for mixtures, x in ((of_keys, k), (of_values, v)))
        return MixerOutput(F.scaled_dot_product_attention(q, keys, values, enable_gqa=q.shape[1] != k.shape[1]))

    def _mixed(self, mixtures: Tensor, x: Tensor) -> Tensor:
        """Return the mixtures (B, K, R, ·) of rows x (B, K, N, ·); with sequence parallelism some of the heads'."""
        if len(mixtures) > 1:
            heads = len(mixtures) * self.copies
            mixtures = mixtures.repeat_interleave(self.copies, 0)[self.division.heads(heads)]
        return mixtures[..., : x.shape[2]].to(x.dtype) @ x

    def weights(self, h: Tensor, context: BlockContext = PLAIN) -> Callable[[Tensor, int], Tensor]:
        raise ConfigError(Problem("model.attention", "linformer weighs mixtures of keys, so there is no picture of it"))

    def num_pairs(self, positions: int) -> int:
        return self.heads * positions * self.config.rows

    def work(self, positions: int, batch: int) -> Work:
        channels = sum(self.widths[1:])
        return super().work(positions, batch) + Work(linear=2 * positions * self.config.rows * channels)


def draw_mixtures(parameter: nn.Parameter) -> None:
    """Draw matrices (·, R, N) as the authors' code does."""
    for matrix in parameter.detach():
        nn.init.xavier_uniform_(matrix, gain=1 / math.sqrt(2))
