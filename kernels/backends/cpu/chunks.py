"""A part at one context as a few batches of equal rectangles, for batched matrix products.

Letters: N queries, M keys of a part, R rows (queries) and W columns (keys) of a chunk. All are in the part's orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longstride.kernels.cache import cached
from longstride.kernels.forms import Fold
from longstride.kernels.patterns import PatternPart
from longstride.kernels.plan import View, view

# Measured costs besides the computed pairs, in pairs of a query and a key.
KEY_COST = 24  # per key of a chunk: reading its row and adding to its gradient
CHUNK_COST = 100  # per chunk
BATCH_COST = 12_000  # per batch of equal chunks, for one head
MAX_PAIRS = 1 << 22  # scores of a chunk, unless the smallest chunks have more
STEP = 16  # rows and columns of a chunk are multiples of it if possible: other widths are slower
SIZES = (16, 32, 64, 128, *(size for power in range(6, 13) for size in (3 << power, 4 << power)))  # 192, 256, 384, …


@dataclass(frozen=True)
class Edge:
    """Columns first … last-1 of a chunk, and the bias of their scores: 0 where allowed, else -inf."""

    first: int
    last: int
    bias: Tensor  # (R, last - first) fp32


@dataclass(frozen=True)
class EqualChunks:
    """``count`` chunks of R x W: chunk i has rows ``row + i * row_step`` … and keys ``key + i * key_step`` …"""

    count: int
    rows: int
    width: int
    row: int
    row_step: int
    key: int
    key_step: int
    edges: tuple[Edge, ...]  # columns that not every row reads
    has_blind_rows: bool  # some row reads no key


@dataclass(frozen=True)
class Chunks:
    """A part's orders, and batches that cover each of its pairs once."""

    columns: tuple[Fold, Fold] | None  # orders of queries and keys, if chunks are read and written in place
    query_order: Tensor | None  # (N,) int64; None: natural, or in place
    query_inverse: Tensor | None  # (N,) int64, the row of each original position
    key_order: Tensor | None  # (M,) int64
    num_keys: int
    batches: tuple[EqualChunks, ...]
    has_all_rows: bool  # every row is in a batch
    has_all_keys_once: bool  # every key is in exactly one chunk

    def num_pairs(self) -> int:
        """Return the number of computed scores, masked ones included."""
        return sum(batch.count * batch.rows * batch.width for batch in self.batches)


@cached
def chunked(part: PatternPart, context: int) -> Chunks:
    """Cut a part at N = ``context`` positions into chunks of the size with the lowest estimated time; cached."""
    o = view(part, context, "queries")
    low, high = o.intervals.low.numpy(), o.intervals.high.numpy()
    readers = Readers(low < high)
    start, stop = min((readers.trim(*rows) for rows in _candidates(o)), key=lambda chunks: _cost(o, *chunks))
    first, last = low[start], high[stop - 1]
    once = bool((first[1:] == last[:-1]).all()) and len(first) > 0 and first[0] == 0 and last[-1] == o.num_columns
    batches = tuple(_batches(o, start, stop, 1 if once else STEP))
    columns = _columns(o, batches)
    return Chunks(
        columns=columns,
        query_order=None if columns else o.row_positions,
        query_inverse=None if columns or o.row_order is None else o.row_of_position,
        key_order=None if columns else o.column_positions,
        num_keys=o.num_columns,
        batches=batches,
        has_all_rows=int((stop - start).sum()) == context,
        has_all_keys_once=once and (columns is None or o.num_columns == context),  # in place there are N keys
    )


def _columns(o: View, batches: tuple[EqualChunks, ...]) -> tuple[Fold, Fold] | None:
    """Return the orders of queries and keys, if chunks are views of tensors in the natural order; else None.

    Each chunk must be in one column of queries and one of keys, at equal steps.
    """
    queries, keys = o.row_order, o.column_order
    if not (isinstance(queries, Fold) and isinstance(keys, Fold) and queries.step == keys.step == 1):
        return None
    in_place = all(
        first % rows + length <= rows and step % rows == 0
        for batch in batches
        for first, step, length, rows in (
            (batch.row, batch.row_step, batch.rows, queries.period),
            (batch.key, batch.key_step, batch.width, keys.period),
        )
    )
    return (queries, keys) if in_place else None


