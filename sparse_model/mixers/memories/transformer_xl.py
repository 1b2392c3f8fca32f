"""Attention with relative positions to a context and the last rows before it (Dai et al. 2019, Transformer-XL).

Letters: B batch, H heads, N positions, M rows of memory, C width, D head width, P channels of a distance.

Row i reads rows j <= i of the context and of the memory, with the score

    ((q_i + u) · k_j + (q_i + w) · W R_{i-j}) / √D,    R_d = [sin(d·ω), cos(d·ω)],    ω_f = 10000^(-2f/P)

The sine and cosine of a difference are sums of products. So with (q_i + w)ᵀ W = [a, b] the score is one product,

    [q_i + u, a·sin(i·ω) + b·cos(i·ω), b·sin(i·ω) - a·cos(i·ω)] · [k_j, cos(j·ω), sin(j·ω)] / √D

which the attention kernels compute as heads of D + P channels. Positions count from the memory's first row.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.kernels import ConfigError, Problem, empty_cache, num_pairs, selected_attention, sparse_attention
from longstride.kernels.patterns import Dense, Local, Pattern
from longstride.kernels.selections import Part as SelectionPart
from longstride.kernels.selections import Selection
from longstride.sparse_model.mixers.attention import NOT_FLEX, Attention, AttentionConfig
from longstride.sparse_model.mixers.cache import KeyValues
from longstride.sparse_model.network import MOST_POSITIONS, POSITIVE, NetworkConfig
from longstride.sparse_model.part import PLAIN, BlockContext, Carried, HeadWidths, MixerOutput, Part, Work, draw
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel
from longstride.sparse_model.tiles import wide_of

BASE = 10_000.0  # of the wavelengths: 2π to about 2π·BASE positions
BIAS_STD = 0.02  # of first values, as in the authors' code


class TransformerXLConfig(AttentionConfig, StrictModel):
    """Attention with relative positions, to a memory too."""

    supports: ClassVar = frozenset({"documents", "padding", "reversible"})

    type: Literal["transformer_xl"] = Field(description="attention with relative positions, to a memory too")
    memory: int = Field(ge=0, le=MOST_POSITIONS, description="rows before a context that it reads; 0: none")
    window: Annotated[int, POSITIVE] | None = Field(
        default=None, description="keys that a query reads at most, its own counted; null: all"
    )
    position_channels: Annotated[int, Field(ge=2, le=1 << 16, multiple_of=2)] | None = Field(
        default=None, description="sines and cosines of a distance; null: as many as a head has channels"
    )
    untied: bool = Field(default=False, description="each layer has biases u and w of its own")

    def check(self, network: NetworkConfig, context: int) -> None:
        super().check(network, context)
        problems = [
            Problem("type", f"{rule}; set model.{option} to {off}", self.type)
            for option, rule, off in (
                ("rotary", "has relative positions of its own", "null"),
                ("query_key_norm", "adds biases to queries, which are not normalised", "false"),
            )
            if getattr(network, option)
        ]
        if network.backend == "flex":
            problems.append(Problem("type", NOT_FLEX, self.type))
        if problems:
            raise ConfigError(*problems)

    @property
    def carries(self) -> bool:
        return self.memory > 0

    def channels(self, network: NetworkConfig) -> int:
        """Return P."""
        head = network.query_key_width // network.heads
        return self.position_channels or head + head % 2

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        """Return what each head reads of a context without memory."""
        return (Dense() if self.window is None else Local(self.window),) * network.heads

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        widths = super().head_widths(network)
        return widths._replace(query_key=widths.query_key + self.channels(network))

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> MemoryAttention:
        return MemoryAttention(network, self)

    def make_shared(self, network: NetworkConfig) -> QueryBiases | None:
        return None if self.untied else QueryBiases(network)


class QueryBiases(Part):
    """The biases u and w (H·D,) that queries have for keys and for distances."""

    part = "attention"

    def __init__(self, network: NetworkConfig) -> None:
        super().__init__()
        self.for_keys, self.for_distances = (nn.Parameter(torch.empty(network.query_key_width)) for _ in range(2))

    def initialize(self) -> None:
        for bias in (self.for_keys, self.for_distances):
            nn.init.normal_(bias, std=BIAS_STD)

    def forward(self) -> Tensor:
        """Return both, (2, H·D)."""
        return torch.stack([self.for_keys, self.for_distances])


class Projection(nn.Linear):
    """A linear layer without bias, of which some calls need only some channels, or no gradient of the weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, rows: Tensor, channels: slice | None = None, is_frozen: bool = False) -> Tensor:
        """Map (…, C) to some channels; ``is_frozen``: by constant weights, in the precision of the rows."""
        weight = self.weight if channels is None else self.weight[channels]
        return F.linear(rows, weight.detach().to(rows.dtype) if is_frozen else weight)


class Past(NamedTuple):
    """Rows before a context, for each context of a batch: those from ``first`` on exist."""

    rows: Tensor  # (B, M, C)
    first: Tensor  # (B,) int64


