"""Attention to summaries of blocks of keys and values (Liu et al. 2018, section 4.2.4, memory-compressed attention).

A summary stands for the positions of its block, and a query reads it only if the block is over: its last position is at
most the query's. Blocks may overlap (Yuan et al. 2025, section 3.3.1).

Letters: B batch, H heads of queries, K heads of keys and values, N positions, C width, D head width, l positions of a
block, d positions from one block to the next, M whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.kernels import ConfigError, selected_attention, sparse_attention
from longstride.kernels.patterns import Dense, Pattern
from longstride.kernels.selections import Part as SelectionPart
from longstride.kernels.selections import Selection
from longstride.sparse_model.mixers.attention import NOT_FLEX, Attention, AttentionConfig, KeyValueHeads
from longstride.sparse_model.mixers.cache import KeyValues, RowCache
from longstride.sparse_model.network import NetworkConfig, nearest_divisor
from longstride.sparse_model.part import BlockContext, Mixer, MixerOutput, Part, Work
from longstride.sparse_model.rotary import PreparedHeads, Rotary
from longstride.sparse_model.strict import StrictModel

Kind = Literal["convolution", "mlp", "mean"]


class CompressedConfig(AttentionConfig, StrictModel):
    """Attention to summaries of the blocks that are over."""

    supports: ClassVar = frozenset({"convolution", "documents", "padding", "reversible"})

    type: Literal["compressed"] = Field(description="attention to summaries of blocks of keys and values")
    block: int = Field(default=3, ge=2, description="positions that a summary stands for")
    distance: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="positions from one block to the next; divides block; null: block"
    )
    summary: Kind = Field(
        default="convolution", description="of a block: a convolution over all channels, an MLP for each head, the mean"
    )
    key_value_heads: KeyValueHeads = None

    def check(self, network: NetworkConfig, context: int) -> None:
        super().check(network, context)
        check_blocks(self.type, self.block, self.distance or self.block, network)

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return ()

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> CompressedAttention:
        return CompressedAttention(network, self, rotary)


def check_blocks(kind: str, block: int, distance: int, network: NetworkConfig) -> None:
    """Raise ConfigError if blocks of these sizes do not fit the network."""
    if network.backend == "flex":
        raise ConfigError.at("type", kind, NOT_FLEX)
    if block > network.context:
        raise ConfigError.at("block", block, f"must be at most context {network.context}")
    if block % distance:
        rule = f"must divide block={block}; nearest {nearest_divisor(block, distance)}"
        raise ConfigError.at("distance", distance, rule)


class Grid(NamedTuple):
    """The blocks of contexts, and which of them each query reads."""

    ends: Tensor  # (1 or B, M) int64, the last position of each block
    low: Tensor  # (1 or B, N) int64: query i reads blocks low to high - 1
    high: Tensor
    places: Tensor | None  # (B, N) int64, each position's place in its document; None: blocks lie evenly

    @classmethod
    def of(cls, positions: int, block: int, distance: int, places: Tensor | None, device: torch.device) -> Grid:
        """Place blocks of l positions at distance d, from the start of each document on."""
        position = torch.arange(positions, device=device)[None]
        if places is None:
            ends = torch.arange(block - 1, max(positions, block - 1), distance, device=device)[None]
            high = (position + 1 - block).div(distance, rounding_mode="floor").add_(1).clamp_min_(0)
            return cls(ends, torch.zeros_like(high), high, None)
        is_end = (places >= block - 1) & ((places - block + 1) % distance == 0)
        high = is_end.cumsum(1)
        low = (high - is_end.long()).gather(1, position - places)
        count = positions // distance  # enough, as distance is at most block
        ends = torch.zeros(len(places), count + 1, dtype=torch.int64, device=device)
        ends.scatter_(1, (high - 1).where(is_end, count), position.expand(places.shape))
        return cls(ends[:, :count], low, high, places)

    def of_queries(self, some: slice) -> Grid:
        """Return what some of the queries read."""
        places = None if self.places is None else self.places[:, some]
        return Grid(self.ends, self.low[:, some], self.high[:, some], places)

    def blocks(self, rows: Tensor, block: int, distance: int) -> Tensor:
        """Return the rows of each block, (B, M, l, K, D), of rows (B, N, K, D)."""
        if self.places is not None:
            offsets = torch.arange(1 - block, 1, device=rows.device)
            index = (self.ends[..., None] + offsets).clamp_min(0).flatten(1)  # unused blocks may begin before row 0
            return rows.gather(1, index[..., None, None].expand(-1, -1, *rows.shape[2:])).unflatten(1, (-1, block))
        count, run = self.ends.shape[1], block // distance  # units of d positions, which blocks share
        units = count + run - 1 if count else 0
        by_unit = rows[:, : units * distance].unflatten(1, (units, distance))
        return torch.cat([by_unit[:, first : first + count] for first in range(run)], 2)

    def selection(self, batch: int, heads: int, *, null: bool) -> Selection:
        """Return what each query reads among the blocks; with ``null``, behind a row that all queries read."""
        low, high = (x.int()[:, None].expand(batch, heads, -1) for x in (self.low, self.high))
        span = max(1, self.ends.shape[1] + null)
        if not null or self.places is None:
            return Selection((SelectionPart(None, None, low, high + null),), span)
        zeros = torch.zeros_like(low)
        bounds = (zeros, zeros + 1), (low + 1, high + 1)
        return Selection(tuple(SelectionPart(None, None, *both) for both in bounds), span)


class Summary(Part):
    """Summarises blocks of the keys, or of the values, of all heads.

    - "convolution": a linear map from all channels of a block to all channels of a row, which is a convolution over
      positions with kernel l and stride d.
    - "mlp": learned vectors for the places in the block are added to its rows; two layers with a ReLU between them
      follow, the same for all heads.
    - "mean": no parameters.
    """

    part = "attention"

    def __init__(self, network: NetworkConfig, kind: Kind, block: int, heads: int, width: int) -> None:
        """Make a summary of blocks of ``block`` rows, with ``heads`` heads of ``width`` channels."""
        super().__init__()
        self.kind, self.heads = kind, heads
        layers: list[nn.Linear] = []
        if kind == "convolution":
            layers = [nn.Linear(block * heads * width, heads * width, bias=network.bias)]
        elif kind == "mlp":
            layers = [
                nn.Linear(block * width, 2 * width, bias=network.bias),
                nn.Linear(2 * width, width, bias=network.bias),
            ]
        self.places = nn.Parameter(torch.empty(block, width)) if kind == "mlp" else None
        self.layers = nn.ModuleList(layers)

    def initialize(self) -> None:
        """Draw weights that keep the size of rows: as He et al. 2015 before the ReLU."""
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            before_relu = number + 1 < len(self.layers)
            nn.init.normal_(layer.weight, std=math.sqrt((1 + before_relu) / layer.in_features))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        if self.places is not None:
            nn.init.normal_(self.places, std=0.02)

    def forward(self, blocks: Tensor) -> Tensor:
        """Map blocks (B, M, l, K, D) to rows (B, M, K, D)."""
        if self.kind == "mean":
            return blocks.mean(2)
        if self.kind == "convolution":
            return self.layers[0](blocks.flatten(2)).unflatten(-1, (self.heads, -1))
        assert self.places is not None
        rows = (blocks + self.places[:, None].to(blocks.dtype)).transpose(2, 3).flatten(3)
        return self.layers[1](self.layers[0](rows).relu())

    def operations(self, blocks: int) -> int:
        """Count the operations for that many blocks."""
        weights = sum(layer.weight.numel() for layer in self.layers if isinstance(layer, nn.Linear))
        return 2 * blocks * weights * (self.heads if self.kind == "mlp" else 1)


class Null(Part):
    """A learned key and value of each head, which every query may read."""

    part, trained_as = "attention", "vectors"

    def __init__(self, heads: int, key_width: int, value_width: int) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.zeros(heads, key_width))
        self.value = nn.Parameter(torch.zeros(heads, value_width))

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put them before keys and values, (B, K, M, ·)."""
        pairs = (self.key, keys), (self.value, values)
        both = [torch.cat([x[:, None].to(y.dtype).expand(len(y), -1, -1, -1), y], 2) for x, y in pairs]
        return both[0], both[1]


