"""Attention over selections on the CPU: ragged chunks, padded to a few sizes, in batched products.

Orders and bounds are data, so every call reads them. All contexts and heads are concatenated: row r of head g is row
``g * N + r``, and likewise for keys. A chunk is a run of rows and the run of columns that they read. Both are padded to
a few sizes, and chunks of one size share batched products across heads. Rows are gathered by index. Padding rows are
not read, and padding columns are masked.

Letters as in ``slabs``, with G all heads of the batch, or those of a piece. Behind a cache there are fewer queries than
keys: Q queries, N positions of keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longstride.kernels.backends import Saved, accumulator_dtype, empty_like_rows
from longstride.kernels.backends.cpu.chunks import MAX_PAIRS, Edge, EqualChunks, Readers, cut_runs
from longstride.kernels.backends.cpu.slabs import (
    Piece,
    Scratch,
    Slab,
    backward_rows,
    empty_by_query_head,
    input_rows,
    merge,
    num_at_once,
    put,
    run_pieces,
    slab_backward,
    slab_forward,
    sum_groups,
)
from longstride.kernels.selections import Part, Selection

# Costs besides the computed pairs, in pairs.
KEY_COST = 16  # per key of a chunk: gathering its row and adding to its gradient
CHUNK_COST = 400  # per chunk
SIZE_COST = 20_000  # per distinct size
STEP = 16  # rows and columns of a chunk are multiples of it


def selected_forward(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> tuple[Tensor, Tensor]:
    """Return output (B, H, M, E) in v's dtype and logsumexp (B, H, M) in fp32 (fp64 for fp64)."""
    out = empty_like_rows(v, heads=q.shape[1], rows=q.shape[2])
    lse = torch.empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))
    parts = _cut_parts(selection, k.shape[2])

    def work(scratch: Scratch, _: Selection, piece: Piece) -> None:
        heads = _head_range(piece, q.shape)
        rows = input_rows(scratch, piece, q=q, k=k, v=v)
        merged = reduce(merge, (_part_forward(scratch, rows, parts, i, heads, scale) for i in range(len(parts))))
        put(out, piece, merged[0])
        put(lse, piece, merged[1].squeeze(-1))

    run_pieces(work, (selection,) * q.shape[1], q, v)
    return out, lse


