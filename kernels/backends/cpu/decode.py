"""Attention of one query on the CPU: a softmax over the rows of the cache that it reads.

Letters: B batch, H heads of one pattern, K heads of the cache that they read, N positions, M keys that are read, D and
E widths of keys and values.
Rows at regular steps are read in place, others from copies that are made once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longstride.kernels.backends import accumulator_dtype
from longstride.kernels.patterns import Pattern
from longstride.kernels.plan import Read, RegularPositions, positions_of_reads, reads

MOST_GATHERED = 4_096  # positions; copying more takes longer than the operations that it saves
MOST_SINGLE_THREADED = 1 << 16  # elements of keys; up to here, one thread is faster than waking the others


class PreparedCache:
    """Attention of single queries to one cache.

    A position that is not after the last one means that rows from it on are new.
    """

    def __init__(self, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, once: bool) -> None:
        self.context, self.value_width, self.scale = k.shape[2], v.shape[3], scale
        self.wide = accumulator_dtype(k.dtype)
        self.unread = torch.empty(1, dtype=self.wide, device=k.device)
        self.groups = [
            (pattern, heads, CachedRows(k[:, shared], once), CachedRows(v[:, shared], once))
            for pattern, heads, shared in _groups(patterns, k.shape[1])
        ]

    def __call__(self, q: Tensor, position: int, return_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Return output (B, H, E) in q's dtype and, with ``return_lse``, logsumexp (B, H) in fp32 (fp64 for fp64)."""
        if torch.is_autocast_enabled("cpu"):  # it would compute products in 16 bits
            with torch.autocast("cpu", enabled=False):
                return self(q, position, return_lse)
        for _, _, *both in self.groups:
            for rows in both:
                if rows.copies:
                    rows.forget_from(position)
        if len(self.groups) == 1:
            pattern, _, k, v = self.groups[0]
            return self._attend(q, k, v, pattern, position, return_lse)
        out = q.new_empty(*q.shape[:2], self.value_width)
        lse = q.new_empty(q.shape[:2], dtype=self.wide) if return_lse else None
        for pattern, heads, k, v in self.groups:
            group_out, group_lse = self._attend(q[:, heads], k, v, pattern, position, return_lse)
            out[:, heads] = group_out
            if lse is not None and group_lse is not None:
                lse[:, heads] = group_lse
        return out, lse

    def _attend(
        self, q: Tensor, k: CachedRows, v: CachedRows, pattern: Pattern, position: int, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend for heads of one pattern."""
        batch, heads, width = q.shape
        keys = query_reads(pattern, position, self.context)
        if not keys.reads:
            none = q.new_full((batch, heads), -math.inf, dtype=self.wide) if return_lse else None
            return q.new_zeros(batch, heads, self.value_width), none
        threads = torch.get_num_threads()
        if threads == 1 or batch * heads * width * keys.count > MOST_SINGLE_THREADED:
            return self._softmax(q, k, v, keys, return_lse)
        try:
            torch.set_num_threads(1)
            return self._softmax(q, k, v, keys, return_lse)
        finally:
            torch.set_num_threads(threads)

    def _softmax(
        self, q: Tensor, k: CachedRows, v: CachedRows, keys: QueryReads, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one softmax over all keys that are read."""
        # Starting an operation is expensive, hence three axes, and sums within the products. torch would give K·q to
        # one thread, hence q·K.
        batch, heads, width = q.shape
        query = in_dtype(q.reshape(batch * k.heads, heads // k.heads, width), self.wide)
        products = [
            torch.baddbmm(self.unread, query, rows.permute(1, 2, 0), beta=0, alpha=self.scale) for rows in k.read(keys)
        ]
        scores = torch.cat(products, 2) if len(products) > 1 else products[0]  # (B·K, H / K, M)
        weights = scores.softmax(2)
        values = v.read(keys)
        if len(values) == 1:
            out = torch.bmm(weights, values[0].transpose(0, 1))  # (B·K, H / K, E)
        else:
            parts = weights.split([len(rows) for rows in values], 2)
            out = torch.bmm(parts[0], values[0].transpose(0, 1))
            for part, rows in zip(parts[1:], values[1:], strict=True):
                out.baddbmm_(part, rows.transpose(0, 1))
        lse = scores.logsumexp(2).view(batch, heads) if return_lse else None
        return in_dtype(out.view(batch, heads, self.value_width), q.dtype), lse


@lru_cache(maxsize=4096)
def _groups(patterns: tuple[Pattern, ...], key_heads: int) -> tuple[tuple[Pattern, slice, slice], ...]:
    """Return each distinct pattern with its heads, and the heads of the cache that they read.

    These are one slice each if heads are at regular steps and equally many share a head of the cache. Otherwise there
    is one entry per head.
    """
    groups: list[tuple[Pattern, slice, slice]] = []
    for pattern in dict.fromkeys(patterns):
        heads = [head for head in range(len(patterns)) if patterns[head] == pattern]
        read = [head * key_heads // len(patterns) for head in heads]
        query_slice, key_slice = _as_slice(heads), _as_slice(list(dict.fromkeys(read)))
        if query_slice is not None and key_slice is not None and len(set(map(read.count, read))) == 1:
            groups.append((pattern, query_slice, key_slice))
        else:
            groups += [(pattern, slice(x, x + 1), slice(y, y + 1)) for x, y in zip(heads, read, strict=True)]
    return tuple(groups)


def _as_slice(numbers: list[int]) -> slice | None:
    """Return ascending numbers as a slice, or None if their steps differ."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    regular = range(numbers[0], numbers[-1] + 1, step)
    return slice(regular.start, regular.stop, step) if list(regular) == numbers else None


class CachedRows:
    """Rows of the keys or the values of some heads, read in the accumulator's dtype and as (M, B·K, ·)."""

    def __init__(self, x: Tensor, once: bool) -> None:
        """Read nothing yet.

        Args:
            x: (B, K, N, ·), a view of the cache. Its rows are written later.
            once: there is a single query, so copies are not stored.
        """
        self.once = once
        batch, self.heads = x.shape[:2]
        by_position = x.permute(2, 0, 1, 3)
        # Flattened here if that is a view. Otherwise rows are flattened when they are read.
        is_view = batch == 1 or self.heads == 1 or x.stride(0) == self.heads * x.stride(1)
        self.x = by_position.flatten(1, 2) if is_view else by_position
        self.rows_are_contiguous = self.x.is_contiguous()  # with those of all heads
        self.wide = accumulator_dtype(x.dtype)
        self.scratch = torch.empty(0)
        self.copies: dict[tuple[int, int, int], _CopiedBlocks] = {}

    def read(self, keys: QueryReads) -> list[Tensor]:
        """Return the rows: gathered into one tensor, or one tensor per read, views if possible."""
        if keys.index is not None and self.rows_are_contiguous:
            return [self._gathered(keys.index)]
        rows = []
        for read, place in zip(keys.reads, keys.places, strict=True):
            if place is None or self.once:
                rows.append(read.rows_of(self.x))
            else:
                assert isinstance(read, RegularPositions)
                rows.append(self.copies.setdefault(place, _CopiedBlocks()).read(read, self.x))
        return [self._flat(x) for x in rows]

    def forget_from(self, position: int) -> None:
        """Drop copies of rows from a position on."""
        for (first, width, step), blocks in self.copies.items():
            blocks.count = min(blocks.count, max(0, (position - first - width) // step + 1))

    def _gathered(self, index: Tensor) -> Tensor:
        """Gather rows of all heads into a buffer that queries share, as new memory may cause page faults each time."""
        if len(index) > len(self.scratch):
            self.scratch = _normal_empty(self.x, len(index), *self.x.shape[1:])
        return self._flat(torch.index_select(self.x, 0, index, out=self.scratch[: len(index)]))

    def _flat(self, rows: Tensor) -> Tensor:
        rows = in_dtype(rows, self.wide)
        return rows if rows.dim() == 3 else rows.flatten(1, 2)


class _CopiedBlocks:
    """Copies of a few rows of every block, in one run, made when a block is first read.

    Every later query reads them again. With copies, a summary costs no more than a slice.
    """

    def __init__(self) -> None:
        self.count = 0  # blocks copied so far
        self.rows = torch.empty(0)  # (·, …), in memory head by head

    def read(self, read: RegularPositions, x: Tensor) -> Tensor:
        """Return the rows of a run of blocks, (M, …) of (N, …)."""
        first, width, step = read.first // read.step, read.width, read.step
        last = first + read.blocks
        if last > self.count:
            new = RegularPositions(read.first % step + self.count * step, width, last - self.count, step)
            if not len(self.rows):
                room = -(-len(x) // step) * width
                self.rows = _normal_empty(x, *x.shape[1:-1], room, x.shape[-1]).movedim(-2, 0)
            self.rows[self.count * width : last * width] = new.rows_of(x)
            self.count = last
        return self.rows[first * width : last * width]


@dataclass(frozen=True, slots=True)
class QueryReads:
    """The keys that the query of a position reads."""

    reads: tuple[Read, ...]
    places: tuple[tuple[int, int, int] | None, ...]  # (first, width, step) of reads of several wide blocks
    index: Tensor | None  # all positions, if gathering them is not slower than reading them in place
    count: int  # M


@lru_cache(maxsize=64)
def query_reads(pattern: Pattern, position: int, context: int) -> QueryReads:
    """Return what heads of this pattern read; cached for the other layers."""
    parts = reads(pattern, position, context)
    places = tuple(
        (read.first % read.step, read.width, read.step)
        if isinstance(read, RegularPositions) and read.blocks > 1 and read.width > 1
        else None
        for read in parts
    )
    count = sum(map(len, parts))
    gathers = len(parts) > 1 and not any(places) and count <= MOST_GATHERED
    return QueryReads(parts, places, positions_of_reads(parts) if gathers else None, count)


def _normal_empty(like: Tensor, *shape: int) -> Tensor:
    """Allocate memory that can be written both inside and outside ``torch.inference_mode``."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x.to(dtype)``, without the cost of an operation if nothing changes."""
    return x if x.dtype == dtype else x.to(dtype)