class Compression(Part):
    """Turns keys and values that are neither normalised nor rotated into summaries that are.

    A summary of keys is normalised, and rotated as its block's last position, after it is made.
    """

    part = "attention"

    def __init__(
        self,
        network: NetworkConfig,
        rotary: Rotary | None,
        *,
        kind: Kind,
        block: int,
        distance: int,
        heads: int,
        widths: tuple[int, int],
    ) -> None:
        """Make the summaries of ``heads`` heads, with ``widths`` channels of a key and of a value."""
        super().__init__()
        self.block, self.distance, self.heads, self.widths = block, distance, heads, widths
        self.rotary, self.normed = rotary, network.query_key_norm
        self.keys, self.values = (Summary(network, kind, block, heads, width) for width in widths)

    def forward(self, k: Tensor, v: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Summarise k and v (B, K, N, ·): (B, K, M, ·)."""
        keys, values = (grid.blocks(x.transpose(1, 2), self.block, self.distance) for x in (k, v))
        ends = grid.ends if grid.places is None else grid.places.gather(1, grid.ends)
        return self.summaries(keys, values, ends)

    def summaries(self, keys: Tensor, values: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Summarise blocks (B, M, l, K, ·) that end at places (1 or B, M): (B, K, M, ·)."""
        rows = self.keys(keys)
        if self.rotary is not None or self.normed:
            table = None
            if self.rotary is not None:
                table = self.rotary.table(rows.device)[ends if len(ends) > 1 else ends[0]]
            channels = rows.shape[2] * rows.shape[3]
            prepared = PreparedHeads.apply(rows.flatten(2), channels, rows.shape[3], self.normed, table)
            rows = prepared.unflatten(2, rows.shape[2:])
        return rows.transpose(1, 2), self.values(values).transpose(1, 2)

    def grid(self, positions: int, places: Tensor | None, device: torch.device) -> Grid:
        """Return the blocks of contexts of this length."""
        return Grid.of(positions, self.block, self.distance, places, device)

    def count(self, positions: int) -> int:
        """Count the blocks that are over after some positions."""
        return max(0, (positions - self.block) // self.distance + 1)

    def num_pairs(self, positions: int) -> int:
        """Count the pairs of a query and a summary of one head."""
        return sum(positions - end for end in range(self.block - 1, positions, self.distance))

    def work(self, positions: int) -> Work:
        """Count the operations that make the summaries."""
        blocks = self.count(positions)
        return Work(linear=self.keys.operations(blocks) + self.values.operations(blocks))


class CompressedAttention(Attention):
    """Attention of each query to the summaries of the blocks that are over, and to a learned key and value.

    Before the first whole block a query reads the learned value alone.
    """

    def __init__(self, network: NetworkConfig, config: CompressedConfig, rotary: Rotary | None) -> None:
        super().__init__(network, (), rotary, key_value_heads=config.key_value_heads)
        heads = self.key_value_heads
        widths = self.widths[1] // heads, self.widths[2] // heads
        self.compression = Compression(
            network, rotary, kind=config.summary, block=config.block, distance=config.distance or config.block,
            heads=heads, widths=widths,
        )  # fmt: skip
        self.null = Null(heads, *widths)

    def heads_of(self, rows: Tensor, places: Tensor | slice | None = None) -> Sequence[Tensor]:
        """Split rows of ``query_key_value``: queries are normalised and rotated, keys and values are as projected."""
        return split_heads(self, rows, self.widths[0], places)

    def heads_of_row(self, row: Tensor, position: int) -> Sequence[Tensor]:
        return [x[:, :, 0] for x in self.heads_of(row, slice(position, position + 1))]

    def attend_in(self, context: BlockContext, q: Tensor, k: Tensor, v: Tensor, heads: slice) -> MixerOutput:
        grid = self.compression.grid(q.shape[2], context.places, q.device)
        summaries = self.null(*self.compression(k, v, grid))
        return MixerOutput(attend_blocks(q, summaries, grid, self.compression, self.backend, null=True))

    def new_state(self, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int) -> RowCache:
        cache = SummaryCache(self.compression, self.null, self.network, batch, length, device, dtype, back)
        if self.convolution is not None:
            cache.recent = self.convolution.new_state(batch, length, device, back)
        return cache

    def num_pairs(self, positions: int) -> int:
        return self.heads * (positions + self.compression.num_pairs(positions))

    def work(self, positions: int, batch: int) -> Work:
        return super().work(positions, batch) + self.compression.work(positions)

    def allowed(self, q: Tensor, k: Tensor, head: int) -> Callable[[Tensor], Tensor]:
        position, step = torch.arange(k.shape[2], device=k.device), self.compression
        return lambda queries: position < positions_covered(queries[:, None], step)

    weights = Mixer.weights  # of positions there are none: it weighs summaries


def positions_covered(queries: Tensor, compression: Compression) -> Tensor:
    """Return the position after the last one that is summarised for each query, an integer tensor of any shape."""
    block, distance = compression.block, compression.distance
    last = (queries + 1 - block).div(distance, rounding_mode="floor") * distance + block
    return last.where(queries + 1 >= block, 0)


def split_heads(attention: Attention, rows: Tensor, channels: int, places: Tensor | slice | None) -> Sequence[Tensor]:
    """Split projected rows by heads, with the first ``channels`` normalised and rotated as the network says."""
    if not attention.as_projected:
        table = None
        if attention.rotary is not None:
            table = attention.rotary.table(rows.device)[slice(rows.shape[1]) if places is None else places]
        width = attention.widths[0] // attention.heads
        rows = PreparedHeads.apply(rows, channels, width, attention.normed, table)
    parts = zip(rows.split(attention.widths, dim=-1), attention.part_heads, strict=True)
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part, heads in parts]


def attend_blocks(
    q: Tensor, summaries: tuple[Tensor, Tensor], grid: Grid, compression: Compression, backend: str, *, null: bool
) -> Tensor:
    """Attend from q (B, H, N, D) to keys and values of summaries (B, K, M, ·), behind a learned row with ``null``."""
    keys, values = (x.to(q.dtype) for x in summaries)
    count, block, distance = grid.ends.shape[1], compression.block, compression.distance
    if grid.places is not None or not count:
        # The kernels take as many keys as queries: rows of zeros follow, which no query reads.
        keys, values = (F.pad(x, (0, 0, 0, q.shape[2] - x.shape[2])) for x in (keys, values))
        return selected_attention(q, keys, values, grid.selection(len(q), q.shape[1], null=null), backend=backend)
    # The d queries from the end of a block to that of the next read the same rows: they are heads of one row.
    late = q[:, :, block - 1 :]
    rows = F.pad(late, (0, 0, 0, count * distance - late.shape[2])).unflatten(2, (count, distance))
    rows = F.pad(rows.transpose(2, 3).flatten(1, 2), (0, 0, int(null), 0))
    out = sparse_attention(rows, keys, values, Dense(), backend=backend)[:, :, int(null) :]
    out = out.unflatten(1, (-1, distance)).transpose(2, 3).flatten(2, 3)[:, :, : late.shape[2]]
    first = values[:, :, :1] if null else torch.zeros_like(values[:, :, :1])
    first = first.repeat_interleave(q.shape[1] // values.shape[1], 1)
    return torch.cat([first.expand(-1, -1, block - 1, -1), out], 2)


class OpenBlocks:
    """The last rows of keys and values as projected, of which a step makes the summary of a block that ends.

    Row p is stored at p modulo the number of rows. There are enough for a block and the positions that may be
    forgotten, so that cutting a context needs no work.
    """

    def __init__(
        self, compression: Compression, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int
    ) -> None:
        self.compression = compression
        self.size = max(1, min(length, compression.block + back))
        shape = self.size, batch, compression.heads
        self.keys, self.values = (
            torch.zeros(*shape, width, device=device, dtype=dtype) for width in compression.widths
        )

    def begin(self, k: Tensor, v: Tensor) -> None:
        """Store the last of the first n rows (B, K, n, ·)."""
        rows = torch.arange(max(0, k.shape[2] - self.size), k.shape[2], device=k.device)
        for stored, new in ((self.keys, k), (self.values, v)):
            stored[rows % self.size] = new[:, :, rows].permute(2, 0, 1, 3).to(stored.dtype)

    def step(self, k: Tensor, v: Tensor, position: int) -> tuple[Tensor, Tensor] | None:
        """Store a row (B, K, ·); return the summaries (B, K, ·) of the block that it ends, if it ends one."""
        self.keys[position % self.size] = k
        self.values[position % self.size] = v
        block, distance = self.compression.block, self.compression.distance
        if position + 1 < block or (position + 1 - block) % distance:
            return None
        rows = torch.arange(position + 1 - block, position + 1, device=k.device) % self.size
        keys, values = (stored[rows].transpose(0, 1)[:, None] for stored in (self.keys, self.values))
        key, value = self.compression.summaries(keys, values, torch.tensor([[position]], device=k.device))
        return key[:, :, 0], value[:, :, 0]

    def take(self, source: OpenBlocks, order: Tensor, into: slice) -> None:
        for stored, of_source in ((self.keys, source.keys), (self.values, source.values)):
            stored[:, into] = of_source[:, order]


class SummaryCache(RowCache):
    """The summaries of whole blocks, behind a learned row if there is one, and the rows of the open block."""

    def __init__(
        self,
        compression: Compression,
        null: Null | None,
        network: NetworkConfig,
        batch: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        back: int,
    ) -> None:
        self.compression, self.null, self.backend = compression, null, network.backend
        self.open = OpenBlocks(compression, batch, length, device, dtype, back)
        rows = max(1, self.rows_after(length))
        keys, values = (
            torch.zeros(batch, compression.heads, rows, width, device=device, dtype=dtype)
            for width in compression.widths
        )
        super().__init__(keys, values)
        self.summaries = KeyValues(keys, values, (Dense(),) * network.heads, network.backend)
        if null is not None:
            self.write(0, null.key.detach().to(dtype), null.value.detach().to(dtype))

    def rows_after(self, positions: int) -> int:
        """Count the rows that a query reads after some positions."""
        return self.compression.count(positions) + (self.null is not None)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.open.begin(k, v)
        grid = self.compression.grid(q.shape[2], None, q.device)
        keys, values = self.compression(k, v, grid)
        if self.null is not None:
            keys, values = self.null(keys, values)
        self.write(slice(keys.shape[2]), keys, values)
        has_null = self.null is not None
        return attend_blocks(q, (keys, values), grid, self.compression, self.backend, null=has_null)

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        ended = self.open.step(k, v, position)
        last = self.rows_after(position + 1) - 1
        if last < 0:
            return q.new_zeros(*q.shape[:2], self.values.shape[3])
        key, value = ended or (self.keys[:, :, last], self.values[:, :, last])
        return self.summaries.step(q, key, value, last)

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        self.open.take(source.open, order, into)
        self.summaries.take(source.summaries, order, self.rows_after(length), into)
        if self.recent is not None:
            self.recent.take(source.recent, order, length, into)
