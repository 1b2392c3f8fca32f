"""Keys and values kept for later positions, and attention that adds to them.

Letters: B batch, H heads of queries, K heads of keys and values, N positions of the cache, n new positions, D width of
q and k, Dv width of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from longstride.kernels import CachedAttention, sparse_attention
from longstride.kernels.patterns import Pattern

FEWEST_AT_ONCE = 64  # queries; fewer take longer in one call than one after another


class Cache(Protocol):
    """What an attention keeps of earlier positions, and how more of them read it."""

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the first n rows, (B, K, n, ·), and return what they read, (B, H, n, Dv)."""
        ...

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        """Write one row, (B, K, ·), and return what it reads, (B, H, Dv); all rows before it are written."""
        ...

    def extend(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """Write n rows from position ``first`` on, (B, K, n, ·), and return what they read, (B, H, n, Dv): by steps."""
        steps = [self.step(q[:, :, n], k[:, :, n], v[:, :, n], first + n) for n in range(q.shape[2])]
        return torch.stack(steps, 2)

    def take(self, source: Any, order: Tensor, known: int, into: slice) -> None:
        """Contexts ``into`` become copies of contexts ``order`` of such a cache or this one, in ``known`` rows."""
        ...

    def truncate(self, length: int) -> None:
        """Forget all rows but the first ``length``, which is no more than there are."""
        ...


class KeptRows(Cache):
    """Keys (B, K, N, D) and values (B, K, N, Dv), each row at its position, and nothing else that earlier rows left."""

    keys: Tensor
    values: Tensor

    def take(self, source: Any, order: Tensor, known: int, into: slice) -> None:
        """Contexts ``into`` become copies of contexts ``order`` of such a cache or this one, in ``known`` rows."""
        for rows, of_source in ((self.keys, source.keys), (self.values, source.values)):
            rows[into, :, :known] = of_source[order, :, :known]

    def truncate(self, length: int) -> None:
        """Nothing: steps write later rows again before any is read."""


class KeyValues(KeptRows):
    """Keys (B, K, N, D) and values (B, K, N, Dv) of one attention; rows that are not written yet hold anything."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        patterns: Sequence[Pattern],
        backend: str = "auto",
        scale: float | None = None,
    ) -> None:
        """An empty cache.

        Args:
            keys, values: the memory to write to.
            patterns: one a head of queries.
            backend: of attention. For "flex", which has no single queries, those run on "auto".
            scale: factor of the scores; 1/sqrt(D) where None.

        Raises:
            ConfigError: the backend cannot run here.
        """
        self.keys, self.values, self.patterns, self.backend, self.scale = keys, values, patterns, backend, scale
        self._key_rows, self._value_rows = (x.permute(2, 0, 1, 3) for x in (keys, values))
        single = "auto" if backend == "flex" else backend
        self._attend_one = CachedAttention(keys, values, patterns, heads=len(patterns), scale=scale, backend=single)

    def __reduce__(self) -> tuple[type[KeyValues], tuple[Any, ...]]:
        """A copy has its own memory, and makes its own views of it."""
        return KeyValues, (self.keys, self.values, self.patterns, self.backend, self.scale)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the first n rows and return their ``sparse_attention``.

        Args:
            q: (B, H, n, D).
            k, v: (B, K, n, D) and (B, K, n, Dv).

        Returns:
            (B, H, n, Dv).
        """
        rows = q.shape[2]
        self.keys[:, :, :rows] = k
        self.values[:, :, :rows] = v
        self._attend_one.forget()
        return sparse_attention(q, k, v, self.patterns, scale=self.scale, backend=self.backend)

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        """Write one row and return its row of ``sparse_attention``, from the keys that its pattern allows.

        Args:
            q: (B, H, D).
            k, v: (B, K, D) and (B, K, Dv).
            position: of the row; all rows before it are written.

        Returns:
            (B, H, Dv).
        """
        self._key_rows[position] = k
        self._value_rows[position] = v
        return self._attend_one(q, position)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """Write n rows from position ``first`` on, and return what they read: many at once, few by steps."""
        if q.shape[2] < FEWEST_AT_ONCE:
            return super().extend(q, k, v, first)
        last = first + q.shape[2]
        self.keys[:, :, first:last], self.values[:, :, first:last] = k, v
        self._attend_one.forget()
        keys, values = self.keys[:, :, :last], self.values[:, :, :last]
        return sparse_attention(
            q, keys, values, self.patterns, scale=self.scale, backend=self.backend, first_query=first
        )

    def take(self, source: Any, order: Tensor, known: int, into: slice) -> None:
        """As all kept rows are taken."""
        super().take(source, order, known, into)
        self._attend_one.forget()
