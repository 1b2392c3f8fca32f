"""Caches of an attention for generation: keys and values, and the members of clusters.

Letters: B batch, H heads of queries, K heads of keys and values, N positions of the cache, n new positions, D width of
q and k, Dv width of v.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels import CachedAttention, sparse_attention
from longstride.kernels.patterns import Pattern
from longstride.sparse_model.mixers.convolution import RecentRows

FEWEST_AT_ONCE = 64  # queries; fewer take longer in one call than one after another


class Rows:
    """Keys (B, K, N, D) and values (B, K, N, Dv) by position; rows that are not written yet are undefined."""

    members: RecentMembers | None = None  # of a mixer that lists the positions of each cluster
    recent: RecentRows | None = None  # of a convolution before the mixer

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def write(self, place: int | slice, k: Tensor, v: Tensor) -> None:
        """Set one row, (B, K, ·), or the rows of a slice, (B, K, n, ·)."""
        self.keys[:, :, place] = k
        self.values[:, :, place] = v

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        """Replace contexts ``into`` by copies of contexts ``order`` of ``source``, in ``length`` rows."""
        for rows, of_source in ((self.keys, source.keys), (self.values, source.values)):
            rows[into, :, :length] = of_source[order, :, :length]
        if self.members is not None:
            self.members.take(source.members, order, into)
        if self.recent is not None:
            self.recent.take(source.recent, order, length, into)

    def truncate(self, length: int) -> None:
        """Forget all rows but the first ``length``: steps overwrite later ones before any is read."""
        if self.members is not None:
            self.members.truncate(length)
        if self.recent is not None:
            self.recent.truncate(length)


class RowCache(Rows, ABC):
    """Earlier positions of one attention, and how later ones read them."""

    @abstractmethod
    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the first n rows, (B, K, n, ·), and return their outputs, (B, H, n, Dv)."""

    @abstractmethod
    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        """Write one row, (B, K, ·), and return its output, (B, H, Dv); all rows before it are written."""

    def extend(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """Write n rows from position ``first`` on, (B, K, n, ·), and return their outputs, (B, H, n, Dv), by steps."""
        steps = [self.step(q[:, :, n], k[:, :, n], v[:, :, n], first + n) for n in range(q.shape[2])]
        return torch.stack(steps, 2)


class KeyValues(RowCache):
    """Keys (B, K, N, D) and values (B, K, N, Dv) of attention over patterns."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        patterns: Sequence[Pattern],
        backend: str = "auto",
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            keys, values: the memory to write to.
            patterns: one for each head of queries.
            backend: of attention. For "flex", which has no single queries, those run on "auto".
            scale: factor of the scores; None: 1/sqrt(D).
            sinks: (H,), see ``with_sinks``; None: none.

        Raises:
            ConfigError: the backend cannot run here.
        """
        super().__init__(keys, values)
        self.patterns, self.backend, self.scale, self.sinks = patterns, backend, scale, sinks
        self._key_rows, self._value_rows = (x.permute(2, 0, 1, 3) for x in (keys, values))
        single = "auto" if backend == "flex" else backend
        self._attend_one = CachedAttention(keys, values, patterns, heads=len(patterns), scale=scale, backend=single)

    def __reduce__(self) -> tuple[type[KeyValues], tuple[Any, ...], dict[str, Any]]:
        """Give a copy its own memory and views of it."""
        arguments = self.keys, self.values, self.patterns, self.backend, self.scale, self.sinks
        return KeyValues, arguments, {"recent": self.recent}

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write(slice(q.shape[2]), k, v)
        self._attend_one.forget()
        return self._attend(q, k, v)

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        self._key_rows[position] = k
        self._value_rows[position] = v
        if self.sinks is None:
            return self._attend_one(q, position)
        return with_sinks(*self._attend_one.with_lse(q, position), self.sinks)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """Write n rows from position ``first`` on, and return their outputs: many at once, few by steps."""
        if q.shape[2] < FEWEST_AT_ONCE:
            return super().extend(q, k, v, first)
        last = first + q.shape[2]
        self.write(slice(first, last), k, v)
        self._attend_one.forget()
        keys, values = self.keys[:, :, :last], self.values[:, :, :last]
        return self._attend(q, keys, values, first)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, first: int | None = None) -> Tensor:
        """Attend from queries (B, H, n, D), of which the first is at position ``first``."""
        options: Any = {"scale": self.scale, "backend": self.backend, "first_query": first}
        if self.sinks is None:
            return sparse_attention(q, keys, values, self.patterns, **options)
        out, lse = sparse_attention(q, keys, values, self.patterns, **options, return_lse=True)
        return with_sinks(out, lse, self.sinks)

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        super().take(source, order, length, into)
        self._attend_one.forget()


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the output of a softmax with one more logit for each head, its sink, which has no value.

    Args:
        out: (B, H, …, Dv), without sinks.
        lse: (B, H, …), the logsumexp of the scores.
        sinks: (H,).
    """
    by_head = sinks.to(lse.dtype).view(-1, *(1 for _ in lse.shape[2:]))
    return (out * (lse - by_head).sigmoid()[..., None]).to(out.dtype)


class RecentMembers:
    """The last ``size`` positions of each cluster, which a later query of the cluster reads.

    Member m of a cluster is stored at m modulo ``size``. Adding a position twice changes nothing, so an interrupted
    step can be repeated. The cluster of every position is stored too, for ``truncate``.
    """

    def __init__(self, shape: tuple[int, ...], clusters: int, size: int, length: int, device: torch.device) -> None:
        """Make empty lists for each index of the leading axes ``shape``, for positions below ``length``."""
        self.size = size
        self.clusters = torch.zeros(*shape, length, dtype=torch.int64, device=device)  # of each position
        self.counts = torch.zeros(*shape, clusters, dtype=torch.int64, device=device)  # members so far
        self.positions = torch.zeros(*shape, clusters * size, dtype=torch.int64, device=device)

    def begin(self, clusters: Tensor) -> None:
        """Replace all lists by those of the first n positions, which have these clusters (…, n)."""
        self.clusters[..., : clusters.shape[-1]] = clusters
        self.counts.zero_().scatter_add_(-1, clusters, torch.ones_like(clusters))
        by_cluster, position = clusters.sort(dim=-1, stable=True)
        first = (self.counts.cumsum(-1) - self.counts).gather(-1, by_cluster)
        member = torch.arange(clusters.shape[-1], device=clusters.device) - first
        stays = member >= self.counts.gather(-1, by_cluster) - self.size
        # One more place at the end collects those that do not stay.
        place = torch.where(stays, by_cluster * self.size + member % self.size, self.positions.shape[-1])
        self.positions.copy_(F.pad(self.positions, (0, 1)).scatter_(-1, place, position)[..., :-1])

    def add(self, cluster: Tensor, position: int) -> None:
        """Add a position, greater than all before, to its cluster (…, 1)."""
        count = self._count_before(cluster, position)
        self.positions.scatter_(-1, cluster * self.size + count % self.size, position)
        self.counts.scatter_(-1, cluster, count + 1)
        self.clusters[..., position : position + 1] = cluster

    def before(self, cluster: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the members of a cluster (…, 1) before a position, which is at least the last one.

        Returns:
            Positions (…, size) in any order; the number of each as a member, below 0 for none; and how many members
            there are, (…, 1).
        """
        count = self._count_before(cluster, position)
        slots = torch.arange(self.size, device=cluster.device)
        number = count - 1 - (count - 1 - slots) % self.size
        return self.positions.gather(-1, cluster * self.size + slots), number, count

    def take(self, source: RecentMembers, order: Tensor, into: slice) -> None:
        """Replace lists ``into`` of the first axis by copies of lists ``order`` of ``source``."""
        self.counts[into] = source.counts[order]
        self.positions[into] = source.positions[order]
        self.clusters[into] = source.clusters[order]

    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` positions, which are sorted again."""
        self.begin(self.clusters[..., :length])

    def _count_before(self, cluster: Tensor, position: int) -> Tensor:
        """Count the members of a cluster without this position, which can only be the last one."""
        count = self.counts.gather(-1, cluster)
        last = self.positions.gather(-1, cluster * self.size + (count - 1) % self.size)
        return count - ((count > 0) & (last == position)).long()
