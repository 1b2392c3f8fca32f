"""Mixture of block attention: each query reads the blocks whose keys it matches best (Lu et al. 2025, MoBA).

It equals the selected branch of native sparse attention (Yuan et al. 2025), except that a block's score comes from the
mean of its keys instead of a learned compression.

Letters: B batch, H heads of queries, K heads of keys and values, N positions, C whole blocks, T chosen blocks of a
query, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from longstride.kernels import ConfigError, attend_listed, selected_attention
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import chosen_blocks
from longstride.sparse_model.mixers.attention import ALL_HEADS, Attention, AttentionConfig, KeyValueHeads
from longstride.sparse_model.mixers.cache import RowCache
from longstride.sparse_model.network import POSITIVE, NetworkConfig
from longstride.sparse_model.part import MixerOutput, Work
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel
from longstride.sparse_model.tiles import wide_of

SCORES = 1 << 24  # of queries and blocks at once, in all heads


class MobaConfig(AttentionConfig, StrictModel):
    """Attention to the query's block and to the best blocks before it."""

    type: Literal["moba"] = Field(description="attention to the own block and to the best of those before it")
    block: Annotated[int, POSITIVE] = Field(description="positions; the last block of a context may be shorter")
    top: Annotated[int, POSITIVE] = Field(description="blocks that a query reads, its own one counted")
    key_value_heads: KeyValueHeads = None

    def check(self, network: NetworkConfig, context: int) -> None:
        super().check(network, context)
        if self.block > network.context:
            raise ConfigError.at("block", self.block, f"must be at most context {network.context}")
        blocks = -(-network.context // self.block)
        if self.top > blocks:
            raise ConfigError.at("top", self.top, f"context {network.context} has {blocks} blocks; at most {blocks}")

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return ()

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> BlockAttention:
        return BlockAttention(network, self, rotary)


class BlockAttention(Attention):
    """Attention of each query to its own block up to itself, and to the best whole blocks before it.

    A block's score is the product of the query and the mean of its keys, in fp32 (fp64 for fp64). Among equal scores
    the earlier block is chosen. The choice has no gradient: queries and keys learn from the pairs that are read.
    """

    def __init__(self, network: NetworkConfig, config: MobaConfig, rotary: Rotary | None) -> None:
        super().__init__(network, (), rotary, key_value_heads=config.key_value_heads)
        self.block, self.top = config.block, config.top

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice = ALL_HEADS, real: Tensor | None = None
    ) -> MixerOutput:
        selection = chosen_blocks(choices(q, means(k, self.block), self.block, self.top), self.block)
        return MixerOutput(selected_attention(q, k, v, selection, backend=self.backend))

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> BlockCache:
        keys, values = self.empty_rows(batch, length, device, dtype)
        return BlockCache(self, keys, values)

    def num_pairs(self, positions: int) -> int:
        """Count the pairs, which do not depend on the choice: a query with fewer earlier blocks reads all of them."""
        return self.heads * pairs_of_head(positions, self.block, self.top)

    def work(self, positions: int, batch: int) -> Work:
        blocks = sum(position // self.block for position in range(0, positions, self.block)) * self.block
        return super().work(positions, batch) + Work(choosing=2 * blocks * self.widths[0])

    def allowed(self, q: Tensor, k: Tensor, head: int) -> Callable[[Tensor], Tensor]:
        q, k = q[:, head, None], k[:, head // self.group, None]
        numbers = choices(q, means(k, self.block), self.block, self.top)[0, 0]  # (N, T)
        position = torch.arange(k.shape[2], device=k.device)

        def of_queries(queries: Tensor) -> Tensor:
            places, blocks = queries[:, None], position // self.block
            chosen = (numbers[queries][:, :, None] == blocks).any(1)
            return chosen | (places // self.block == blocks) & (position <= places)

        return of_queries


class BlockCache(RowCache):
    """A cache of keys and values, and of the means of the keys of whole blocks.

    A mean is computed when the last key of its block is written, from the keys in memory. So it has the same bits as in
    a whole context, and a repeated step writes the same.
    """

    def __init__(self, owner: BlockAttention, keys: Tensor, values: Tensor) -> None:
        self.owner, self.keys, self.values = owner, keys, values
        batch, heads, length, width = keys.shape
        self.means = keys.new_zeros((batch, heads, length // owner.block, width), dtype=wide_of(keys))

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, block = q.shape[2], self.owner.block
        self.write(slice(rows), k, v)
        self.means[:, :, : rows // block] = means(k, block)
        return self.owner.attend(q, k, v).rows

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        block, top = self.owner.block, self.owner.top
        self.write(position, k, v)
        current = position // block
        if (position + 1) % block == 0:
            last = self.keys[:, :, current * block : position + 1]
            self.means[:, :, current : current + 1] = means(last, block)
        numbers = best(q[:, :, None], self.means[:, :, :current], min(top - 1, current))  # (B, H, 1, T)
        chosen = (numbers.mT * block + torch.arange(block, device=q.device)).flatten(2)  # (B, H, T · block)
        recent = torch.arange(current * block, position + 1, device=q.device).expand(*q.shape[:2], -1)
        return attend_listed(q, self.keys, self.values, torch.cat([chosen, recent], -1))

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        super().take(source, order, length, into)
        blocks = length // self.owner.block
        self.means[into, :, :blocks] = source.means[order, :, :blocks]


def means(k: Tensor, block: int) -> Tensor:
    """Compute the mean key of each whole block of k (B, K, N, D): (B, K, C, D) in fp32 (fp64 for fp64), no gradient."""
    blocks = k.shape[2] // block
    return k.detach()[:, :, : blocks * block].unflatten(2, (blocks, block)).mean(3, dtype=wide_of(k))


def best(q: Tensor, means: Tensor, count: int, later: Tensor | None = None) -> Tensor:
    """Return the blocks whose mean keys (B, K, C, D) match queries (B, H, n, D) best: (B, H, n, count) int64.

    ``later``: (n, C) bool, blocks to exclude; a query with too few others gets some of them last.
    """
    # Clamped to the smallest finite number, so that blocks that are excluded or already chosen rank last.
    rows = q.to(means.dtype).reshape(*means.shape[:2], -1, means.shape[3])  # heads of a group follow each other
    with torch.autocast(q.device.type, enabled=False):  # autocast would round to 16 bits
        scores = (rows @ means.mT).view(*q.shape[:3], means.shape[2]).clamp_(min=torch.finfo(means.dtype).min)
    if later is not None:
        scores.masked_fill_(later, -torch.inf)
    return highest(scores, count)


def highest(scores: Tensor, count: int) -> Tensor:
    """Return the places of the ``count`` highest scores (…, C), the first of equal ones; overwrites the scores."""
    places = [torch.empty((*scores.shape[:-1], 0), dtype=torch.int64, device=scores.device)]
    for _ in range(count):  # argmax takes the first of equal scores; a stable sort takes four times as long for three
        places.append(scores.argmax(-1, keepdim=True))
        scores.scatter_(-1, places[-1], -torch.inf)
    return torch.cat(places, -1)


def pairs_of_head(positions: int, block: int, top: int) -> int:
    """Count the pairs of one head whose queries read their block and at most ``top`` - 1 blocks before it."""
    whole, rest = divmod(positions, block)
    growing = min(whole, top)  # blocks whose queries read all blocks before theirs
    earlier = growing * (growing - 1) // 2 + (whole - growing) * (top - 1)
    own = whole * block * (block + 1) // 2 + rest * (rest + 1) // 2
    return earlier * block**2 + min(whole, top - 1) * block * rest + own


def choices(q: Tensor, means: Tensor, block: int, top: int) -> Tensor:
    """Return the blocks before its own that each query q (B, H, N, D) reads, by the mean keys (B, K, C, D).

    Returns:
        (B, H, N, T) int64, T at most top - 1; -1 if a query has fewer blocks before it.
    """
    blocks, rows = means.shape[2], q.shape[2]
    count = min(top - 1, (rows - 1) // block)
    if not count:
        return q.new_empty((*q.shape[:3], 0), dtype=torch.int64)
    number = torch.arange(blocks, device=q.device)
    pieces = []
    size = max(1, SCORES // (q.shape[0] * q.shape[1] * blocks))
    for first in range(0, rows, size):
        some = q.detach()[:, :, first : first + size]
        current = torch.arange(first, first + some.shape[2], device=q.device)[:, None] // block
        pieces.append(best(some, means, count, number >= current).where(number[:count] < current, -1))
    return torch.cat(pieces, 2)