def selected_backward(saved: Saved, selection: Selection, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. ``out`` and ``lse`` of the full selection are used for each of its parts."""
    q, k, v = saved[:3]
    grads = tuple(empty_by_query_head(x, q.shape[1], accumulator_dtype(q.dtype)) for x in (q, k, v))
    parts = _cut_parts(selection, k.shape[2])

    def work(scratch: Scratch, _: Selection, piece: Piece) -> None:
        heads = _head_range(piece, q.shape)
        rows = backward_rows(scratch, piece, saved)
        by_part = (_part_backward(scratch, rows, parts, i, heads, scale) for i in range(len(parts)))
        totals = reduce(lambda sums, part: tuple(a.add_(b) for a, b in zip(sums, part, strict=True)), by_part)
        for grad, total in zip(grads, totals, strict=True):
            put(grad, piece, total)

    run_pieces(work, (selection,) * q.shape[1], q, v)
    return grads[0], sum_groups(grads[1], k), sum_groups(grads[2], v)


def _head_range(piece: Piece, shape: torch.Size) -> range:
    """Return a piece's heads among all heads of the batch. They are adjacent, as all heads are of one kind."""
    entries, heads = (range(length)[cut] for cut, length in zip(piece, shape, strict=False) if isinstance(cut, slice))
    return range(entries[0] * shape[1] + heads[0], entries[-1] * shape[1] + heads[-1] + 1)


class AlikeChunks(NamedTuple):
    """Chunks of one size, R x W. Chunk i has rows start[i] … stop[i]-1, at most R, and W columns from first[i] on."""

    rows: int
    width: int
    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray


class CutPart(NamedTuple):
    """A part of a selection with its G heads concatenated: rows, keys and positions are numbered through."""

    positions: int  # N
    queries: np.ndarray  # (G * Q,) the query of each row
    keys: np.ndarray  # (G * M,) the position of each column
    low: np.ndarray  # (G * Q,) of columns
    high: np.ndarray
    chunks: tuple[AlikeChunks, ...]
    pairs: PartPairs | None  # for the parts after this one, if parts may overlap


class PartPairs(NamedTuple):
    """The pairs of a part by query and position: the keys with ``low <= rank < high``."""

    rank: np.ndarray  # (G * N,) the column of each position within its head, -1 for none
    low: np.ndarray  # (G * Q,) of columns within the head
    high: np.ndarray


def _cut_parts(selection: Selection, positions: int) -> list[CutPart]:
    """Cut all parts into chunks, independently of the number of threads; ``positions`` is N."""
    overlaps = not selection.disjoint
    return [_cut(part, positions, overlaps and part is not selection.parts[-1]) for part in selection.parts]


def _cut(part: Part, positions: int, has_pairs: bool) -> CutPart:
    """Cut the rows of a part into chunks; ``has_pairs``: for later parts that overlap."""
    low, high = part.low.numpy(), part.high.numpy()
    context = low.shape[-1]
    num_keys = positions if part.key_order is None else part.key_order.shape[-1]
    head = np.arange(low.shape[0] * low.shape[1]).reshape(*low.shape[:2], 1)
    queries = (np.arange(context) if part.query_order is None else part.query_order.numpy()) + head * context
    keys = (np.arange(positions) if part.key_order is None else part.key_order.numpy()) + head * positions
    queries, keys, first, last = (x.reshape(-1) for x in (queries, keys, low + head * num_keys, high + head * num_keys))
    pairs = None
    if has_pairs:
        rank = np.full(head.size * positions, -1, np.int32)
        rank[keys] = np.arange(len(keys)) % num_keys
        by_position = np.empty((2, len(queries)), np.int32)
        by_position[:, queries] = low.reshape(-1), high.reshape(-1)
        pairs = PartPairs(rank, *by_position)
    return CutPart(positions, queries, keys, first, last, tuple(_chunks(first, last, context, num_keys)), pairs)


def _chunks(low: np.ndarray, high: np.ndarray, context: int, num_keys: int) -> Iterator[AlikeChunks]:
    """Yield chunks of the cheapest size that cover every row with keys, grouped by size."""
    best, least = None, math.inf
    for start, stop in _candidates(low, high, context):
        first, end = low[start], high[stop - 1]
        rows = -(-(stop - start) // STEP) * STEP
        # To a multiple of STEP, and of an eighth of the next power of two.
        unit = np.maximum(STEP, 2 ** np.ceil(np.log2(np.maximum(end - first, 1))).astype(np.int64) // 8)
        width = np.minimum(-(-(end - first) // unit) * unit, num_keys)
        pairs = rows * width
        if len(rows) and pairs.max() > MAX_PAIRS and rows.max() > STEP:
            break  # larger ones exceed it too
        size = rows * (2 * num_keys + 1) + width
        cost = pairs.sum() + KEY_COST * width.sum() + CHUNK_COST * len(rows) + SIZE_COST * len(np.unique(size))
        if cost < least:
            best, least = (start, stop, first, rows, width, size), cost
        elif cost > 2 * least:
            break
    assert best is not None
    start, stop, first, rows, width, size = best
    # A padded chunk must end within its head.
    first = np.minimum(first, (start // context + 1) * num_keys - width)
    for distinct in np.unique(size):
        index = np.flatnonzero(size == distinct)
        yield AlikeChunks(int(rows[index[0]]), int(width[index[0]]), start[index], stop[index], first[index])


def _candidates(low: np.ndarray, high: np.ndarray, context: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ways to cut the rows, by growing size: (start, stop) of each chunk, within one head and with keys."""
    # A chunk that starts at a row without keys in common with earlier rows wastes no pairs.
    is_restart = (low[1:] >= high[:-1]) & (low[1:] > low[:-1])
    restart = np.flatnonzero(is_restart) + 1
    readers, size = Readers(low < high), STEP
    while True:
        # Skip restarts close to another one: chunks of few rows cost more than masked columns.
        near = restart // (size // 4)
        begin = np.union1d(restart[np.diff(near, prepend=-1) > 0], np.arange(0, len(low), context))
        end = np.append(begin[1:], len(low))
        yield readers.trim(*cut_runs(begin, end, np.full_like(begin, size)))
        if size >= context:
            return
        size *= 2


class SelectedSlab(NamedTuple):
    """Chunks of one size computed together, and the rows that they gather from a piece's (G * Q, ·) and (G * N, ·)."""

    slab: Slab
    row_places: np.ndarray  # (b, R) of positions; padding repeats the last row of a chunk
    key_places: np.ndarray  # (b, W)
    is_row: np.ndarray  # (b, R) False for padding
    first: np.ndarray  # (b,) of columns, in the piece's order


def _gather(scratch: Scratch, name: str, x: Tensor, places: np.ndarray) -> Tensor:
    """Gather rows of (G * Q, D) or (G * N, D) at places (b, L): (1, b * L, D)."""
    out = scratch.take(f"{name} gathered", places.size, x.shape[-1], dtype=x.dtype)
    return torch.index_select(x, 0, torch.from_numpy(places.reshape(-1)), out=out)[None]


def _slabs(scratch: Scratch, parts: list[CutPart], number: int, heads: range, context: int) -> Iterator[SelectedSlab]:
    """Yield the chunks of some heads in slabs of about SCORES_IN_WORK scores, with their masks."""
    part = parts[number]
    num_keys = len(part.keys) // (len(part.queries) // context)
    first_query, first_key = heads.start * context, heads.start * num_keys
    first_position = heads.start * part.positions
    for rows, width, *places in part.chunks:
        of_heads = slice(*np.searchsorted(places[0], (heads.start * context, heads.stop * context)))
        start, stop, first = (x[of_heads] for x in places)
        at_once = num_at_once(rows * width)
        for chunk in range(0, len(start), at_once):
            batch = slice(chunk, chunk + at_once)
            row = start[batch, None] + np.arange(rows)
            is_row = row < stop[batch, None]
            row = np.minimum(row, stop[batch, None] - 1)
            column = first[batch, None]
            low, high = part.low[row] - column, part.high[row] - column
            queries, keys = part.queries[row], part.keys[column + np.arange(width)]
            bias = _bias(scratch, low, high, width)
            for earlier in parts[:number]:
                if earlier.pairs is not None:
                    rank = earlier.pairs.rank[keys][:, None]
                    low, high = earlier.pairs.low[queries][..., None], earlier.pairs.high[queries][..., None]
                    bias.masked_fill_(torch.from_numpy((low <= rank) & (rank < high)), -math.inf)
            edges = (Edge(0, width, bias),)
            chunks = EqualChunks(len(row), rows, width, 0, rows, 0, width, edges, has_blind_rows=True)
            slab = Slab(chunks, None, 0, 1, 0, len(row))
            yield SelectedSlab(slab, queries - first_query, keys - first_position, is_row, first[batch] - first_key)


def _bias(scratch: Scratch, low: np.ndarray, high: np.ndarray, width: int) -> Tensor:
    """Return the bias of scores (b, R, W): 0 where low <= column < high, else -inf."""
    # Each row of a mask is a window of a step from 0 to -inf. Copying windows is faster than comparing.
    step = torch.zeros(2 * width, dtype=torch.float32).masked_fill_(torch.arange(2 * width) >= width, -math.inf)
    windows = step.as_strided((width + 1, width), (1, 1))
    bias = scratch.take("bias", high.size, width, dtype=torch.float32)
    torch.index_select(windows, 0, torch.from_numpy(width - high.clip(0, width).reshape(-1)), out=bias)
    if low.max() > 0:
        windows = step.flip(0).as_strided((width + 1, width), (1, 1))
        below = scratch.take("bias below", low.size, width, dtype=torch.float32)
        bias += torch.index_select(windows, 0, torch.from_numpy(width - low.clip(0, width).reshape(-1)), out=below)
    return bias.view(*high.shape, width)


def _part_forward(
    scratch: Scratch, by_name: dict[str, Tensor], parts: list[CutPart], number: int, heads: range, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output (G, Q, E) and logsumexp (G, Q, 1) of one part; 0 and -inf for rows without keys."""
    numbers, context = scratch.numbers, by_name["q"].shape[1]
    q, k, v = (by_name[name].flatten(0, 1) for name in "qkv")
    size, inverse = _rows_of_slabs(parts[number], heads, context)
    outs = scratch.take("outs", 1, size, v.shape[1], dtype=numbers.wide)
    lses = scratch.take("lses", 1, size, 1, dtype=numbers.wide)
    outs[0, -1], lses[0, -1] = 0.0, -math.inf
    done = 0
    for slab in _slabs(scratch, parts, number, heads, context):
        rows = _gather(scratch, "q", q, slab.row_places)
        keys, values = (_gather(scratch, name, x, slab.key_places) for name, x in (("k", k), ("v", v)))
        span = slice(done, done + rows.shape[1])
        slab_forward(slab.slab, scratch, rows, keys, values, outs[:, span], lses[:, span], scale / numbers.nats)
        inverse[slab.row_places[slab.is_row]] = np.arange(span.start, span.stop)[slab.is_row.reshape(-1)]
        done = span.stop
    index = torch.from_numpy(inverse)
    out = scratch.take(f"out {number}", len(inverse), v.shape[1], dtype=numbers.wide)
    torch.index_select(outs[0], 0, index, out=out)
    lse = torch.index_select(lses[0], 0, index).mul_(numbers.nats)
    return out.view(len(heads), context, -1), lse.view(len(heads), context, 1)


def _part_backward(
    scratch: Scratch, rows: dict[str, Tensor], parts: list[CutPart], number: int, heads: range, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients (G, Q, D), (G, N, D), (G, N, E) of q, k and v through one part."""
    numbers, context = scratch.numbers, rows["q"].shape[1]
    wide, part = numbers.wide, parts[number]
    widths = {name: rows[name].shape[2] for name in ("q", "k", "v")}
    size, inverse = _rows_of_slabs(part, heads, context)
    num_keys = len(part.keys) // (len(part.queries) // context)
    grads_q = scratch.take("grads_q", 1, size, widths["q"], dtype=wide)
    grads_q[0, -1] = 0.0
    grad_k, grad_v = (scratch.take(f"grad_{x}", len(heads) * num_keys + 1, widths[x], dtype=wide).zero_() for x in "kv")
    rows = {name: x.flatten(0, 1) for name, x in rows.items()}
    done = 0
    for slab in _slabs(scratch, parts, number, heads, context):
        names = ("q", "grad_out", "minus_lse", "minus_delta")
        by_row = [_gather(scratch, name, rows[name], slab.row_places) for name in names]
        by_row[2][0, torch.from_numpy(~slab.is_row.reshape(-1))] = -math.inf  # so that their weights are 0
        by_key = [_gather(scratch, name, rows[name], slab.key_places) for name in ("k", "v")]
        span = slice(done, done + by_row[0].shape[1])
        keys, values = (scratch.take(f"slab {x}", 1, slab.key_places.size, widths[x], dtype=wide) for x in "kv")
        slab_backward(slab.slab, scratch, by_row, by_key, (grads_q[:, span], keys, values), (False, False), scale)
        for total, grads in ((grad_k.numpy(), keys), (grad_v.numpy(), values)):
            chunks = grads.view(*slab.key_places.shape, -1).numpy()
            for place, chunk in zip(slab.first.tolist(), chunks, strict=True):
                total[place : place + len(chunk)] += chunk
        inverse[slab.row_places[slab.is_row]] = np.arange(span.start, span.stop)[slab.is_row.reshape(-1)]
        done = span.stop
    by_key_position = np.full(len(heads) * part.positions, len(heads) * num_keys)
    keys_of_heads = part.keys[heads.start * num_keys : heads.stop * num_keys]
    by_key_position[keys_of_heads - heads.start * part.positions] = np.arange(len(heads) * num_keys)
    results = []
    for name, in_order, index in (
        ("q", grads_q[0], inverse),
        ("k", grad_k, by_key_position),
        ("v", grad_v, by_key_position),
    ):
        grad = scratch.take(f"grad_{name} {number}", len(index), widths[name], dtype=wide)
        torch.index_select(in_order, 0, torch.from_numpy(index), out=grad)
        results.append(grad.view(len(heads), -1, widths[name]))
    return tuple(results)


def _rows_of_slabs(part: CutPart, heads: range, context: int) -> tuple[int, np.ndarray]:
    """Return the number of rows in the slabs of some heads, plus a row for all queries without keys.

    Also return (G * Q,), the row of each query, where all are still that last row.
    """
    edges = (heads.start * context, heads.stop * context)
    size = sum(alike.rows * int(np.diff(np.searchsorted(alike.start, edges))[0]) for alike in part.chunks)
    return size + 1, np.full(len(heads) * context, size)