class Ending(NamedTuple):
    """The last document of each context of a batch, among the rows of the memory and of the context."""

    rows: Tensor  # (B, M + N, C), without gradients, in the memory's precision
    end: Tensor  # (B,) int64, where real rows end
    length: Tensor  # (B,) int64, rows of the document before that
    goes_on: Tensor  # (B,) bool: it began before the context


class MemoryAttention(Attention):
    """Attention with relative positions to the rows of a context, and to the rows before it (section 3).

    Biases u and w belong to the network, or with ``untied`` to the layer. Contexts that stand alone read no memory.
    """

    def __init__(self, network: NetworkConfig, config: TransformerXLConfig) -> None:
        super().__init__(network, config.head_patterns(network), None)
        self.config, self.reads_shared = config, not config.untied
        self.channels, self.length = config.channels(network), config.memory
        self.scale = (network.query_key_width // network.heads) ** -0.5
        self.distances = nn.Parameter(torch.empty(network.query_key_width, self.channels))  # W of all heads
        self.biases = QueryBiases(network) if config.untied else None
        if config.memory:
            self.carried = Carried((config.memory, network.width)), Carried((), torch.int32)  # rows, and their number

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        return Projection(inputs, outputs)

    def initialize(self) -> None:
        super().initialize()
        draw(self.distances, self.network, self.channels)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Attend from each row of h (B, N, C) to those before it in the context and in the memory or the cache."""
        state: Any = context.state
        past = self.past(context)
        first = 0 if past is None else past.rows.shape[1]
        if state is not None:
            first = state.offset + context.first
        q, k, v = self.heads_at(h, first, context.shared)
        if state is not None and h.shape[1] == 1:
            return MixerOutput(self.projection(state.step(*(x.squeeze(2) for x in (q, k, v)), first).view(h.shape)))
        output = MixerOutput(h)
        if state is not None:
            out = state.extend(q, k, v, first) if first else state.begin(q, k, v)
        elif past is not None:
            keys, values = self.keys_of(past.rows)
            k, v = torch.cat([self.placed(keys), k], 2), torch.cat([values, v], 2)
            selection = self.selection_behind(past, context.places, h.shape[1])
            out = selected_attention(q, k, v, selection, scale=self.scale, backend=self.backend)
            output = self.hand_over(h, context)
        elif context.selection is not None:
            out = selected_attention(q, k, v, context.selection, scale=self.scale, backend=self.backend)
        else:
            out = sparse_attention(q, k, v, self.patterns, scale=self.scale, backend=self.backend)
        return output._replace(rows=self.projection(out.transpose(1, 2).flatten(2)))

    def past(self, context: BlockContext) -> Past | None:
        """Return the rows before a context that its rows read; None: contexts stand alone."""
        if not context.carried:
            return None
        rows, count = context.carried
        return Past(rows, rows.shape[1] - count.long())

    def heads_at(self, h: Tensor, first: int, shared: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project rows h (B, N, C) at positions from ``first`` on.

        Returns:
            Queries and keys (B, H, N, D + P) whose products are the scores times √D, and values (B, H, N, Dv).
        """
        biases = shared if self.biases is None else self.biases()
        assert biases is not None
        for_keys, for_distances = biases.unflatten(1, (self.heads, 1, -1)).unbind()  # u, w: (H, 1, D)
        q, k, v = self.heads_of(self.query_key_value(h))
        a, b = ((q + for_distances) @ self.distances.unflatten(0, (self.heads, -1))).to(wide_of(q)).chunk(2, -1)
        sines, cosines = self.waves(first, q)
        turned = torch.cat([a * sines + b * cosines, b * sines - a * cosines], -1)
        return torch.cat([(q + for_keys).to(q.dtype), turned.to(q.dtype)], -1), self.placed(k, first), v

    def keys_of(self, rows: Tensor, is_frozen: bool = False) -> tuple[Tensor, Tensor]:
        """Project rows (B, M, C) to keys (B, H, M, D) and values (B, H, M, Dv); ``is_frozen``: by constant weights."""
        projected = self.query_key_value(rows, slice(self.widths[0], None), is_frozen)
        k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in projected.split(self.widths[1:], -1))
        return k, v

    def placed(self, k: Tensor, first: int = 0) -> Tensor:
        """Add to keys (B, H, N, D) the P channels of positions from ``first`` on."""
        sines, cosines = self.waves(first, k)
        waves = torch.cat([cosines, sines], -1).to(k.dtype)
        return torch.cat([k, waves.expand(*k.shape[:3], -1)], -1)

    def waves(self, first: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return sines and cosines of the positions of ``like`` (…, N, ·) from ``first`` on, (N, P/2) fp32 or fp64."""
        channels = torch.arange(0, self.channels, 2, dtype=torch.float64, device=like.device)
        positions = torch.arange(first, first + like.shape[-2], dtype=torch.float64, device=like.device)
        angles = positions[:, None] * BASE ** (-channels / self.channels)
        return angles.sin().to(wide_of(like)), angles.cos().to(wide_of(like))

    def selection_behind(self, past: Past, places: Tensor | None, count: int) -> Selection:
        """Return what ``count`` queries read of M rows before them and of the context; a document reads itself."""
        memory, batch = past.rows.shape[1], len(past.rows)
        position = torch.arange(count, device=past.rows.device)
        low = past.first[:, None].expand(batch, count)
        if places is not None:
            begins = position - places
            low = torch.where(begins == 0, low, memory + begins)
        high = (memory + 1 + position).expand(batch, count)
        if self.config.window is not None:
            low = torch.maximum(low, high - self.config.window)
        low, high = (bound.int()[:, None].expand(-1, self.heads, -1) for bound in (low, high))
        span = min(memory + count, self.config.window or MOST_POSITIONS)
        return Selection((SelectionPart(None, None, low, high),), span)

    def hand_over(self, h: Tensor, context: BlockContext) -> MixerOutput:
        """Return what the next context takes as ``carried``, with the rows h (B, N, C) of this one."""
        ending = self.ending(h, context)
        memory = rows_before(ending.rows, ending.end, self.config.memory)
        count = ending.length.clamp_max(self.config.memory)
        return MixerOutput(h, carried=(memory, count.to(torch.int32)))

    def ending(self, h: Tensor, context: BlockContext) -> Ending:
        """Return the last document of the memory and the rows h (B, N, C)."""
        rows, before = context.carried[:2]
        total = torch.cat([rows.to(h.dtype), h], 1).detach().to(rows.dtype)
        before = before.long()
        length = torch.full_like(before, h.shape[1]) if context.real is None else context.real.sum(1)
        count, goes_on = before + length, torch.ones_like(before, dtype=torch.bool)
        if context.places is not None:
            last = (length - 1).clamp_min(0)
            place = context.places.gather(1, last[:, None])[:, 0]
            goes_on = place == last
            count = torch.where(goes_on, count, place + 1)
        return Ending(total, rows.shape[1] + length, count, goes_on)

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> MemoryCache:
        places = self.length + length
        widths = self.widths[1] // self.heads + self.channels, self.widths[2] // self.heads
        keys, values = (
            empty_cache(batch, self.heads, places, width, self.patterns, device=device, dtype=dtype) for width in widths
        )
        return MemoryCache(self, keys, values)

    def num_pairs(self, positions: int) -> int:
        """Count pairs of a query and a key in all heads together, with a full memory."""
        (pattern,) = set(self.patterns)
        both = num_pairs(pattern, self.length + positions)
        return self.heads * (both - (num_pairs(pattern, self.length) if self.length else 0))

    def visited_pairs(self, positions: int, like: Tensor) -> int:
        return self.num_pairs(positions) if self.length else super().visited_pairs(positions, like)

    def work(self, positions: int, batch: int) -> Work:
        work = super().work(positions, batch)
        memory = 2 * self.length * self.network.width * sum(self.widths[1:])
        extra = 2 * work.pairs * self.channels
        return work + Work(linear=memory + 2 * positions * self.distances.numel(), scores=extra)

    def _queries_and_keys(self, h: Tensor, context: BlockContext) -> tuple[Tensor, Tensor]:
        q, k, _ = self.heads_at(h, 0, context.shared)
        return q * (self.scale * q.shape[-1] ** 0.5), k  # weights divide by the root of the width


def rows_before(rows: Tensor, end: Tensor, count: int) -> Tensor:
    """Return the last ``count`` of rows (B, L, C) before ``end`` (B,): (B, count, C); anything before the first."""
    index = end[:, None] + torch.arange(-count, 0, device=rows.device)
    return rows.take_along_dim(index.clamp_min(0)[..., None], 1)


class MemoryCache(KeyValues):
    """Keys and values of the memory, then those of the context. Places of unused memory lie at the end."""

    offset = 0  # rows of memory

    def __init__(self, owner: MemoryAttention, keys: Tensor, values: Tensor) -> None:
        super().__init__(keys, values, owner.patterns, owner.backend, owner.scale)
        self.owner, self.context = owner, keys.shape[2] - owner.length  # places of a context

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.owner, self.keys, self.values), {"offset": self.offset}

    def carry(self) -> None:
        """Begin the next context, after one that fills the cache: its last rows are the memory."""
        last = self.offset + self.context
        count = min(self.owner.length, last)
        contents = self.keys[..., : -self.owner.channels]  # the channels of a position stay at their place
        for rows in (contents, self.values):
            rows[:, :, :count] = rows[:, :, last - count : last].clone()
        self.offset = count
        self._attend_one.forget()

    def truncate(self, length: int) -> None:
        super().truncate(self.offset + length if length else 0)
        self.offset = self.offset if length else 0

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        """Copy contexts of a cache after as many contexts, with their memory."""
        self.offset = source.offset
        super().take(source, order, self.offset + length, into)
