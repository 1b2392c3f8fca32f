"""Native sparse attention: summaries of blocks, chosen blocks and a window, joined by gates (Yuan et al. 2025).

Letters: B batch, H heads of queries, K heads of keys and values, N positions, n queries, D head width, M whole blocks
that are summarised, J blocks of which a query chooses T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.kernels import ConfigError, attend_listed, num_pairs, selected_attention, sparse_attention
from longstride.kernels.patterns import Local, Pattern
from longstride.kernels.selections import chosen_blocks, within_documents
from longstride.sparse_model.mixers.attention import Attention, AttentionConfig, KeyValueHeads
from longstride.sparse_model.mixers.cache import KeyValues, Rows
from longstride.sparse_model.mixers.convolution import RecentRows
from longstride.sparse_model.mixers.memories.compressed import (
    Compression,
    Grid,
    SummaryCache,
    attend_blocks,
    check_blocks,
    positions_covered,
    split_heads,
)
from longstride.sparse_model.mixers.moba import SCORES, highest, pairs_of_head
from longstride.sparse_model.network import POSITIVE, NetworkConfig, nearest_divisor
from longstride.sparse_model.part import PLAIN, BlockContext, HeadWidths, Mixer, MixerOutput, Work, draw_linear
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel
from longstride.sparse_model.tiles import wide_of

FIXED = 3  # blocks that a query always reads: its own, the one before it, and the first


class NsaConfig(AttentionConfig, StrictModel):
    """Attention to summaries of blocks, to chosen blocks, and to a window."""

    supports: ClassVar = frozenset({"convolution", "documents", "padding", "reversible"})

    type: Literal["nsa"] = Field(description="attention to summaries of blocks, to chosen blocks and to a window")
    block: Annotated[int, POSITIVE] = Field(default=32, description="positions that a summary stands for")
    distance: Annotated[int, POSITIVE] = Field(
        default=16, description="positions from one summary to the next; divides block and selected_block"
    )
    selected_block: Annotated[int, POSITIVE] = Field(
        default=64, description="positions of the blocks that a query chooses; at least block"
    )
    selected: int = Field(
        default=16, ge=FIXED, description="blocks that a query reads; its own, the one before and the first always"
    )
    window: Annotated[int, POSITIVE] = Field(default=512, description="positions, the query's own counted")
    key_value_heads: KeyValueHeads = None

    def check(self, network: NetworkConfig, context: int) -> None:
        super().check(network, context)
        check_blocks(self.type, self.block, self.distance, network)
        if self.selected_block % self.distance:
            nearest = nearest_divisor(self.selected_block, self.distance)
            rule = f"must divide selected_block={self.selected_block}; nearest {nearest}"
            raise ConfigError.at("distance", self.distance, rule)
        if not self.block <= self.selected_block <= network.context:
            rule = f"must be from block={self.block} to context {network.context}"
            raise ConfigError.at("selected_block", self.selected_block, rule)
        blocks = -(-network.context // self.selected_block)
        if self.selected > blocks:
            rule = f"context {network.context} has {blocks} blocks; take at most {blocks}, or a smaller selected_block"
            raise ConfigError.at("selected", self.selected, rule)

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return ()

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        """Count the keys and values of two branches, and the summaries of the third."""
        widths = super().head_widths(network)
        channels = (self.key_value_heads or network.heads) * (widths.query_key + widths.value)
        return widths._replace(extra_cached=channels + -(-channels // self.distance))

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> NativeSparseAttention:
        return NativeSparseAttention(network, self, rotary)


class NativeSparseAttention(Attention):
    """Three attentions with keys and values of their own, each times a gate σ(W x) of its head (equation 5).

    - selected: whole blocks, the same ones for all heads that share keys. The scores of blocks are the probabilities
      of the summaries that overlap them (equations 9 and 10). The choice has no gradient, and is made in fp32 (fp64 for
      fp64). Among equal scores the earlier block is chosen.
    - window: the last positions.
    - compressed: summaries, made by an MLP, of the blocks that are over (equation 7); 0 before the first.
    """

    def __init__(self, network: NetworkConfig, config: NsaConfig, rotary: Rotary | None) -> None:
        groups = network.heads // (config.key_value_heads or network.heads)
        key, value = network.query_key_width // groups, network.width // groups
        # The channels that are normalised and rotated come first: queries, and keys of chosen blocks and of the window.
        widths = (network.query_key_width, key, key, key, value, value, value)
        super().__init__(network, (), rotary, widths, key_value_heads=config.key_value_heads)
        self.config, heads = config, self.key_value_heads
        self.compression = Compression(
            network, rotary, kind="mlp", block=config.block, distance=config.distance, heads=heads,
            widths=(key // heads, value // heads),
        )  # fmt: skip
        self.gates = nn.Linear(network.width, 3 * network.heads, bias=network.bias)
        self.windows = (Local(config.window),) * network.heads

    def initialize(self) -> None:
        super().initialize()
        draw_linear(self.gates, self.network)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        state: Any = context.state
        first, places = context.first, context.places
        if self.convolution is not None:
            h = self.convolution(h, None if state is None else state.recent, first, places)
        q, keys, values = self.branch_heads(h, slice(first, first + h.shape[1]) if places is None else places)
        if state is None:
            branches = self.branches(q, keys, values, places)
        else:
            branches = state.extend(q, keys, values, first) if first else state.begin(q, keys, values)
        gates = self.gates(h).sigmoid().unflatten(-1, (3, self.heads, 1)).unbind(2)
        rows = sum(branch.transpose(1, 2) * gate for branch, gate in zip(branches, gates, strict=True))
        assert isinstance(rows, Tensor)
        return MixerOutput(self.projection(rows.flatten(2)))

    def branch_heads(self, h: Tensor, places: Tensor | slice) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """Project rows (B, N, C) to queries, and to keys and values of the branches: selected, window, compressed.

        Those of the compressed branch are neither normalised nor rotated.
        """
        q, *rows = split_heads(self, self.query_key_value(h), sum(self.widths[:3]), places)
        return q, rows[:3], rows[3:]

    def branches(
        self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], places: Tensor | None
    ) -> list[Tensor]:
        """Attend over whole contexts: rows (B, H, N, Dv) of each branch."""
        grid = self.compression.grid(q.shape[2], places, q.device)
        summaries = self.compression(keys[2], values[2], grid)
        selected = self.attend_selected(q, keys[0], values[0], summaries[0], grid)
        if places is None:
            near = sparse_attention(q, keys[1], values[1], self.windows, backend=self.backend)
        else:
            starts = torch.arange(q.shape[2], device=q.device) - places
            selection = within_documents(self.windows, starts)
            near = selected_attention(q, keys[1], values[1], selection, backend=self.backend)
        return [selected, near, attend_blocks(q, summaries, grid, self.compression, self.backend, null=False)]

    def attend_selected(self, q: Tensor, k: Tensor, v: Tensor, summaries: Tensor, grid: Grid) -> Tensor:
        """Attend to the chosen blocks of k and v (B, K, N, ·), by keys of summaries (B, K, M, D)."""
        numbers = self.choices(q, summaries, grid, (q.shape[2] - 1) // self.config.selected_block)
        # Sorted once for the heads of a group, which choose the same blocks.
        selection = chosen_blocks(numbers, self.config.selected_block, grid.places)
        selection = selection.mapped(lambda tensor: tensor.repeat_interleave(self.group, 1))
        return selected_attention(q, k, v, selection, backend=self.backend)

    def choices(self, q: Tensor, summaries: Tensor, grid: Grid, last: int) -> Tensor:
        """Return which blocks before its own each query reads.

        Args:
            q: (B, H, n, D).
            summaries: (B, K, M, D), keys.
            grid: which of them each query reads, and the places of the queries.
            last: number of the last block of a context.

        Returns:
            (B, K, n, T) int64, counted from the start of the document: the block before, the first, and those with the
            highest scores between them; -1 for none.
        """
        place = torch.arange(q.shape[2], device=q.device)[None] if grid.places is None else grid.places
        current = (place // self.config.selected_block)[:, None].expand(len(q), self.key_value_heads, -1)
        pieces = [(current - 1)[..., None], torch.zeros_like(current).where(current >= 2, -1)[..., None]][
            : min(2, last)
        ]
        count = min(self.config.selected - FIXED, last - 2)
        if count > 0:
            rank = torch.arange(count, device=q.device)
            size = max(1, SCORES // (q.shape[0] * q.shape[1] * summaries.shape[2]))
            best = []
            for some in (slice(first, first + size) for first in range(0, q.shape[2], size)):
                scores = self.block_scores(q.detach()[:, :, some], summaries.detach(), grid.of_queries(some), last)
                number, free = torch.arange(last + 1, device=q.device), current[:, :, some, None] - 2
                scores.masked_fill_((number < 1) | (number > free), -torch.inf)
                best.append(highest(scores, count).where(rank < free, -1))
            pieces.append(torch.cat(best, 2))
        return torch.cat(pieces, -1) if pieces else q.new_empty((*current.shape, 0), dtype=torch.int64)

    def block_scores(self, q: Tensor, summaries: Tensor, grid: Grid, last: int) -> Tensor:
        """Return the score of each block 0 … ``last`` for queries (B, H, n, D): (B, K, n, ``last`` + 1).

        A unit has ``distance`` positions. A block's score is the sum over its units of the probabilities of all
        summaries that cover the unit, summed over the heads of a group.
        """
        wide, count, distance = wide_of(q), summaries.shape[2], self.config.distance
        number = torch.arange(count, device=q.device)
        is_read = (number >= grid.low[..., None]) & (number < grid.high[..., None])  # (1 or B, n, M)
        with torch.autocast(q.device.type, enabled=False):  # autocast would round to 16 bits
            rows = (q.to(wide) * q.shape[3] ** -0.5).unflatten(1, (self.key_value_heads, self.group)).flatten(2, 3)
            scores = (rows @ summaries.to(wide).mT).unflatten(2, (self.group, -1))
        scores.masked_fill_(~is_read[:, None, None], torch.finfo(wide).min)
        weights = scores.softmax(-1).sum(2).masked_fill_(~is_read[:, None], 0.0)  # (B, K, n, M)
        if grid.places is not None:  # count summaries from the start of the document
            number = (number + grid.low[..., None])[:, None].expand(weights.shape)
            weights = weights.gather(-1, number.clamp_max(count - 1)).masked_fill_(number >= count, 0.0)
        units = self.config.selected_block // distance
        weights = F.pad(weights, (0, (last + 1) * units - count))
        covered = weights.clone()
        for shift in range(1, self.config.block // distance):
            covered[..., shift:] += weights[..., :-shift]
        return covered.unflatten(-1, (last + 1, units)).sum(-1)

    def new_state(self, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int) -> Any:
        return BranchCaches(self, batch, length, device, dtype, back)

    def num_pairs(self, positions: int) -> int:
        config = self.config
        chosen = pairs_of_head(positions, config.selected_block, config.selected)
        near = num_pairs(Local(config.window), positions)
        return self.heads * (self.compression.num_pairs(positions) + chosen + near)

    def work(self, positions: int, batch: int) -> Work:
        gates = Work(linear=2 * positions * self.gates.weight.numel())
        choosing = Work(choosing=2 * self.compression.num_pairs(positions) * self.widths[0])
        return super().work(positions, batch) + self.compression.work(positions) + gates + choosing

    weights = Mixer.weights  # it has three

    def reads(self, h: Tensor, head: int, context: BlockContext = PLAIN) -> Callable[[Tensor], Tensor]:
        if self.convolution is not None:
            h = self.convolution(h)
        q, keys, values = self.branch_heads(h, slice(h.shape[1]))
        grid = self.compression.grid(h.shape[1], None, h.device)
        summaries, _ = self.compression(keys[2], values[2], grid)
        position, block = torch.arange(h.shape[1], device=h.device), self.config.selected_block
        numbers = self.choices(q, summaries, grid, (h.shape[1] - 1) // block)[0, head // self.group]  # (N, T)

        def of_queries(queries: Tensor) -> Tensor:
            places, blocks = queries[:, None], position // block
            chosen = (numbers[queries][:, :, None] == blocks).any(1) | (places // block == blocks)
            near = position > places - self.config.window
            return (chosen | near) & (position <= places) | (position < positions_covered(places, self.compression))

        return of_queries


class BranchCaches:
    """The caches of the three branches: all keys and values twice, the summaries, and the rows of the open block."""

    def __init__(
        self,
        owner: NativeSparseAttention,
        batch: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        back: int,
    ) -> None:
        self.owner = owner
        shape = batch, owner.key_value_heads, length
        widths = owner.compression.widths

        def empty() -> list[Tensor]:
            return [torch.empty(*shape, width, device=device, dtype=dtype) for width in widths]

        keys, values = empty()
        self.selected = Rows(*empty())
        self.near = KeyValues(keys, values, owner.windows, owner.backend)
        self.compressed = SummaryCache(owner.compression, None, owner.network, batch, length, device, dtype, back)
        self.recent: RecentRows | None = None
        if owner.convolution is not None:
            self.recent = owner.convolution.new_state(batch, length, device, back)

    def begin(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """Write the first n rows of each branch, (B, K, n, ·), and return their outputs, (B, H, n, Dv)."""
        owner, rows = self.owner, q.shape[2]
        compressed = self.compressed.begin(q, keys[2], values[2])
        grid = owner.compression.grid(rows, None, q.device)
        summaries = self.compressed.keys[:, :, : grid.ends.shape[1]]
        self.selected.write(slice(rows), keys[0], values[0])
        selected = owner.attend_selected(q, keys[0], values[0], summaries, grid)
        return [selected, self.near.begin(q, keys[1], values[1]), compressed]

    def extend(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], first: int) -> list[Tensor]:
        """Write n rows of each branch from position ``first`` on, and return their outputs, by steps."""
        steps = [
            self.step(q[:, :, n], [x[:, :, n] for x in keys], [x[:, :, n] for x in values], first + n)
            for n in range(q.shape[2])
        ]
        return [torch.stack(branch, 2) for branch in zip(*steps, strict=True)]

    def step(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], position: int) -> list[Tensor]:
        """Write one row of each branch, (B, K, ·), and return its outputs, (B, H, Dv)."""
        owner, block = self.owner, self.owner.config.selected_block
        compressed = self.compressed.step(q, keys[2], values[2], position)
        count, last = owner.compression.count(position + 1), position // block
        place = torch.tensor([[position]], device=q.device)
        grid = Grid(place[:, :0], torch.zeros_like(place), torch.full_like(place, count), place)
        numbers = owner.choices(q[:, :, None], self.compressed.keys[:, :, :count], grid, last)  # (B, K, 1, T)
        chosen = (numbers.mT * block + torch.arange(block, device=q.device)).flatten(2)
        recent = torch.arange(last * block, position + 1, device=q.device).expand(*chosen.shape[:2], -1)
        listed = torch.cat([chosen, recent], -1).repeat_interleave(owner.group, 1)
        self.selected.write(position, keys[0], values[0])
        selected = attend_listed(q, self.selected.keys, self.selected.values, listed)
        return [selected, self.near.step(q, keys[1], values[1], position), compressed]

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        for name in ("selected", "near", "compressed"):
            getattr(self, name).take(getattr(source, name), order, length, into)
        if self.recent is not None:
            self.recent.take(source.recent, order, length, into)

    def truncate(self, length: int) -> None:
        """Forget all rows but the first ``length``: steps overwrite later ones before any is read."""
        if self.recent is not None:
            self.recent.truncate(length)
