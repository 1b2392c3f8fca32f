"""Product-key memory: each row reads a few of many values, found by a search whose cost is the root of their number.

After Lample et al. 2019. A head has a slot for each pair of two sub-keys, and its score is the sum of theirs. The best
slots of a sum have good parts, so a search among n sub-keys for each half finds the best of all n² slots.

Letters: B batch, N positions, R rows, C width, H heads, n sub-keys of a half, D channels of a query, k slots of a head.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from longstride.kernels import ConfigError
from longstride.sparse_model.feed_forwards import dense
from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.ngrams import Table
from longstride.sparse_model.part import (
    PLAIN,
    BlockContext,
    FeedForward,
    FeedForwardConfig,
    MixerOutput,
    Part,
    Work,
    draw_linear,
)

MOST_KEYS = 46_340  # their square, the number of slots, fits in 31 bits


class ProductKeysConfig(FeedForwardConfig):
    """A memory of keys² values, of which each head reads some."""

    supports: ClassVar = frozenset({"padding", "reversible", "sections"})
    type: Literal["product_keys"] = Field(description="a memory of keys² values, of which each head of a row reads top")
    keys: int = Field(default=512, ge=1, le=MOST_KEYS, description="sub-keys of each half of a query")
    top: int = Field(default=32, ge=1, description="values that a head reads")
    heads: int = Field(default=4, ge=1, le=1 << 10, description="heads, which share the values")
    query_width: int = Field(default=256, ge=2, le=1 << 16, description="channels of a head's query, both halves")

    @field_validator("query_width")
    @classmethod
    def _halves(cls, value: int) -> int:
        if value % 2:
            raise ConfigError.at("", value, f"must be even, for two halves; nearest {value - 1}, {value + 1}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top > self.keys:
            raise ConfigError.at("top", self.top, f"must be at most keys {self.keys}; nearest {self.keys}")
        return self

    def make(self, network: NetworkConfig) -> ProductKeys:
        return ProductKeys(network, self)


class SubKeys(Part):
    """The sub-keys of both halves of each head.

    Muon must not train them, for the reason that ``Router`` gives: what is added to all of a half changes no softmax.
    """

    trained_as = "vectors"

    def __init__(self, config: ProductKeysConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.heads, 2, config.keys, config.query_width // 2))

    def initialize(self) -> None:
        """Draw uniform values of at most 1/√(channels), as the authors' code does."""
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, queries: Tensor) -> Tensor:
        """Map queries (R, H, D) to the scores of sub-keys, (H, 2, R, n)."""
        halves = queries.unflatten(-1, (2, -1)).permute(1, 2, 0, 3)
        return halves @ self.weight.to(queries.dtype).mT


class Values(Table):
    """The value of each slot: that of sub-keys i and j is row i·n + j."""

    part = "values of keys"

    def __init__(self, network: NetworkConfig, config: ProductKeysConfig) -> None:
        super().__init__(config.keys**2, network.width, config.heads * config.top, weighted=True)
        self.network = network

    def initialize(self) -> None:
        """Draw normal values of 1/√C, as the authors' code does; 0 if ``initialization`` is "zero_outputs"."""
        if self.network.initialization != "zero_outputs":
            nn.init.normal_(self.rows, std=self.network.width**-0.5)


class ProductKeys(FeedForward):
    """The sum of the best slots' values over all heads, weighted by a softmax for each head (section 3).

    Queries have a layer norm without parameters, which sub-keys can absorb. The paper's batch norm would let rows
    depend on later ones.
    """

    part = "product keys"

    def __init__(self, network: NetworkConfig, config: ProductKeysConfig) -> None:
        super().__init__()
        self.network, self.config = network, config
        self.query = nn.Linear(network.width, config.heads * config.query_width, bias=network.bias)
        self.keys = SubKeys(config)
        self.values = Values(network, config)
        # Counted from 1, only the a-th and b-th best of both halves with a·b <= k can have one of the k best sums.
        places = [(a, b) for a in range(config.top) for b in range(config.top // (a + 1))]
        self._places = list(zip(*places, strict=True))
        self._places_on: dict[torch.device, Tensor] = {}

    def initialize(self) -> None:
        draw_linear(self.query, self.network)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Map (B, N, C) to (B, N, C)."""
        rows = h.flatten(0, 1)
        if torch.compiler.is_exporting():  # for any number of rows
            ids, weights = self.choose(rows)
        else:  # memory for the scores of so many rows at once
            pieces = (self.choose(piece) for piece in rows.split(dense.CHUNK_ROWS))
            ids, weights = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        ids, weights = (tensor.unflatten(0, h.shape[:2]) for tensor in (ids, weights))
        return MixerOutput(self.values.read(ids, h.dtype, weights, context.real))

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots (R, H·k) int64 that rows (R, C) read, and their weights, in fp32 (fp64 for fp64)."""
        config, wide = self.config, torch.promote_types(rows.dtype, torch.float32)
        queries = self.query(rows).to(wide).unflatten(-1, (config.heads, config.query_width))
        scores = self.keys(F.layer_norm(queries, queries.shape[-1:]))  # (H, 2, R, n)
        with torch.no_grad():
            best, keys = scores.topk(config.top)  # descending
            if rows.device not in self._places_on:
                self._places_on[rows.device] = torch.tensor(self._places, device=rows.device)
            places = self._places_on[rows.device]
            sums = best[:, 0, :, places[0]] + best[:, 1, :, places[1]]
            chosen = places[:, sums.topk(config.top).indices].movedim(0, 1)  # (H, 2, R, k)
            keys = keys.gather(-1, chosen)
        if scores.device.type == "cpu":
            picked = scores.gather(-1, keys)
        else:  # the gradient of gather is not deterministic there, as keys repeat
            row = torch.arange(keys.shape[:3].numel(), device=keys.device)[:, None]
            picked = scores.flatten(0, 2)[row, keys.flatten(0, 2)].view(keys.shape)
        weights = picked.sum(1).softmax(-1)  # (H, R, k)
        ids = keys[:, 0] * config.keys + keys[:, 1]
        first, second = (tensor.transpose(0, 1).flatten(1) for tensor in (ids, weights))
        return first, second

    def work(self, positions: int, batch: int) -> Work:
        """Count queries, the scores of all sub-keys, and the sums of values."""
        config = self.config
        values = config.heads * config.top * self.network.width
        return Work(linear=2 * positions * (self.query.weight.numel() + self.keys.weight.numel() + values))
