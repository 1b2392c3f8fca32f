"""Routing attention: heads whose positions read those of their own cluster (Roy et al. 2020, section 4).

Letters: B batch, H heads, L of them local, R routed, N positions of a context, n of what is computed, k clusters, w
keys of a window, D head width of queries and keys, Dv of values.

Queries and keys of routed heads go through a layer norm without weights, which puts them on a sphere of radius √D.
There each belongs to the cluster whose centroid has the greatest product with it, plus a balance term. A query reads
the most recent w earlier keys of its cluster. (The authors fill each cluster with the N/k positions that fit it best.
These depend on later positions, so the model is not causal.) Scores are divided by √D as usual: they lie between -√D
and √D.

In causal models the paper has queries serve as keys (its algorithm 1). A position would then match itself best. So it
reads itself only if it is the first of its cluster (Kitaev et al. 2020, section 2).

If queries are not the keys, both begin with equal weights, and queries go to the cluster whose key centroid has the
greatest product with them. (The paper moves centroids by both. In a causal model queries and keys then ended in
different clusters, where no query has a key.)

Centroids are buffers. After each step, each centroid moves a little towards the mean direction of its keys in that
step: c ← λc + (1 - λ)m, m of length 1. A centroid without keys stays.

The authors' clusters all have one size, by taking N/k positions each. Here a bias for each cluster is added to its
products. It grows while the cluster is smaller than the mean of all and falls while it is larger (Wang et al. 2024, for
experts): b ← b + (1 - λ)√D·(1 - s), s the cluster's size over the mean size, at most 2.

Rotary positions rotate queries and keys after clusters are chosen. So clusters depend on content and not on position.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.kernels import (
    ConfigError,
    Problem,
    attend_listed,
    empty_cache,
    num_pairs,
    selected_attention,
    sparse_attention,
)
from longstride.kernels.patterns import Local, Pattern
from longstride.kernels.selections import Selection, recent_members, selection_mask
from longstride.sparse_model.mixers.attention import ALL_HEADS, NOT_FLEX, Attention, AttentionConfig
from longstride.sparse_model.mixers.cache import KeyValues, RecentMembers, RowCache
from longstride.sparse_model.network import POSITIVE, NetworkConfig
from longstride.sparse_model.part import MixerOutput, Work
from longstride.sparse_model.rotary import PreparedHeads, Rotary, prepared_row
from longstride.sparse_model.strict import StrictModel
from longstride.sparse_model.tiles import wide_of

MOST_PRODUCTS = 1 << 22  # of positions and centroids, at once: in fp32 16 MiB
_MASK = (1 << 32) - 1  # of hashes


class LocalHeads(StrictModel):
    """The first heads, which read the last positions; the others choose by content."""

    heads: Annotated[int, POSITIVE] = Field(description="that read the last positions; the others choose by content")
    window: Annotated[int, POSITIVE] = Field(description="keys, the query included")


class RoutingConfig(AttentionConfig, StrictModel):
    """Attention among positions of one cluster."""

    type: Literal["routing"] = Field(description="attention among positions of one cluster, which content decides")
    clusters: Annotated[int, POSITIVE] = Field(description="of positions; about the root of the context; the paper's k")
    window: Annotated[int, POSITIVE] = Field(description="keys that a query of a routed head reads at most")
    local: LocalHeads | None = Field(
        default=None, description="heads that read the last positions; null: all heads are routed"
    )
    decay: float = Field(default=0.999, gt=0, lt=1, description="of the clusters' moving means; the paper's λ")
    keys: Literal["routed", "random"] = Field(
        default="routed", description="random: clusters by a hash of the position, the paper's control"
    )
    shared_query_key: bool = Field(default=True, description="queries of routed heads are their keys")

    def check(self, network: NetworkConfig, context: int) -> None:
        problems = []
        if self.local is not None and self.local.heads >= network.heads:
            rule = f"must be below heads={network.heads}, as some heads are routed; nearest {network.heads - 1}"
            if network.heads == 1:
                rule = "must be below heads=1, as some heads are routed; remove local"
            problems.append(Problem("local.heads", rule, self.local.heads))
        if network.backend == "flex":
            problems.append(Problem("type", NOT_FLEX, self.type))
        if problems:
            raise ConfigError(*problems)

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return () if self.local is None else (Local(self.local.window),) * self.local.heads

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> ClusteredAttention:
        kind = Routing if self.keys == "routed" else RandomKeys
        return kind(network, self, rotary)


class ClusteredAttention(Attention):
    """Local heads first, and then heads whose queries read the recent keys of their own cluster.

    The projection consists of, in this order: queries and keys of local heads, queries and keys of routed heads (keys
    only if they are not the queries), values of all. Between ``heads_of`` and attention, queries and keys of routed
    heads are normalised but not yet rotated.
    """

    def __init__(self, network: NetworkConfig, config: RoutingConfig, rotary: Rotary | None) -> None:
        patterns = config.head_patterns(network)
        width = network.query_key_width // network.heads
        local, routed = len(patterns) * width, network.query_key_width - len(patterns) * width
        super().__init__(
            network,
            patterns,
            rotary,
            (local, local, routed, 0 if config.shared_query_key else routed, network.width),
        )
        self.config, self.local, self.routed = config, len(patterns), network.heads - len(patterns)
        self.head_width = width

    def initialize(self) -> None:
        """Set the linear layers. Routed queries and keys begin equal, so that similar ones begin in one cluster."""
        super().initialize()
        if not self.config.shared_query_key:
            with torch.no_grad():
                _, _, queries, keys, _ = self.query_key_value.weight.split(self.widths)
                keys.copy_(queries)

    @abstractmethod
    def clusters(self, x: Tensor, first: int = 0, routed: slice = ALL_HEADS) -> Tensor:
        """Return the clusters (B, r, n) int64 of positions from ``first`` on, for x (B, r, n, D) of routed heads."""

    def statistics(self, keys: Tensor, clusters: Tensor, routed: slice) -> tuple[Tensor, ...]:
        """Compute what ``observe`` gets in training, from keys (B, r, N, D) of some routed heads in clusters (B, r, N).

        A key of cluster -1 is padding and is not counted.
        """
        return ()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice = ALL_HEADS, real: Tensor | None = None
    ) -> MixerOutput:
        outs, patterns = [], self.patterns[heads]
        local = len(patterns)
        if local:
            of_local = [x[:, :local] for x in (q, k, v)]
            outs.append(sparse_attention(of_local[0], of_local[1], of_local[2], patterns, backend=self.backend))
        q, k, v = (x[:, local:] for x in (q, k, v))
        start = max(0, (heads.start or 0) - self.local)
        routed = slice(start, start + q.shape[1])  # empty if these are all local
        queries, keys = self.assigned(q, k, routed=routed)
        if q.shape[1]:
            outs.append(self.attend_routed(q, k, v, queries, keys))
        out = torch.cat(outs, 1) if len(outs) > 1 else outs[0]
        counted, clusters = (q, queries) if keys is None else (k, keys)
        if real is not None:
            clusters = clusters.where(real[:, None], -1)
        return MixerOutput(out, statistics=self.statistics(counted, clusters, routed) if self.training else ())

    def assigned(self, q: Tensor, k: Tensor, first: int = 0, routed: slice = ALL_HEADS) -> tuple[Tensor, Tensor | None]:
        """Return the clusters of queries and of keys (B, r, n, D); None for keys that are the queries."""
        queries = self.clusters(q, first, routed)
        return queries, None if self.config.shared_query_key else self.clusters(k, first, routed)

    def attend_routed(self, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor | None) -> Tensor:
        """Attend in routed heads: q, k and v (B, R, N, ·) in clusters (B, R, N) to (B, R, N, Dv)."""
        selection = self.selection(queries, keys)
        turned = self.turned(q)
        return selected_attention(
            turned, turned if keys is None else self.turned(k), v, selection, backend=self.backend
        )

    def selection(self, queries: Tensor, keys: Tensor | None) -> Selection:
        """Return which keys each query reads, from the clusters (B, R, N) of queries and of keys."""
        part = recent_members(queries, keys, window=self.config.window, itself=keys is not None)
        if keys is None:  # the interval of a cluster's first position is empty: make it read itself
            part = part._replace(high=torch.maximum(part.high, part.low + 1))
        return Selection((part,), min(self.config.window, queries.shape[-1]))

    def turned(self, x: Tensor, first: int = 0) -> Tensor:
        """Rotate queries or keys of routed heads (B, R, n, D) by their positions, if the model has rotary positions."""
        if self.rotary is None:
            return x
        table = self.rotary.table(x.device)[first : first + x.shape[2]]
        rows = x.transpose(1, 2).flatten(2)
        rows = PreparedHeads.apply(rows, rows.shape[-1], self.head_width, False, table)
        return rows.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def heads_of(self, rows: Tensor, places: Tensor | slice | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if self.local and not self.as_projected:
            places = slice(rows.shape[1]) if places is None else places
            table = None if self.rotary is None else self.rotary.table(rows.device)[places]
            channels = 2 * self.local * self.head_width
            rows = PreparedHeads.apply(rows, channels, self.head_width, self.normed, table)
        q, k, v = (x.transpose(1, 2) for x in self._parts(rows))
        return q, k, v

    def compared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        local = self.local
        q, k = (torch.cat([x[:, :local], self.turned(x[:, local:])], 1) for x in (q, k))
        return q, k

    def allowed(self, q: Tensor, k: Tensor, head: int) -> Callable[[Tensor], Tensor]:
        if head < self.local:
            return super().allowed(q, k, head)
        queries, keys = self.assigned(q[:, self.local :], k[:, self.local :])
        routed = slice(head - self.local, head - self.local + 1)
        selection = self.selection(queries[:, routed], None if keys is None else keys[:, routed])
        return lambda some: selection_mask(selection, k.shape[2], some)[0, 0]

    def num_pairs(self, positions: int) -> int:
        """Count local heads, and bound routed heads: each query reads as many keys as it may."""
        window = Local(self.config.window)
        pairs = num_pairs(window, positions)
        if self.config.shared_query_key:  # reads its own position only if it is the first of its cluster
            pairs = 1 + num_pairs(window, positions - 1)
        return super().num_pairs(positions) + self.routed * pairs

    def work(self, positions: int, batch: int) -> Work:
        bound = f"at most {self.config.window} keys a query of {self.routed} routed heads"
        return replace(super().work(positions, batch), bound=bound)

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> RoutedCache:
        return RoutedCache(self, batch, length, device, dtype)

    def _parts(self, rows: Tensor) -> Sequence[Tensor]:
        """Split projected rows into q, k and v (B, N, H, ·), those of routed heads normalised."""
        *parts, values = rows.split(self.widths, -1)
        width, shared = self.head_width, self.config.shared_query_key
        local_q, local_k, q, k = (part.unflatten(-1, (part.shape[-1] // width, width)) for part in parts)
        q = F.layer_norm(q, (width,))
        k = q if shared else F.layer_norm(k, (width,))
        if self.local:
            q, k = torch.cat([local_q, q], 2), torch.cat([local_k, k], 2)
        return q, k, values.unflatten(-1, (self.heads, -1))

    def heads_of_row(self, row: Tensor, position: int) -> Sequence[Tensor]:
        q, k, v = (x.squeeze(1) for x in self._parts(row))
        local = self.local
        if local and not self.as_projected:
            turns = None if self.rotary is None else self.rotary.table(row.device)[position]
            both = prepared_row(torch.cat([q[:, :local], k[:, :local]], 1), self.normed, turns)
            q, k = (torch.cat([of, x[:, local:]], 1) for of, x in zip(both.split(local, 1), (q, k), strict=True))
        return q, k, v


class Routing(ClusteredAttention):
    """Clusters by content: the centroid with the greatest product."""

    centroids: Tensor  # (R, k, D)
    balance: Tensor  # (R, k), added to products with them

    def __init__(self, network: NetworkConfig, config: RoutingConfig, rotary: Rotary | None) -> None:
        super().__init__(network, config, rotary)
        self.register_buffer("centroids", torch.empty(self.routed, config.clusters, self.head_width))
        self.register_buffer("balance", torch.zeros(self.routed, config.clusters))

    def initialize(self) -> None:
        """Set the linear layers, and the centroids to random directions."""
        super().initialize()
        nn.init.normal_(self.centroids)
        self.centroids.copy_(F.normalize(self.centroids, dim=-1))

    def clusters(self, x: Tensor, first: int = 0, routed: slice = ALL_HEADS) -> Tensor:
        """Return the centroid with the greatest product plus ``balance``; of equal ones the first."""
        with torch.no_grad():
            centroids, balance = (buffer[routed].to(wide_of(x)) for buffer in (self.centroids, self.balance))
            centroids, balance = centroids.mT, balance[:, None]
            return torch.cat([(some @ centroids + balance).argmax(-1) for some in self._cut(x.detach())], 2)

    def statistics(self, keys: Tensor, clusters: Tensor, routed: slice) -> tuple[Tensor, ...]:
        """Sum each cluster's keys in all contexts, followed by their number: (R, k, D + 1), 0 for other heads.

        With sequence parallelism the sum over processes covers all heads.
        """
        every = torch.arange(self.config.clusters, device=keys.device)
        total = self.centroids.new_zeros(self.routed, len(every), self.head_width + 1)
        with torch.no_grad():
            pieces = self._cut(keys.detach())
            for some, of_some in zip(pieces, clusters.split([piece.shape[2] for piece in pieces], 2), strict=True):
                # A product with zeros and ones: a deterministic sum, on a GPU too.
                member = (of_some[..., None] == every).to(some.dtype)
                total[routed] += (member.mT @ F.pad(some, (0, 1), value=1.0)).sum(0)
        return (total,)

    def observe(self, total: Tensor) -> None:
        """Move the centroids towards the mean directions of their keys in a step, as ``statistics`` gives them."""
        sums, counts = total[..., :-1], total[..., -1:]
        decay = self.config.decay
        moved = decay * self.centroids + (1 - decay) * F.normalize(sums, dim=-1)
        self.centroids.copy_(torch.where(counts > 0, moved, self.centroids))
        size = counts[..., 0] / counts[..., 0].mean(-1, keepdim=True)
        self.balance += ((1 - decay) * self.head_width**0.5 * (1 - size).clamp_min(-1)).to(self.balance.dtype)

    def work(self, positions: int, batch: int) -> Work:
        """Count products with centroids too, which have no backward pass."""
        sides = 1 if self.config.shared_query_key else 2
        return super().work(positions, batch) + Work(choosing=2 * sides * positions * self.centroids.numel())

    def _cut(self, x: Tensor) -> Sequence[Tensor]:
        """Split rows (B, R, n, D) by positions, to bound the memory of their products with all centroids."""
        if torch.compiler.is_exporting():  # batch and length may have any size
            return [x.to(wide_of(x))]
        rows = max(1, MOST_PRODUCTS // (len(x) * self.routed * self.config.clusters))
        return [some.to(wide_of(x)) for some in x.split(rows, 2)]


class RandomKeys(ClusteredAttention):
    """Clusters by a hash of the position and the head: the control of the paper."""

    def clusters(self, x: Tensor, first: int = 0, routed: slice = ALL_HEADS) -> Tensor:
        """Return the same clusters for all contexts, and for all models with as many clusters."""
        batch, _, count, _ = x.shape
        heads = torch.arange(1, self.routed + 1, device=x.device)[routed, None]
        position = torch.arange(first, first + count, device=x.device)
        mixed = (position * 0x9E3779B1 + heads * 0x85EBCA6B) & _MASK
        mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D & _MASK
        mixed = (mixed ^ mixed >> 12) * 0x297A2D39 & _MASK
        return ((mixed ^ mixed >> 15) % self.config.clusters).expand(batch, -1, -1)


class RoutedCache(RowCache):
    """A cache of keys and values, and of the last positions of each cluster. Keys (B, R, N, D) are rotated."""

    members: RecentMembers

    def __init__(
        self, mixer: ClusteredAttention, batch: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make an empty cache of ``length`` positions; local heads have one of their own."""
        self.mixer, self.window = mixer, min(mixer.config.window, length)
        routed, widths = (batch, mixer.routed), (mixer.head_width, mixer.network.width // mixer.heads)
        self.keys, self.values = (torch.empty(*routed, length, w, device=device, dtype=dtype) for w in widths)
        self.local: KeyValues | None = None
        if mixer.local:
            keys, values = (
                empty_cache(batch, mixer.local, length, w, mixer.patterns, device=device, dtype=dtype) for w in widths
            )
            self.local = KeyValues(keys, values, mixer.patterns, mixer.backend)
        # One more than a query reads, as its own position may be among them.
        self.members = RecentMembers(routed, mixer.config.clusters, self.window + 1, length, device)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        local, outs = self.mixer.local, []
        if self.local is not None:
            outs.append(self.local.begin(q[:, :local], k[:, :local], v[:, :local]))
        q, k, v = (x[:, local:] for x in (q, k, v))
        queries, keys = self.mixer.assigned(q, k)
        outs.append(self.mixer.attend_routed(q, k, v, queries, keys))
        self.write(slice(q.shape[2]), self.mixer.turned(k), v)
        self.members.begin(queries if keys is None else keys)
        return torch.cat(outs, 1)

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        mixer, local, outs = self.mixer, self.mixer.local, []
        if self.local is not None:
            outs.append(self.local.step(q[:, :local], k[:, :local], v[:, :local], position))
        q, k, v = (x[:, local:] for x in (q, k, v))
        queries, keys = mixer.assigned(q[:, :, None], k[:, :, None], position)
        if mixer.rotary is not None:
            turns = mixer.rotary.table(q.device)[position]
            q = prepared_row(q.contiguous(), False, turns)
            k = q if keys is None else prepared_row(k.contiguous(), False, turns)
        self.write(position, k, v)
        if keys is not None:
            self.members.add(keys, position)
        members, number, count = self.members.before(queries, position if keys is None else position + 1)
        reads = members.where((number >= 0) & (number >= count - self.window), -1)
        if keys is None:  # the query is its own key, which it reads only if there is no other
            reads[..., 0] = reads[..., 0].where(count[..., 0] > 0, position)
            self.members.add(queries, position)
        outs.append(attend_listed(q, self.keys, self.values, reads))
        return torch.cat(outs, 1)

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        super().take(source, order, length, into)
        if self.local is not None:
            self.local.take(source.local, order, length, into)
