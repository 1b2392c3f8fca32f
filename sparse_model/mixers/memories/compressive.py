"""Attention to a context, the rows before it, and summaries of rows before these (Rae et al. 2020, Compressive).

The memory is that of Transformer-XL. Rows that leave it go, r at a time, through a function f to one row of a second
memory, whose oldest rows are forgotten. Attention reads both memories and the context, with relative positions over all
of their rows.

A learned f has no gradient from the model's loss. It learns to preserve what attention reads (section 3.2): the
auxiliary loss is the mean square of the difference between attention of the context to the rows that leave, and to
their summaries. That attention has no positions and no biases, and constant weights. The losses of layers add up.

Letters: B batch, H heads, N positions, M rows of memory, K rows of compressed memory, C channels, D head width, r rate,
G groups of r rows.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.kernels import ConfigError
from longstride.sparse_model.mixers.memories.transformer_xl import (
    Ending,
    MemoryAttention,
    MemoryCache,
    Past,
    TransformerXLConfig,
    rows_before,
)
from longstride.sparse_model.network import POSITIVE, NetworkConfig
from longstride.sparse_model.part import PLAIN, BlockContext, Carried, MixerOutput, Part, Work, draw
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.tiles import wide_of


class CompressiveConfig(TransformerXLConfig):
    """Attention with relative positions, to a memory and to summaries of what leaves it."""

    supports: ClassVar = TransformerXLConfig.supports

    type: Literal["compressive"] = Field(description="as transformer_xl, to summaries of older rows too")  # type: ignore[assignment]
    memory: Annotated[int, POSITIVE] = Field(description="rows before a context that it reads")
    compressed: Annotated[int, POSITIVE] = Field(description="summaries of rows before the memory")
    rate: Annotated[int, Field(ge=2, le=1 << 10)] = Field(description="rows of a summary")
    compression: Literal["mean", "max", "convolution"] = Field(
        default="convolution", description="makes a summary; the convolution learns from an auxiliary loss"
    )

    def check(self, network: NetworkConfig, context: int) -> None:
        super().check(network, context)
        if self.memory < self.rate:
            raise ConfigError.at("rate", self.rate, f"must be at most memory {self.memory}, whose rows it takes")

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> CompressiveAttention:
        return CompressiveAttention(network, self)


class Convolution(Part):
    """A convolution whose kernel has as many rows as its stride, r matrices (C, C) and a bias."""

    def __init__(self, network: NetworkConfig, rate: int) -> None:
        super().__init__()
        self.network, self.rate = network, rate
        self.weight = nn.Parameter(torch.empty(rate * network.width, network.width))
        self.bias = nn.Parameter(torch.empty(network.width))

    def initialize(self) -> None:
        draw(self.weight, self.network, self.weight.shape[0])
        nn.init.zeros_(self.bias)

    def forward(self, groups: Tensor) -> Tensor:
        """Map groups of rows (B, G, r, C) to rows (B, G, C), in their precision."""
        matrices = self.weight.to(groups.dtype).unflatten(0, (self.rate, -1))
        return torch.einsum("bgsc,sdc->bgd", groups, matrices) + self.bias.to(groups.dtype)


class CompressiveAttention(MemoryAttention):
    """Attention with relative positions to a context, a memory, and a compressed memory (section 3)."""

    config: CompressiveConfig

    def __init__(self, network: NetworkConfig, config: CompressiveConfig) -> None:
        super().__init__(network, config)
        self.length = config.compressed + config.memory
        self.carried += Carried((config.compressed, network.width)), Carried((), torch.int32)
        learns = config.compression == "convolution"
        self.convolve = Convolution(network, config.rate) if learns else None
        if learns:
            self.stacked_rows = {**self.stacked_rows, "convolve": (network.width,) * config.rate}

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        if context.state is not None:
            state: Any = context.state
            state.rows[:, context.first : context.first + h.shape[1]] = h
        return super().forward(h, context)

    def past(self, context: BlockContext) -> Past | None:
        """Return the rows of both memories, one behind the other."""
        if not context.carried:
            return None
        memory, count, compressed, summaries = context.carried
        both, first = torch.cat([compressed, memory], 1), self.config.memory - count.long()[:, None]
        # A memory that is not full begins later, and the summaries end there.
        place = torch.arange(self.length, device=both.device)
        index = torch.where(place < self.config.compressed + first, (place - first).clamp_min(0), place)
        rows = both.take_along_dim(index[..., None], 1)
        return Past(rows, first[:, 0] + self.config.compressed - summaries.long())

    def hand_over(self, h: Tensor, context: BlockContext) -> MixerOutput:
        config, ending = self.config, self.ending(h, context)
        groups = (ending.length - config.memory).clamp_min(0).add(config.rate - 1) // config.rate
        count = ending.length - groups * config.rate
        leaving = -(-h.shape[1] // config.rate)  # G, at most
        first = (ending.end - ending.length)[:, None]
        index = first + torch.arange(leaving * config.rate, device=h.device)
        old = ending.rows.take_along_dim(index.clamp_max(ending.rows.shape[1] - 1)[..., None], 1)
        with torch.autocast(h.device.type, enabled=False):
            old = old.to(wide_of(h))
            new = self.summaries(old)
            loss = self.reconstruction(h, context, ending, old, new, groups) if self.learns else None
        _, _, compressed, before = context.carried
        compressed = torch.cat([compressed, new.detach().to(compressed.dtype)], 1)
        compressed = rows_before(compressed, config.compressed + groups, config.compressed)
        total = (before * ending.goes_on + groups).clamp_max(config.compressed)
        memory = rows_before(ending.rows, ending.end, config.memory)
        carried = memory, count.to(torch.int32), compressed, total.to(torch.int32)
        return MixerOutput(h, loss, carried=carried)

    @property
    def learns(self) -> bool:
        """Whether it is training its compression."""
        return self.training and self.convolve is not None

    def summaries(self, old: Tensor) -> Tensor:
        """Compress rows (B, G·r, C) to (B, G, C)."""
        groups = old.unflatten(1, (-1, self.config.rate))
        if self.convolve is not None:
            rows: Tensor = self.convolve(groups)
            return rows
        return groups.mean(2) if self.config.compression == "mean" else groups.amax(2)

    def reconstruction(
        self, h: Tensor, context: BlockContext, ending: Ending, old: Tensor, new: Tensor, groups: Tensor
    ) -> Tensor:
        """Return the attention reconstruction loss (algorithm 2), a mean over rows of contexts from which rows leave.

        Args:
            h: (B, N, C).
            context: of the rows.
            ending: of the memory and h.
            old: (B, G·r, C), rows that leave.
            new: (B, G, C), their summaries.
            groups: (B,) int64, how many of the groups exist.
        """
        q = self.query_key_value(h.detach().to(old.dtype), slice(self.widths[0]), is_frozen=True)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        def read(rows: Tensor, count: Tensor) -> Tensor:
            k, v = self.keys_of(rows, is_frozen=True)
            exists = torch.arange(rows.shape[1], device=rows.device) < count.clamp_min(1)[:, None]
            return F.scaled_dot_product_attention(q, k, v, exists[:, None, None])

        difference = read(new, groups) - read(old, groups * self.config.rate)
        begin = ending.end - self.config.memory - ending.length  # of the document whose rows leave
        counts = (groups > 0)[:, None] & (torch.arange(h.shape[1], device=h.device) >= begin[:, None])
        if context.real is not None:
            counts = counts & context.real
        squares = difference.square().mean((1, 3)) * counts
        return squares.sum() / counts.sum().clamp_min(1)

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> CompressiveCache:
        cache = super().new_cache(batch, length, device, dtype)
        return CompressiveCache(self, cache.keys, cache.values)

    def work(self, positions: int, batch: int) -> Work:
        """Count a convolution and its auxiliary loss too."""
        work = super().work(positions, batch)
        if self.convolve is None:
            return work
        pairs = self.heads * positions * (positions + -(-positions // self.config.rate))
        of_loss = Work(
            scores=2 * pairs * self.widths[0] // self.heads,
            values=2 * pairs * self.widths[2] // self.heads,
            linear=2 * positions * self.network.width * (self.network.width + sum(self.widths)),
        )
        return work + of_loss


class CompressiveCache(MemoryCache):
    """Keys and values of both memories and the context, and the rows that they are made of."""

    owner: CompressiveAttention

    def __init__(self, owner: CompressiveAttention, keys: Tensor, values: Tensor) -> None:
        super().__init__(owner, keys, values)
        self.rows = keys.new_empty(len(keys), self.context, owner.network.width)
        self.carried = tuple(
            keys.new_zeros((len(keys), *carried.shape), dtype=carried.dtype or keys.dtype) for carried in owner.carried
        )

    def __reduce__(self) -> tuple[Any, ...]:
        kind, arguments, attributes = super().__reduce__()
        return kind, arguments, attributes | {"rows": self.rows, "carried": self.carried}

    def carry(self) -> None:
        """Begin the next context, after one that fills the cache, with the memories that training hands to it."""
        self.carried = self.owner.hand_over(self.rows, BlockContext(carried=self.carried)).carried
        past = self.owner.past(BlockContext(carried=self.carried))
        assert past is not None
        rows = past.rows[:, int(past.first[0]) :]
        keys, values = self.owner.keys_of(rows)
        self.offset = rows.shape[1]
        self.write(slice(self.offset), self.owner.placed(keys), values)
        self._attend_one.forget()

    def truncate(self, length: int) -> None:
        super().truncate(length)
        if not length:
            self.carried = tuple(torch.zeros_like(rows) for rows in self.carried)

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        super().take(source, order, length, into)
        pairs = ((self.rows, source.rows), *zip(self.carried, source.carried, strict=True))
        for rows, of_source in pairs:
            rows[into] = of_source[order]
