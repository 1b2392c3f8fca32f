"""Reformer's attention: who reads whom is found by locality-sensitive hashing (Kitaev et al. 2020, section 2).

Letters: B batch, H heads, R rounds, N positions, D channels of queries and keys, c members of a chunk.

- Queries and keys are one projection; keys are the queries at unit length.
- A round has random rotations, drawn once. With x the query, its bucket is the place of the largest of [xR; -xR].
- In each round a query reads earlier keys of its bucket: its chunk of c of them and the chunk before. It reads its own
  key only where it has nothing else in any round.
- A key that is found in several rounds counts once. So the softmax over all that were found is what the paper gets from
  its rounds, weighted by exp(logsumexp) and corrected for repeated keys.

The paper cuts chunks from all positions sorted by bucket: positions to come then decide where a chunk begins, and who
is read. Here chunks count the members of a bucket so far, and nothing of the future is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels import ConfigError, Problem, attend_listed, selected_attention
from longstride.kernels.patterns import Dense, Pattern
from longstride.kernels.selections import Selection, hash_rounds, selection_mask
from longstride.sparse_model.mixers.attention import ALL_HEADS, Attention, OfQueriesAndKeys
from longstride.sparse_model.mixers.cache import KeptRows
from longstride.sparse_model.mixers.members import RecentMembers
from longstride.sparse_model.network import POSITIVE, NetworkConfig
from longstride.sparse_model.part import MixerOutput, Work
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel

SHORTEST = 1e-6  # length of a query that still has a direction; fp16 knows it
MOST_ROUNDS = 128


class LshConfig(OfQueriesAndKeys, StrictModel):
    """Attention by hashing as the configuration asks for it."""

    type: Literal["lsh"] = Field(description="attention among positions that fall into one bucket of a hash")
    buckets: Annotated[int, POSITIVE] = Field(description="of a round: an even number, or one")
    rounds: int = Field(default=1, gt=0, le=MOST_ROUNDS, description="hashes, each with buckets of its own")
    chunk: Annotated[int, POSITIVE] = Field(
        description="members of a bucket: a query reads its own chunk and the one before"
    )

    def check(self, network: NetworkConfig, context: int) -> None:
        """Raise ConfigError where its numbers or the network's options do not go together."""
        if problems := list(self._problems(network)):
            raise ConfigError(*problems)

    def _problems(self, network: NetworkConfig) -> Iterator[Problem]:
        if self.buckets % 2 and self.buckets != 1:
            rule = f"each rotation gives two; nearest {self.buckets - 1} or {self.buckets + 1}"
            yield Problem("buckets", rule, self.buckets)
        if self.buckets == 1 and self.rounds > 1:
            yield Problem("rounds", "are all alike where there is one bucket; nearest 1", self.rounds)
        if network.query_key_norm:
            rule = "has keys of unit length, and a softmax hardly tells queries of one length apart; set query_key_norm"
            yield Problem("type", f"{rule} to false", self.type)
        if network.backend == "flex":
            yield Problem("type", 'needs another backend than "flex"; nearest "auto"', self.type)

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        """Which positions each head may read: all before it."""
        return (Dense(),) * network.heads

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> HashedAttention:
        """The module."""
        return HashedAttention(network, self, rotary)


