"""Reformer's attention: locality-sensitive hashing decides who reads whom (Kitaev et al. 2020, section 2).

Letters: B batch, H heads, R rounds, N positions, D channels of queries and keys, c members of a chunk.

- Queries and keys are one projection; keys are the queries at unit length.
- A round has random rotations, drawn once. With x the query, its bucket is the index of the largest of [xR; -xR].
- In each round a query reads earlier keys of its bucket: those of its chunk of c members and of the chunk before. It
  reads its own key only if it has nothing else in any round.
- A key that is selected in several rounds counts once. So the softmax over all selected keys equals the paper's
  combination of rounds, weighted by exp(logsumexp) and corrected for repeated keys.

The paper cuts chunks from all positions sorted by bucket, so that later positions decide where a chunk begins and who
is read. Here chunks count the members of a bucket so far, which is causal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels import ConfigError, Problem, attend_listed, selected_attention
from longstride.kernels.patterns import Dense, Pattern
from longstride.kernels.selections import Selection, hash_rounds, selection_mask
from longstride.sparse_model.mixers.attention import ALL_HEADS, NOT_FLEX, Attention, AttentionConfig
from longstride.sparse_model.mixers.cache import RecentMembers, RowCache
from longstride.sparse_model.network import POSITIVE, NetworkConfig
from longstride.sparse_model.part import MixerOutput, Work
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel

SHORTEST = 1e-6  # length of a query that still has a direction; fp16 knows it
MOST_ROUNDS = 128


class LshConfig(AttentionConfig, StrictModel):
    """Attention by locality-sensitive hashing."""

    type: Literal["lsh"] = Field(description="attention among positions that fall into one bucket of a hash")
    buckets: Annotated[int, POSITIVE] = Field(description="of a round: an even number, or one")
    rounds: int = Field(default=1, gt=0, le=MOST_ROUNDS, description="hashes, each with buckets of its own")
    chunk: Annotated[int, POSITIVE] = Field(
        description="members of a bucket: a query reads its own chunk and the one before"
    )

    def check(self, network: NetworkConfig, context: int) -> None:
        problems = []
        if self.buckets % 2 and self.buckets != 1:
            rule = f"each rotation gives two; nearest {self.buckets - 1} or {self.buckets + 1}"
            problems.append(Problem("buckets", rule, self.buckets))
        if self.buckets == 1 and self.rounds > 1:
            problems.append(Problem("rounds", "are all equal with a single bucket; nearest 1", self.rounds))
        if network.query_key_norm:
            rule = "has keys of unit length, so that normalised queries give a nearly even softmax; set query_key_norm"
            problems.append(Problem("type", f"{rule} to false", self.type))
        if network.backend == "flex":
            problems.append(Problem("type", NOT_FLEX, self.type))
        if problems:
            raise ConfigError(*problems)

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return (Dense(),) * network.heads

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> HashedAttention:
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
        super().initialize()
        if self.rotations is not None:
            torch.nn.init.normal_(self.rotations)

    def heads_of(self, rows: Tensor, places: Tensor | slice | None = None) -> Sequence[Tensor]:
        q, v = super().heads_of(rows, places)
        return q, _unit(q), v

    def heads_of_row(self, row: Tensor, position: int) -> Sequence[Tensor]:
        q, v = super().heads_of_row(row, position)
        return q, _unit(q), v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice = ALL_HEADS, real: Tensor | None = None
    ) -> MixerOutput:
        return MixerOutput(selected_attention(q, k, v, self.selection(q, heads), backend=self.backend))

    def selection(self, q: Tensor, heads: slice = ALL_HEADS) -> Selection:
        """Return the selection of queries (B, H, N, D) of some heads."""
        rotations = None if self.rotations is None else self.rotations[heads]
        return hash_rounds(buckets_of(q, rotations), self.config.chunk)

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> BucketCache:
        keys, values = self.empty_rows(batch, length, device, dtype)
        return BucketCache(keys, values, self.rotations, self.config, self.backend)

    def num_pairs(self, positions: int) -> int:
        """Bound the pairs in all heads: all positions in one bucket, and no pair in two rounds."""
        chunk = self.config.chunk
        early, later = min(positions, 2 * chunk), max(0, positions - 2 * chunk)
        # Members of the first two chunks read all before them, later ones the chunk before and a part of their own.
        pairs = early * (early - 1) // 2 + later * chunk + later // chunk * (chunk * (chunk - 1) // 2)
        pairs += (later % chunk) * (later % chunk - 1) // 2
        # The first position reads itself.
        return self.heads * (min(self.config.rounds * pairs, positions * (positions - 1) // 2) + 1)

    def allowed(self, q: Tensor, k: Tensor, head: int) -> Callable[[Tensor], Tensor]:
        rotations = None if self.rotations is None else self.rotations[head : head + 1]
        selection = hash_rounds(buckets_of(q[:, head : head + 1], rotations), self.config.chunk)
        return lambda queries: selection_mask(selection, q.shape[2], queries)[0, 0]

    def work(self, positions: int, batch: int) -> Work:
        choosing = 0 if self.rotations is None else 2 * positions * self.rotations.numel()
        bound = f"at most as of {self.config.rounds} rounds in each of which all positions are in one bucket"
        return super().work(positions, batch) + Work(choosing=choosing, bound=bound)


def _unit(q: Tensor) -> Tensor:
    return F.normalize(q, dim=-1, eps=SHORTEST)


@torch.no_grad()
def buckets_of(q: Tensor, rotations: Tensor | None) -> Tensor:
    """Hash queries (B, H, N, D) by rotations (H, R, D, buckets / 2): their buckets (B, H, R, N) int64.

    Without rotations there is one round, and all queries are in bucket 0.
    """
    if rotations is None:
        return torch.zeros(q.shape[0], q.shape[1], 1, q.shape[2], dtype=torch.int64, device=q.device)
    wide, half, rounds = q.to(rotations.dtype), rotations.shape[-1], []
    for rotation in rotations.unbind(1):  # one round at a time, to save memory
        rotated = wide @ rotation
        (high, bucket), (low, opposite) = rotated.max(-1), rotated.min(-1)
        rounds.append(torch.where(high >= -low, bucket, opposite + half))
    return torch.stack(rounds, 2)


class BucketCache(RowCache):
    """A cache of keys and values, and of the last 2c members of each bucket, which a step reads.

    A step can be repeated, with the same result.
    """

    members: RecentMembers

    def __init__(self, keys: Tensor, values: Tensor, rotations: Tensor | None, config: LshConfig, backend: str) -> None:
        self.keys, self.values, self.rotations, self.backend = keys, values, rotations, backend
        self.chunk = config.chunk
        shape, length = (*keys.shape[:2], config.rounds), keys.shape[2]
        self.members = RecentMembers(shape, config.buckets, 2 * config.chunk, length, keys.device)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write(slice(q.shape[2]), k, v)
        buckets = buckets_of(q, self.rotations)
        self.members.begin(buckets)
        return selected_attention(q, k, v, hash_rounds(buckets, self.chunk), backend=self.backend)

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        self.write(position, k, v)
        bucket = buckets_of(q[:, :, None], self.rotations)  # (B, H, R, 1)
        members, number, count = self.members.before(bucket, position)  # (B, H, R, 2c)
        read = (number >= 0) & (number >= (count // self.chunk - 1) * self.chunk)
        reads = torch.where(read, members, -1).flatten(2).sort(-1).values
        reads[..., 1:].masked_fill_(reads[..., 1:] == reads[..., :-1], -1)  # in several rounds
        reads[..., 0].masked_fill_((reads < 0).all(-1), position)
        self.members.add(bucket, position)
        return attend_listed(q, self.keys, self.values, reads)
