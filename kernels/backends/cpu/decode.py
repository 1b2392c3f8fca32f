"""One query on the CPU: a softmax over the rows of the cache that it reads.

Letters: B batch, H heads of one pattern, N positions, M keys that are read, D and E widths of keys and values.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from longstride.kernels.autograd import accumulator_dtype
from longstride.kernels.backends.cpu.cached_rows import Rows, Wanted, in_dtype, wanted_by
from longstride.kernels.patterns.base import Pattern

MOST_ALONE = 1 << 16  # elements of keys that one thread reads: to wake another, as torch would, takes longer


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Reads CPU memory."""
    return None if q.device.type == "cpu" else f"it needs CPU tensors, not {q.device}"


def prepare(k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, once: bool) -> Decoder:
    """What computes one query after another from these caches; ``patterns`` is one a head."""
    return Decoder(k, v, patterns, scale, once)


class Decoder:
    """Attention of single queries against one cache; a position that comes back says that rows are new from it on."""

    def __init__(self, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, once: bool) -> None:
        self.context, self.value_width, self.scale = k.shape[2], v.shape[3], scale
        self.wide = accumulator_dtype(k.dtype)
        self.unread = torch.empty(1, dtype=self.wide, device=k.device)
        self.last = -1  # position that was asked for
        self.groups = [
            (pattern, heads, Rows(k[:, heads], once), Rows(v[:, heads], once)) for pattern, heads in _groups(patterns)
        ]

    def __call__(self, q: Tensor, position: int, return_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Output (B, H, E) in q's dtype; logsumexp (B, H) in fp32 (fp64 for fp64) where it is asked for."""
        if torch.is_autocast_enabled("cpu"):  # it would take the products down to 16 bits
            with torch.autocast("cpu", enabled=False):
                return self(q, position, return_lse)
        if position <= self.last:
            for _, _, *both in self.groups:
                for rows in both:
                    rows.forget_from(position)
        self.last = position
        if len(self.groups) == 1:
            pattern, _, k, v = self.groups[0]
            return self._attend(q, k, v, pattern, position, return_lse)
        out = q.new_empty(*q.shape[:2], self.value_width)
        lse = q.new_empty(q.shape[:2], dtype=self.wide) if return_lse else None
        for pattern, heads, k, v in self.groups:
            out_rows, found = self._attend(q[:, heads], k, v, pattern, position, return_lse)
            out[:, heads] = out_rows
            if lse is not None and found is not None:
                lse[:, heads] = found
        return out, lse

    def _attend(
        self, q: Tensor, k: Rows, v: Rows, pattern: Pattern, position: int, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The same for heads of one pattern."""
        batch, heads, width = q.shape
        wanted = wanted_by(pattern, position, self.context)
        if not wanted.reads:
            none = q.new_full((batch, heads), -math.inf, dtype=self.wide) if return_lse else None
            return q.new_zeros(batch, heads, self.value_width), none
        threads = torch.get_num_threads()
        if threads == 1 or batch * heads * width * wanted.count > MOST_ALONE:
            return self._softmax(q, k, v, wanted, return_lse)
        try:
            torch.set_num_threads(1)
            return self._softmax(q, k, v, wanted, return_lse)
        finally:
            torch.set_num_threads(threads)

    def _softmax(self, q: Tensor, k: Rows, v: Rows, wanted: Wanted, return_lse: bool) -> tuple[Tensor, Tensor | None]:
        """One softmax over all that is read."""
        # Three axes and sums within the products: a call is a handful of small operations, each of which costs its
        # start. As q·K, as torch gives K·q to one thread.
        batch, heads, width = q.shape
        query = in_dtype(q.reshape(batch * heads, 1, width), self.wide)
        found = [
            torch.baddbmm(self.unread, query, rows.permute(1, 2, 0), beta=0, alpha=self.scale) for rows in k.of(wanted)
        ]
        scores = torch.cat(found, 2) if len(found) > 1 else found[0]  # (B·H, 1, M)
        weights = scores.softmax(2)
        values = v.of(wanted)
        if len(values) == 1:
            out = torch.bmm(weights, values[0].transpose(0, 1))  # (B·H, 1, E)
        else:
            parts = weights.split([len(rows) for rows in values], 2)
            out = torch.bmm(parts[0], values[0].transpose(0, 1))
            for part, rows in zip(parts[1:], values[1:], strict=True):
                out.baddbmm_(part, rows.transpose(0, 1))
        lse = scores.logsumexp(2).view(batch, heads) if return_lse else None
        return in_dtype(out.view(batch, heads, self.value_width), q.dtype), lse


@lru_cache(maxsize=64)
def _groups(patterns: tuple[Pattern, ...]) -> tuple[tuple[Pattern, slice], ...]:
    """Each distinct pattern with its heads, once as a slice if they lie regularly, else head by head."""
    groups: list[tuple[Pattern, slice]] = []
    for pattern in dict.fromkeys(patterns):
        heads = [head for head, other in enumerate(patterns) if other == pattern]
        step = heads[1] - heads[0] if len(heads) > 1 else 1
        regular = slice(heads[0], heads[-1] + 1, step)
        if list(range(len(patterns))[regular]) == heads:
            groups.append((pattern, regular))
        else:
            groups += [(pattern, slice(head, head + 1)) for head in heads]
    return tuple(groups)