class HashedAttention(Attention):
    """Attention among the positions of a bucket; one projection gives queries and keys."""

    rotations: Tensor | None  # (H, R, D, buckets / 2)

    def __init__(self, network: NetworkConfig, config: LshConfig, rotary: Rotary | None) -> None:
        widths = network.query_key_width, network.width
        super().__init__(network, config.head_patterns(network), rotary, widths)
        self.config = config
        shape = (network.heads, config.rounds, network.query_key_width // network.heads, config.buckets // 2)
        self.register_buffer("rotations", torch.empty(shape) if config.buckets > 1 else None)

    def initialize(self) -> None:
        """Set its linear layers, and draw the rotations."""
        super().initialize()
        if self.rotations is not None:
            torch.nn.init.normal_(self.rotations)

    def heads_of(self, rows: Tensor, places: Tensor | slice | None = None) -> Sequence[Tensor]:
        """q, k and v (B, H, N, D), from what ``query_key_value`` gives, (B, N, channels)."""
        q, v = super().heads_of(rows, places)
        return q, _unit(q), v

    def _heads_of_one(self, row: Tensor, position: int) -> Sequence[Tensor]:
        """Likewise (B, H, D), of one position."""
        q, v = super()._heads_of_one(row, position)
        return q, _unit(q), v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice = ALL_HEADS, real: Tensor | None = None
    ) -> MixerOutput:
        """q, k and v (B, H, N, D) of whole contexts to (B, H, N, D)."""
        return MixerOutput(selected_attention(q, k, v, self.selection(q, heads), backend=self.backend))

    def selection(self, q: Tensor, heads: slice = ALL_HEADS) -> Selection:
        """Who reads whom, for queries (B, H, N, D) of some heads."""
        rotations = None if self.rotations is None else self.rotations[heads]
        return hash_rounds(buckets_of(q, rotations), self.config.chunk)

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> BucketCache:
        """Empty keys and values with room for ``length`` positions, and the last members of each bucket."""
        keys, values = self.empty_rows(batch, length, device, dtype)
        return BucketCache(keys, values, self.rotations, self.config, self.backend)

    def num_pairs(self, positions: int) -> int:
        """Pairs in all heads together, at most: as where all are in one bucket, and no pair in two rounds."""
        chunk, rest = self.config.chunk, max(0, positions - 2 * self.config.chunk)
        begun, whole = min(positions, 2 * chunk), rest // chunk
        # Of a bucket's members: all before it in the first two chunks, then the chunk before and a part of its own.
        pairs = begun * (begun - 1) // 2 + rest * chunk + whole * (chunk * (chunk - 1) // 2)
        pairs += (rest % chunk) * (rest % chunk - 1) // 2
        # The very first position reads itself.
        return self.heads * (min(self.config.rounds * pairs, positions * (positions - 1) // 2) + 1)

    def allowed(self, q: Tensor, k: Tensor, head: int) -> Callable[[Tensor], Tensor]:
        """Which positions a head reads in one context, q and k (1, H, N, D): queries (P,) int64 to (P, N) bool."""
        rotations = None if self.rotations is None else self.rotations[head : head + 1]
        selection = hash_rounds(buckets_of(q[:, head : head + 1], rotations), self.config.chunk)
        return lambda queries: selection_mask(selection, q.shape[2], queries)[0, 0]

    def work(self, positions: int, batch: int) -> Work:
        """Of the most pairs that its heads can read, its projections and convolution, and the rotations."""
        choosing = 0 if self.rotations is None else 2 * positions * self.rotations.numel()
        bound = f"at most as of {self.config.rounds} rounds in each of which all positions are in one bucket"
        return super().work(positions, batch) + Work(choosing=choosing, bound=bound)


def _unit(q: Tensor) -> Tensor:
    return F.normalize(q, dim=-1, eps=SHORTEST)


@torch.no_grad()
def buckets_of(q: Tensor, rotations: Tensor | None) -> Tensor:
    """The buckets of queries (B, H, N, D) by rotations (H, R, D, buckets / 2): (B, H, R, N) int64.

    All are in bucket 0 of one round without rotations.
    """
    if rotations is None:
        return torch.zeros(q.shape[0], q.shape[1], 1, q.shape[2], dtype=torch.int64, device=q.device)
    wide, half, rounds = q.to(rotations.dtype), rotations.shape[-1], []
    for each in rotations.unbind(1):  # one at a time: a round holds a number for each position and two buckets
        rotated = wide @ each
        (high, place), (low, other) = rotated.max(-1), rotated.min(-1)
        rounds.append(torch.where(high >= -low, place, other + half))
    return torch.stack(rounds, 2)


class BucketCache(KeptRows):
    """Keys (B, H, N, D) and values (B, H, N, Dv) of all positions, and the last 2c members of each bucket.

    A step reads those members alone. It can be taken again, and then gives and leaves what it did before.
    """

    def __init__(self, keys: Tensor, values: Tensor, rotations: Tensor | None, config: LshConfig, backend: str) -> None:
        self.keys, self.values, self.rotations, self.backend = keys, values, rotations, backend
        self.chunk = config.chunk
        shape, length = (*keys.shape[:2], config.rounds), keys.shape[2]
        self.members = RecentMembers(shape, config.buckets, 2 * config.chunk, length, keys.device)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the first n rows, (B, H, n, ·), and return what they read, (B, H, n, Dv)."""
        rows = q.shape[2]
        self.keys[:, :, :rows] = k
        self.values[:, :, :rows] = v
        buckets = buckets_of(q, self.rotations)
        self.members.begin(buckets)
        return selected_attention(q, k, v, hash_rounds(buckets, self.chunk), backend=self.backend)

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        """Write one row, (B, H, ·), and return what it reads, (B, H, Dv); all rows before it are written."""
        self.keys[:, :, position] = k
        self.values[:, :, position] = v
        bucket = buckets_of(q[:, :, None], self.rotations)  # (B, H, R, 1)
        kept, number, count = self.members.before(bucket, position)  # (B, H, R, 2c)
        read = (number >= 0) & (number >= (count // self.chunk - 1) * self.chunk)
        found = torch.where(read, kept, -1).flatten(2).sort(-1).values
        found[..., 1:].masked_fill_(found[..., 1:] == found[..., :-1], -1)  # in several rounds
        found[..., 0].masked_fill_((found < 0).all(-1), position)
        self.members.add(bucket, position)
        return attend_listed(q, self.keys, self.values, found)

    def take(self, source: Any, order: Tensor, known: int, into: slice) -> None:
        """As all kept rows are taken, and members."""
        super().take(source, order, known, into)
        self.members.take(source.members, order, into)

    def truncate(self, length: int) -> None:
        """Forget all rows but the first ``length``, whose members are listed anew."""
        self.members.truncate(length)
