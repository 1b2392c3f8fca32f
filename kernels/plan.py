"""Pattern x context x tile -> the tiles a kernel visits, forward and transposed, by interval arithmetic.

Letters: N positions, M keys of a part, T row tiles, P partial tiles, U distinct bitsets.
Nothing here looks at N^2 pairs: a part gives each query one interval of keys (``kernels.patterns.base``), and a tile is
full, partial or absent by the smallest and largest bounds of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kernels.patterns.base import Intervals, Part

WORD = 32  # bits of a bitset's word
Side = Literal["queries", "keys"]  # whose tiles are the rows: queries for the forward pass and dQ, keys for dK and dV


@dataclass(frozen=True)
class Tiles:
    """The column tiles that each row tile visits.

    Row tile t visits the tiles ``full_first[t] <= c < full_last[t]`` without a mask, and for every entry e in
    ``partial_start[t] … partial_start[t + 1] - 1`` the tile ``partial_tile[e]`` under the bitset number
    ``partial_bitset[e]``, in which pair (r, c) is bit ``c % 32`` of word ``[r, c // 32]``. Rows and columns beyond
    the end are never set.
    """

    tile_rows: int
    tile_columns: int
    full_first: Tensor  # (T,) int32
    full_last: Tensor  # (T,) int32
    partial_start: Tensor  # (T + 1,) int32
    partial_tile: Tensor  # (P,) int32
    partial_bitset: Tensor  # (P,) int32
    bitsets: Tensor  # (U, tile_rows, ceil(tile_columns / 32)) int32

    def num_row_tiles(self) -> int:
        """T."""
        return self.full_first.numel()

    def num_visited(self) -> int:
        """Tiles visited, full and partial."""
        return int((self.full_last - self.full_first).sum()) + self.partial_tile.numel()


@dataclass(frozen=True)
class Ordered:
    """A part at one context: its orders and intervals, before any tile is chosen."""

    query_order: Tensor | None  # (N,) int64, original position of each row; None is natural
    key_order: Tensor | None  # (M,) int64
    num_queries: int
    num_keys: int
    by_query: Intervals  # keys of each query, (N,) int64
    by_key: Intervals  # queries of each key, (M,) int64


@dataclass(frozen=True)
class Plan:
    """What a kernel needs to know of one part at one context, whose row tiles are tiles of one side. On the CPU."""

    tiles: Tiles
    num_rows: int
    num_columns: int
    row_order: Tensor | None  # (num_rows,) int64, original position of each row; None is natural
    column_order: Tensor | None  # (num_columns,) int64


@lru_cache(maxsize=32)
def ordered(part: Part, context: int) -> Ordered:
    """The orders and intervals of a part for N = ``context`` positions, on the CPU."""
    query_order, key_order = part.query_order(context), part.key_order(context)
    if query_order is not None and key_order is not None and torch.equal(query_order, key_order):
        key_order = query_order  # one tensor in memory
    num_keys = context if key_order is None else key_order.numel()
    by_query = part.intervals(context)
    assert bool((by_query.low.diff() >= 0).all() and (by_query.high.diff() >= 0).all()), "intervals must not decrease"
    return Ordered(query_order, key_order, context, num_keys, by_query, transposed(by_query, num_keys))


def transposed(intervals: Intervals, num_columns: int) -> Intervals:
    """The rows that each column belongs to: an interval too, as neither bound of the rows decreases."""
    column = torch.arange(num_columns)
    low = torch.searchsorted(intervals.high, column, right=True)
    high = torch.searchsorted(intervals.low, column, right=True)
    return Intervals(low, torch.maximum(low, high))


@lru_cache(maxsize=64)
def plan(part: Part, context: int, tile_q: int, tile_k: int, rows: Side) -> Plan:
    """A part for N = ``context`` positions in (tile_q, tile_k) tiles, seen from its queries or its keys; cached."""
    o = ordered(part, context)
    if rows == "queries":
        return Plan(tiles(o.by_query, tile_q, tile_k), o.num_queries, o.num_keys, o.query_order, o.key_order)
    return Plan(tiles(o.by_key, tile_k, tile_q), o.num_keys, o.num_queries, o.key_order, o.query_order)


def tiles(intervals: Intervals, tile_rows: int, tile_columns: int) -> Tiles:
    """The tiles of rows whose columns are intervals."""
    low, high = _by_tile(intervals, tile_rows)  # (T, tile_rows)
    empty = low >= high
    first = np.where(empty, np.iinfo(np.int64).max, low).min(1) // tile_columns
    last = -(-np.where(empty, 0, high).max(1) // tile_columns)
    first = np.minimum(first, last)
    full_first = np.clip(-(-low.max(1) // tile_columns), first, last)
    full_last = np.clip(high.min(1) // tile_columns, full_first, last)

    # Partial tiles are what is visited on either side of the full run.
    tile, column = _expand(first, full_first, full_last, last)
    inside_low = np.clip(low[tile] - column[:, None] * tile_columns, 0, tile_columns).astype(np.int16)
    inside_high = np.clip(high[tile] - column[:, None] * tile_columns, 0, tile_columns).astype(np.int16)
    visited = (inside_low < inside_high).any(1)
    tile, column = tile[visited], column[visited]
    bitset, number = _bitsets(inside_low[visited], inside_high[visited], tile_columns)
    start = np.concatenate([[0], np.cumsum(np.bincount(tile, minlength=len(first)))])
    return Tiles(
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        full_first=_int32(full_first),
        full_last=_int32(full_last),
        partial_start=_int32(start),
        partial_tile=_int32(column),
        partial_bitset=_int32(number),
        bitsets=torch.from_numpy(bitset),
    )


def _int32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))


def _by_tile(intervals: Intervals, tile_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds as (T, tile_rows) int64; rows beyond the end are empty and lie behind every column."""
    low, high = intervals.low.numpy(), intervals.high.numpy()
    missing = -len(low) % tile_rows
    end = int(high.max(initial=0))
    low, high = (np.pad(bound, (0, missing), constant_values=end) for bound in (low, high))
    return low.reshape(-1, tile_rows), high.reshape(-1, tile_rows)


def _expand(first: np.ndarray, full_first: np.ndarray, full_last: np.ndarray, last: np.ndarray) -> tuple:
    """(row tile, column tile) of every candidate in [first, full_first) and [full_last, last), by row tile."""
    before, after = full_first - first, last - full_last
    count = before + after
    tile = np.repeat(np.arange(len(first)), count)
    within = np.arange(len(tile)) - np.repeat(np.cumsum(count) - count, count)
    column = np.where(within < before[tile], first[tile] + within, full_last[tile] + within - before[tile])
    return tile, column


def _bitsets(low: np.ndarray, high: np.ndarray, tile_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct bitsets (U, tile_rows, words) int32 of (P, tile_rows) bounds inside a tile, and each tile's number."""
    bounds = np.ascontiguousarray(np.concatenate([low, high], 1))
    rows = bounds.view(np.dtype((np.void, bounds.dtype.itemsize * bounds.shape[1])))[:, 0]
    _, chosen, number = np.unique(rows, return_index=True, return_inverse=True)
    word = np.arange(0, tile_columns, WORD)
    below_low, below_high = (  # the words whose bits below the bound are set
        (np.int64(1) << np.clip(bound[chosen].astype(np.int64)[..., None] - word, 0, WORD)) - 1 for bound in (low, high)
    )
    return (below_high & ~below_low).astype(np.uint32).view(np.int32), number