def _candidates(o: View) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ways to cut the rows: (start, stop) of each chunk, including empty intervals."""
    low, high = o.intervals.low.numpy(), o.intervals.high.numpy()
    # A chunk that starts at a row without keys in common with earlier rows wastes no pairs.
    restart = np.flatnonzero((low[1:] >= high[:-1]) & (low[1:] > low[:-1])) + 1
    begin = np.concatenate([[0], restart])
    end = np.append(restart, o.num_rows)
    for size in SIZES:
        yield _cut(np.array([0]), np.array([o.num_rows]), size)
        if len(restart):
            yield _cut(begin, end, size)
        if size >= o.num_rows:
            return


def _cut(begin: np.ndarray, end: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut one run [begin, end) into pieces of ``size``; several runs into pieces as equal as STEP allows."""
    length = end - begin
    step = np.full_like(length, size)
    if len(begin) > 1:
        count = -(-length // size)
        step = -(-length // (count * STEP)) * STEP
    return cut_runs(begin, end, step)


def cut_runs(begin: np.ndarray, end: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut each run [begin, end) into pieces of its ``step``: (start, stop) of each piece."""
    count = -(-(end - begin) // step)
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    start = np.repeat(begin, count) + within * np.repeat(step, count)
    return start, np.minimum(start + np.repeat(step, count), np.repeat(end, count))


def _cost(o: View, start: np.ndarray, stop: np.ndarray) -> float:
    """Estimate the time in pairs; infinite if a chunk exceeds MAX_PAIRS and could be smaller."""
    rows = stop - start
    width = o.intervals.high.numpy()[stop - 1] - o.intervals.low.numpy()[start]
    if len(rows) and (rows * width).max() > MAX_PAIRS and rows.max() > SIZES[0]:
        return np.inf
    shapes = len(np.unique(rows * (o.num_columns + 1) + width))
    return float((rows * width + KEY_COST * width).sum() + CHUNK_COST * len(rows) + BATCH_COST * shapes)


class Readers:
    """The rows that read any key."""

    def __init__(self, reads: np.ndarray) -> None:
        self._before = np.concatenate([[0], np.cumsum(reads)])  # number of reading rows before each row
        self._reading = np.flatnonzero(reads)

    def trim(self, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Trim rows without keys from both ends of each chunk, and drop chunks without any keys."""
        first, last = self._before[start], self._before[stop]
        is_used = last > first
        return self._reading[first[is_used]], self._reading[last[is_used] - 1] + 1


def _batches(o: View, start: np.ndarray, stop: np.ndarray, alignment: int) -> Iterator[EqualChunks]:
    """Group chunks with the same relative intervals at equal steps.

    If masked earlier keys can pad a chunk, its width becomes a multiple of ``alignment``.
    """
    low, high = o.intervals.low.numpy(), o.intervals.high.numpy()
    fold = o.column_order if isinstance(o.column_order, Fold) and o.column_order.step == 1 else None
    alike: dict[tuple[int, bytes], list[tuple[int, int]]] = {}
    for a, b in zip(start.tolist(), stop.tolist(), strict=True):
        key = int(low[a])
        missing = int(key - high[b - 1]) % alignment
        earlier = key if fold is None else key % fold.period  # a chunk stays in one column, to be read in place
        key -= missing if missing <= earlier else 0
        relative = (b - a, (low[a:b] - key).tobytes() + (high[a:b] - key).tobytes())
        alike.setdefault(relative, []).append((a, key))
    biases: dict[tuple[int, int, bytes], Tensor] = {}
    for (rows, _), places in alike.items():
        a, key = places[0]
        inside_low, inside_high = low[a : a + rows] - key, high[a : a + rows] - key
        edges = tuple(_edges(inside_low, inside_high, biases))
        blind = bool((inside_low >= inside_high).any())
        for count, (row, key), (row_step, key_step) in _progressions(places):
            yield EqualChunks(count, rows, int(inside_high[-1]), row, row_step, key, key_step, edges, blind)


def _progressions(places: list[tuple[int, int]]) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Yield maximal runs of (row, key) at equal steps: their length, first place and step."""
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(places)]
    first = 0
    while first < len(places):
        step = steps[first] if first < len(steps) else (0, 0)
        last = first + 1
        while last < len(places) and steps[last - 1] == step:
            last += 1
        yield last - first, places[first], step
        first = last


def _edges(low: np.ndarray, high: np.ndarray, biases: dict[tuple[int, int, bytes], Tensor]) -> Iterator[Edge]:
    """Yield the columns that some rows do not read: a left and a right run, or all columns if these are most."""
    width = int(high[-1])
    left_end, right_start = min(int(low.max()), width), int(high.min())
    if left_end + width - right_start > width // 2:
        left_end, right_start = width, width
    for first, last in ((0, left_end), (right_start, width)):
        if first == last:
            continue
        inside = np.stack([np.clip(low - first, 0, last - first), np.clip(high - first, 0, last - first)])
        name = (len(low), last - first, inside.tobytes())
        if name not in biases:
            column = np.arange(last - first)
            allowed = (inside[0][:, None] <= column) & (column < inside[1][:, None])
            biases[name] = torch.from_numpy(np.where(allowed, np.float32(0), np.float32(-np.inf)))
        yield Edge(first, last, biases[name])
