"""One query on the CPU: a softmax over the rows of the cache that it reads.

Letters: B batch, H heads of one pattern, K heads of the cache that they read, N positions, M keys that are read, D and
E widths of keys and values.
CachedRows are read in place where they lie regularly, and otherwise from copies that are made once.
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
MOST_ALONE = 1 << 16  # elements of keys: up to so many, one thread is quicker than waking torch's others


class PreparedCache:
    """Attention of single queries against one cache.

    A position that is not beyond the last one says that rows are new from there on.
    """

    def __init__(self, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, once: bool) -> None:
        self.context, self.value_width, self.scale = k.shape[2], v.shape[3], scale
        self.wide = accumulator_dtype(k.dtype)
        self.unread = torch.empty(1, dtype=self.wide, device=k.device)
        self.last = -1  # position of the last query
        self.groups = [
            (pattern, heads, CachedRows(k[:, shared], once), CachedRows(v[:, shared], once))
            for pattern, heads, shared in _groups(patterns, k.shape[1])
        ]

    def __call__(self, q: Tensor, position: int, return_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Output (B, H, E) in q's dtype; with ``return_lse`` the logsumexp (B, H) in fp32 (fp64 for fp64)."""
        if torch.is_autocast_enabled("cpu"):  # it would take the products down to 16 bits
            with torch.autocast("cpu", enabled=False):
                return self(q, position, return_lse)
        for _, _, *both in self.groups:
            for rows in both:
                if rows.kept:
                    rows.forget_from(min(position, self.last + 1))  # where a pattern reads later rows, they are new
        self.last = position
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
        """The same for heads of one pattern."""
        batch, heads, width = q.shape
        keys = query_reads(pattern, position, self.context)
        if not keys.reads:
            none = q.new_full((batch, heads), -math.inf, dtype=self.wide) if return_lse else None
            return q.new_zeros(batch, heads, self.value_width), none
        threads = torch.get_num_threads()
        if threads == 1 or batch * heads * width * keys.count > MOST_ALONE:
            return self._softmax(q, k, v, keys, return_lse)
        try:
            torch.set_num_threads(1)
            return self._softmax(q, k, v, keys, return_lse)
        finally:
            torch.set_num_threads(threads)

    def _softmax(
        self, q: Tensor, k: CachedRows, v: CachedRows, keys: QueryReads, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """One softmax over all that is read."""
        # Each small operation costs its start: hence three axes, and sums within the products. And q·K, not K·q, which
        # torch would give to one thread.
        batch, heads, width = q.shape
        query = in_dtype(q.reshape(batch * k.heads, heads // k.heads, width), self.wide)
        products = [
            torch.baddbmm(self.unread, query, rows.permute(1, 2, 0), beta=0, alpha=self.scale) for rows in k.of(keys)
        ]
        scores = torch.cat(products, 2) if len(products) > 1 else products[0]  # (B·K, H / K, M)
        weights = scores.softmax(2)
        values = v.of(keys)
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
    """Each distinct pattern with its heads, and the heads of the cache that they read.

    As one slice each where they lie regularly, and equally many share a head of the cache; else head by head.
    """
    groups: list[tuple[Pattern, slice, slice]] = []
    for pattern in dict.fromkeys(patterns):
        heads = [head for head, other in enumerate(patterns) if other == pattern]
        read = [head * key_heads // len(patterns) for head in heads]
        together, shared = _regular(heads), _regular(list(dict.fromkeys(read)))
        if together is not None and shared is not None and len(set(map(read.count, read))) == 1:
            groups.append((pattern, together, shared))
        else:
            groups += [(pattern, slice(x, x + 1), slice(y, y + 1)) for x, y in zip(heads, read, strict=True)]
    return tuple(groups)


def _regular(numbers: list[int]) -> slice | None:
    """Ascending numbers as a slice, if they have equal steps."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    found = range(numbers[0], numbers[-1] + 1, step)
    return slice(found.start, found.stop, step) if list(found) == numbers else None


class CachedRows:
    """Rows of the keys or the values of some heads, read in the accumulator's dtype and as (M, B·K, ·)."""

    def __init__(self, x: Tensor, once: bool) -> None:
        """Nothing is read yet.

        Args:
            x: (B, K, N, ·), a view of the cache, whose rows are written later.
            once: there is a single query, for which no copy is worth keeping.
        """
        self.once = once
        batch, self.heads = x.shape[:2]
        by_position = x.permute(2, 0, 1, 3)
        # Flattened here where that is a view; otherwise what is read is flattened.
        flat = batch == 1 or self.heads == 1 or x.stride(0) == self.heads * x.stride(1)
        self.x = by_position.flatten(1, 2) if flat else by_position
        self.whole_rows = self.x.is_contiguous()  # of all heads
        self.wide = accumulator_dtype(x.dtype)
        self.scratch = torch.empty(0)
        self.kept: dict[tuple[int, int, int], _CopiedBlocks] = {}

    def of(self, keys: QueryReads) -> list[Tensor]:
        """The rows that are read: gathered into one tensor, or one tensor a read, views where possible."""
        if keys.together is not None and self.whole_rows:
            return [self._gathered(keys.together)]
        rows = []
        for read, place in zip(keys.reads, keys.places, strict=True):
            if place is None or self.once:
                rows.append(read.rows_of(self.x))
            else:
                assert isinstance(read, RegularPositions)
                rows.append(self.kept.setdefault(place, _CopiedBlocks()).of(read, self.x))
        return [self._flat(x) for x in rows]

    def forget_from(self, position: int) -> None:
        """Rows from here on are written anew."""
        for (first, width, step), blocks in self.kept.items():
            blocks.count = min(blocks.count, max(0, (position - first - width) // step + 1))

    def _gathered(self, index: Tensor) -> Tensor:
        """Rows of all heads in one buffer for all queries, as new memory may be new pages each time."""
        if len(index) > len(self.scratch):
            self.scratch = _normal_empty(self.x, len(index), *self.x.shape[1:])
        return self._flat(torch.index_select(self.x, 0, index, out=self.scratch[: len(index)]))

    def _flat(self, rows: Tensor) -> Tensor:
        rows = in_dtype(rows, self.wide)
        return rows if rows.dim() == 3 else rows.flatten(1, 2)


class _CopiedBlocks:
    """The same few rows of every block, copied side by side when a block is first read.

    Every later query reads them again: this way a summary costs no more than a slice.
    """

    def __init__(self) -> None:
        self.count = 0  # blocks copied so far
        self.rows = torch.empty(0)  # (·, …), in memory head by head

    def of(self, read: RegularPositions, x: Tensor) -> Tensor:
        """The rows of a run of blocks, (M, …) of (N, …)."""
        first, (width, step) = read.first // read.step, (read.width, read.step)
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
    """What the query of a position reads."""

    reads: tuple[Read, ...]
    places: tuple[tuple[int, int, int] | None, ...]  # (first, width, step) of reads of several wide blocks
    together: Tensor | None  # all positions, where gathering them is no slower than reading them in place
    count: int  # M


@lru_cache(maxsize=64)
def query_reads(pattern: Pattern, position: int, context: int) -> QueryReads:
    """What heads of this pattern read; cached for the other layers."""
    several = reads(pattern, position, context)
    places = tuple(
        (read.first % read.step, read.width, read.step)
        if isinstance(read, RegularPositions) and read.blocks > 1 and read.width > 1
        else None
        for read in several
    )
    count = sum(map(len, several))
    gathers = len(several) > 1 and not any(places) and count <= MOST_GATHERED
    return QueryReads(several, places, positions_of_reads(several) if gathers else None, count)


def _normal_empty(like: Tensor, *shape: int) -> Tensor:
    """Memory that can be written both inside and outside ``torch.inference_mode``, wherever it is made."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without the cost of starting an operation where nothing changes."""
    return x if x.dtype == dtype else x.to(dtype)
