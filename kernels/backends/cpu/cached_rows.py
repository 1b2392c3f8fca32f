"""Where the CPU's single queries read: views of the cache where they lie regularly, else copies that are made once.

Letters: B batch, H heads of one pattern, N positions, M keys that are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longstride.kernels.autograd import accumulator_dtype
from longstride.kernels.patterns.base import Pattern
from longstride.kernels.reads import Read, Run, positions, reads

MOST_GATHERED = 4_096  # positions; of more each copy takes longer than the operations that it saves


class Rows:
    """Rows of the keys or the values of some heads, to be read wide and as (M, B·H, ·)."""

    def __init__(self, x: Tensor, once: bool) -> None:
        """Nothing is read yet.

        Args:
            x: (B, H, N, ·), a view, as its rows are written later.
            once: whether there is one query alone, for which no copy is worth keeping.
        """
        self.once = once
        batch, heads = x.shape[:2]
        by_position = x.permute(2, 0, 1, 3)
        # Flat where that is a view too; else what is read is made flat.
        flat = batch == 1 or heads == 1 or x.stride(0) == heads * x.stride(1)
        self.x = by_position.flatten(1, 2) if flat else by_position
        self.whole_rows = self.x.is_contiguous()  # of all heads
        self.wide = accumulator_dtype(x.dtype)
        self.scratch = torch.empty(0)
        self.kept: dict[tuple[int, int, int], _Blocks] = {}

    def of(self, wanted: Wanted) -> list[Tensor]:
        """What is read, in as few tensors as there are good reasons for: views where they can be."""
        if wanted.together is not None and self.whole_rows:
            return [self._gathered(wanted.together)]
        return [
            self._flat(read.rows_of(self.x) if place is None or self.once else self._kept(read, place))
            for read, place in zip(wanted.reads, wanted.places, strict=True)
        ]

    def forget_from(self, position: int) -> None:
        """Rows from here on are written anew."""
        for (_, _, step), blocks in self.kept.items():
            blocks.count = min(blocks.count, position // step)

    def _gathered(self, index: Tensor) -> Tensor:
        """Rows of all heads in one place, which is used again: new memory each time may be new pages each time."""
        if len(index) > len(self.scratch):
            self.scratch = _normal_empty(self.x, len(index), *self.x.shape[1:])
        return self._flat(torch.index_select(self.x, 0, index, out=self.scratch[: len(index)]))

    def _flat(self, rows: Tensor) -> Tensor:
        rows = in_dtype(rows, self.wide)
        return rows if rows.dim() == 3 else rows.flatten(1, 2)

    def _kept(self, read: Read, place: tuple[int, int, int]) -> Tensor:
        assert isinstance(read, Run)
        if place not in self.kept:
            self.kept[place] = _Blocks()
        return self.kept[place].of(read, self.x)


class _Blocks:
    """The same few rows of every block side by side, copied when they are first read and kept for what reads them next.

    Once copied a block is read at every later position: this way a summary costs no more than a slice.
    """

    def __init__(self) -> None:
        self.count = 0  # blocks that are copied, from the first on
        self.rows = torch.empty(0)  # (·, …), in memory head by head

    def of(self, read: Run, x: Tensor) -> Tensor:
        """The rows of a run of blocks, (M, …) of (N, …)."""
        first, (width, step) = read.first // read.step, (read.width, read.step)
        last = first + read.blocks
        if last > self.count:
            new = Run(read.first % step + self.count * step, width, last - self.count, step)
            if not len(self.rows):
                room = -(-len(x) // step) * width
                self.rows = _normal_empty(x, *x.shape[1:-1], room, x.shape[-1]).movedim(-2, 0)
            self.rows[self.count * width : last * width] = new.rows_of(x)
            self.count = last
        return self.rows[first * width : last * width]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the query of a position reads."""

    reads: tuple[Read, ...]
    places: tuple[tuple[int, int, int] | None, ...]  # of several rows of several blocks: which
    together: Tensor | None  # all positions, where to gather them is no worse than to read them in place
    count: int  # M


@lru_cache(maxsize=64)
def wanted_by(pattern: Pattern, position: int, context: int) -> Wanted:
    """What heads of this pattern read; cached, as layers ask alike."""
    found = reads(pattern, position, context)
    places = tuple(
        (read.first % read.step, read.width, read.step)
        if isinstance(read, Run) and read.blocks > 1 and read.width > 1
        else None
        for read in found
    )
    count = sum(map(len, found))
    gathers = len(found) > 1 and not any(places) and count <= MOST_GATHERED
    return Wanted(found, places, positions(found) if gathers else None, count)


def _normal_empty(like: Tensor, *shape: int) -> Tensor:
    """Memory that may be written within ``torch.inference_mode`` and without, whichever it was made in."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``; asked first, as a conversion that changes nothing costs an operation's start too."""
    return x if x.dtype == dtype else x.to(dtype)
