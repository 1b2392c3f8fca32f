"""Mixture of block attention: each query reads the blocks whose keys it matches best (Lu et al. 2025, MoBA).

It is the selected branch of native sparse attention too (Yuan et al. 2025), but for what scores a block: there a
learned compression of its keys, here their mean.

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
from longstride.sparse_model.mixers.attention import (
    ALL_HEADS,
    KEY_VALUE_HEADS,
    Attention,
    OfQueriesAndKeys,
    check_key_value_heads,
)
from longstride.sparse_model.mixers.cache import KeptRows
from longstride.sparse_model.network import POSITIVE, NetworkConfig
from longstride.sparse_model.part import MixerOutput, Work
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel
from longstride.sparse_model.tiles import wide_of

SCORES = 1 << 24  # of queries and blocks at once, in all heads


class MobaConfig(OfQueriesAndKeys, StrictModel):
    """Attention to the own block and to the best of those before it."""

    type: Literal["moba"] = Field(description="attention to the own block and to the best of those before it")
    block: Annotated[int, POSITIVE] = Field(description="positions; the last block of a context may be shorter")
    top: Annotated[int, POSITIVE] = Field(description="blocks that a query reads, its own one counted")
    key_value_heads: Annotated[int, POSITIVE] | None = Field(default=None, description=KEY_VALUE_HEADS)

    def check(self, network: NetworkConfig, context: int) -> None:
        """Raise ConfigError where the model's context has fewer blocks, or heads do not share keys evenly."""
        check_key_value_heads(self.key_value_heads, network)
        if self.block > network.context:
            raise ConfigError.at("block", self.block, f"must be at most context {network.context}")
        blocks = -(-network.context // self.block)
        if self.top > blocks:
            raise ConfigError.at("top", self.top, f"context {network.context} has {blocks} blocks; at most {blocks}")

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        """None: content decides for all heads."""
        return ()

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> BlockAttention:
        """The module."""
        return BlockAttention(network, self, rotary)


class BlockAttention(Attention):
    """Attention of each query to its own block up to itself, and to the best whole blocks before it.

    A block's score is the product of the query and the mean of its keys, in fp32 (fp64 for fp64). So nothing of the
    future takes part. Among equal scores the earlier block is chosen. No gradient goes through the choice: queries and
    keys learn from the pairs that are read.
    """

    def __init__(self, network: NetworkConfig, config: MobaConfig, rotary: Rotary | None) -> None:
        super().__init__(network, (), rotary, key_value_heads=config.key_value_heads)
        self.block, self.top = config.block, config.top

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice = ALL_HEADS, real: Tensor | None = None
    ) -> MixerOutput:
        """q (B, H, N, D), k and v (B, K, N, ·) of whole contexts to (B, H, N, Dv)."""
        selection = chosen_blocks(choices(q, means(k, self.block), self.block, self.top), self.block)
        return MixerOutput(selected_attention(q, k, v, selection, backend=self.backend))

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> BlockCache:
        """Empty keys and values, and room for the means of whole blocks."""
        kept = self.key_value_heads
        keys, values = (
            torch.empty(batch, kept, length, width // kept, device=device, dtype=dtype) for width in self.widths[1:]
        )
        return BlockCache(self, keys, values)

    def num_pairs(self, positions: int) -> int:
        """As many as there are, whatever is chosen: a query with fewer blocks before its own reads all of them."""
        sizes = [min(self.block, positions - first) for first in range(0, positions, self.block)]
        before = (min(number, self.top - 1) * self.block for number in range(len(sizes)))
        pairs = sum(size * (size + 1) // 2 + size * earlier for size, earlier in zip(sizes, before, strict=True))
        return self.heads * pairs

    def work(self, positions: int, batch: int) -> Work:
        """Of attention, and of the scores of blocks."""
        blocks = sum(position // self.block for position in range(0, positions, self.block)) * self.block
        return super().work(positions, batch) + Work(choosing=2 * blocks * self.widths[0])

    def allowed(self, q: Tensor, k: Tensor, head: int) -> Callable[[Tensor], Tensor]:
        """Which positions a head reads in one context, q and k as ``heads_of`` has them: (P,) int64 to (P, N) bool."""
        q, k = q[:, head, None], k[:, head // self.group, None]
        numbers = choices(q, means(k, self.block), self.block, self.top)[0, 0]  # (N, T)
        position = torch.arange(k.shape[2], device=k.device)

        def of_queries(queries: Tensor) -> Tensor:
            places, blocks = queries[:, None], position // self.block
            chosen = (numbers[queries][:, :, None] == blocks).any(1)
            return chosen | (places // self.block == blocks) & (position <= places)

        return of_queries


class BlockCache(KeptRows):
    """Keys (B, K, N, D) and values (B, K, N, Dv) of one attention, and the means of the keys of whole blocks.

    A mean is taken when the last key of its block is written, from the keys as they lie. So it is the one that a whole
    context has, and a step that is taken again writes the same.
    """

    def __init__(self, owner: BlockAttention, keys: Tensor, values: Tensor) -> None:
        self.owner, self.keys, self.values = owner, keys, values
        batch, heads, length, width = keys.shape
        self.means = keys.new_zeros((batch, heads, length // owner.block, width), dtype=wide_of(keys))

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the first n rows, (B, K, n, ·), and return what they read, (B, H, n, Dv)."""
        rows, block = q.shape[2], self.owner.block
        self.keys[:, :, :rows] = k
        self.values[:, :, :rows] = v
        self.means[:, :, : rows // block] = means(k, block)
        return self.owner.attend(q, k, v).rows

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        """Write one row, (B, K, ·), and return what it reads, (B, H, Dv); all rows before it are written."""
        block, top = self.owner.block, self.owner.top
        self.keys[:, :, position] = k
        self.values[:, :, position] = v
        own = position // block
        if (position + 1) % block == 0:
            last = self.keys[:, :, own * block : position + 1]
            self.means[:, :, own : own + 1] = means(last, block)
        numbers = best(q[:, :, None], self.means[:, :, :own], min(top - 1, own))  # (B, H, 1, T)
        chosen = (numbers.mT * block + torch.arange(block, device=q.device)).flatten(2)  # (B, H, T · block)
        recent = torch.arange(own * block, position + 1, device=q.device).expand(*q.shape[:2], -1)
        return attend_listed(q, self.keys, self.values, torch.cat([chosen, recent], -1))

    def take(self, source: Any, order: Tensor, known: int, into: slice) -> None:
        """As all kept rows are taken, and means of whole blocks."""
        super().take(source, order, known, into)
        whole = known // self.owner.block
        self.means[into, :, :whole] = source.means[order, :, :whole]


def means(k: Tensor, block: int) -> Tensor:
    """The mean key of each whole block of k (B, K, N, D): (B, K, C, D) in fp32 (fp64 for fp64), without gradients."""
    whole = k.shape[2] // block
    return k.detach()[:, :, : whole * block].unflatten(2, (whole, block)).mean(3, dtype=wide_of(k))


def best(q: Tensor, means: Tensor, count: int, later: Tensor | None = None) -> Tensor:
    """The blocks whose mean keys (B, K, C, D) match some queries (B, H, n, D) best: (B, H, n, count) int64.

    ``later``: (n, C) bool, the blocks that are out of the question; a query with too few others gets some of them last.
    """
    # No less than the least number, so that what is taken, or out of the question, comes behind all that is left.
    rows = q.to(means.dtype).reshape(*means.shape[:2], -1, means.shape[3])  # of a group of heads one after another
    with torch.autocast(q.device.type, enabled=False):  # which would round them to 16 bits
        scores = (rows @ means.mT).view(*q.shape[:3], means.shape[2]).clamp_(min=torch.finfo(means.dtype).min)
    if later is not None:
        scores.masked_fill_(later, -torch.inf)
    found = [torch.empty((*scores.shape[:-1], 0), dtype=torch.int64, device=scores.device)]
    for _ in range(count):  # of equal ones, argmax takes the first; a sort that does takes four times as long for three
        found.append(scores.argmax(-1, keepdim=True))
        scores.scatter_(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)


def choices(q: Tensor, means: Tensor, block: int, top: int) -> Tensor:
    """The blocks before its own that each query q (B, H, N, D) reads, by the mean keys (B, K, C, D) of whole blocks.

    Returns:
        (B, H, N, T) int64, T at most top - 1; -1 where a query has fewer blocks before it.
    """
    blocks, rows = means.shape[2], q.shape[2]
    count = min(top - 1, (rows - 1) // block)
    if not count:
        return q.new_empty((*q.shape[:3], 0), dtype=torch.int64)
    number = torch.arange(blocks, device=q.device)
    found = []
    size = max(1, SCORES // (q.shape[0] * q.shape[1] * blocks))
    for first in range(0, rows, size):
        some = q.detach()[:, :, first : first + size]
        own = torch.arange(first, first + some.shape[2], device=q.device)[:, None] // block
        found.append(best(some, means, count, number >= own).where(number[:count] < own, -1))
    return torch.cat(found, 2)
