"""Attention of one query to a cache: programs that split its keys, the merge of their results, and their launch.

Letters: B batch, H heads, S segments (the parts of a pattern), N positions, D width of q and k, Dv width of v; in
kernels BLOCK_K keys, W padded width of q and k, WV padded width of v, SPLITS programs per head.
Scores are in units of log2, as in ``forward_kernel``. There is one row of scores, so no matrix units are used. A split
takes every SPLITS-th tile of the keys, counted through all segments. It writes its maximum m, its sum of weights and
its unnormalised output. The merge combines these in a fixed order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from longstride.kernels.backends.triton.launch_plan import LaunchPlan, Planner
from longstride.kernels.backends.triton.packing import (
    FIELDS,
    Form,
    Vectors,
    forms_of,
    int32_table,
    no_columns,
    view_fields,
)
from longstride.kernels.backends.triton.tile import (
    COLUMN_FOLD,
    COLUMN_LIST,
    LN2,
    LOG2E,
    NUM_FIELDS,
    ROW_FOLD,
    ROW_LIST,
    intervals,
    load_fold,
    load_rows,
    original_positions,
)
from longstride.kernels.cache import cached
from longstride.kernels.forms import Fold
from longstride.kernels.patterns import Pattern
from longstride.kernels.plan import View, most_reads, query_views

ELEMENTS_A_TILE = 4096  # of keys and of values: 32 fp32 registers per thread for each
LONGEST_TILE = 128  # keys
KEYS_A_SPLIT = 256
MOST_SPLITS = 32
NUM_WARPS = 4


@dataclass(frozen=True, eq=False)
class Layout:
    """The tables of all heads on the device, the same for all positions."""

    table: Tensor  # (H, S, FIELDS) int32
    data: Tensor  # int32
    rows: tuple[Form, ...]  # of each segment: how to find the row of a position
    columns: tuple[Form, ...]
    bounds: tuple[Form, ...]
    splits: int  # programs per head, a power of two


def plan_one(planner: Planner, layout: Layout, scale: float, stored: bool) -> LaunchPlan:
    """Plan the launches for q (B, H, D); ``stored``: the position is in a tensor."""
    q, k, v, position = planner.inputs
    q, k, v = map(planner.readable, (q, k, v))
    lead, value_width = (planner.batch, planner.heads), v.shape[-1]
    out, lse = planner.empty(*lead, value_width, dtype=v.dtype), planner.empty(*lead)
    partial, partial_stats = out, lse  # not read if nothing is split
    if layout.splits > 1:
        partial = planner.empty(*lead, layout.splits, value_width)
        partial_stats = planner.empty(2, *lead, layout.splits)
    planner.launch(
        decode_kernel,
        layout.splits,
        (q, k, v, out, lse, partial, partial_stats, layout.table, layout.data, position),
        (k, v),
        (),
        None,
        **planner.widths,
        SCALE=scale,
        BLOCK_K=block_of(max(planner.widths["W"], planner.widths["WV"])),
        SPLITS=layout.splits,
        SEGMENTS=len(layout.columns),
        ROWS=tuple(map(int, layout.rows)),
        COLUMNS=tuple(map(int, layout.columns)),
        BOUNDS=tuple(map(int, layout.bounds)),
        GROUP=planner.group,
        STORED=stored,
        num_warps=NUM_WARPS,
    )
    if layout.splits > 1:
        constants = {name: planner.widths[name] for name in ("VALUE_WIDTH", "WV")} | {"SPLITS": layout.splits}
        planner.launch(merge_kernel, 1, (partial, partial_stats, out, lse), (), (), None, **constants)
    return planner.plan(planner.result(out), lse)


def block_of(width: int) -> int:
    """Return the keys per tile, for a padded head width."""
    return min(LONGEST_TILE, max(16, ELEMENTS_A_TILE // width))


def num_splits(most_keys: int, keys_a_split: int) -> int:
    """Return the programs per head, if no position reads more than ``most_keys`` keys."""
    return min(MOST_SPLITS, triton.next_power_of_2(max(1, -(-most_keys // keys_a_split))))


@cached
def plan_layout(patterns: tuple[Pattern, ...], context: int, keys_a_split: int, device: torch.device) -> Layout:
    """Return the tables of heads with these patterns at this context; cached."""
    heads = {pattern: query_views(pattern, context) for pattern in patterns}
    num_segments = max(len(views) for views in heads.values())
    empty = no_columns(context, "queries")
    padded = [[*map(_by_position, heads[p]), *[empty] * (num_segments - len(heads[p]))] for p in patterns]
    rows, columns, bounds = forms_of(padded)
    data = Vectors()
    table = [
        view_fields(segment, 0, data, *forms)
        for views in padded
        for segment, *forms in zip(views, rows, columns, bounds, strict=True)
    ]
    return Layout(
        table=int32_table(table, device).view(len(patterns), num_segments, len(FIELDS)),
        data=data.tensor(device),
        rows=rows,
        columns=columns,
        bounds=bounds,
        splits=num_splits(max(most_reads(pattern, context) for pattern in heads), keys_a_split),
    )


def _by_position(part: View) -> View:
    """Return the view with the inverse of its row order: from positions to rows."""
    if part.row_order is None:
        return part
    inverse = part.row_order.inverse() if isinstance(part.row_order, Fold) else part.row_of_position
    return dataclasses.replace(part, row_order=inverse)


@triton.jit(do_not_specialize=["position"])  # no specialisation for positions that are multiples of 16
def decode_kernel(
    q,  # (B, H, WIDTH) contiguous
    k, v,
    out,  # (B, H, VALUE_WIDTH) contiguous, and lse (B, H): if SPLITS is 1
    lse,
    partial,  # (B, H, SPLITS, VALUE_WIDTH), and (2, B, H, SPLITS) maxima and sums: otherwise
    partial_stats, table, data,
    position,  # a number, or if STORED its address; the value is clamped to the context
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    num_heads, context,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BOUNDS: tl.constexpr, GROUP: tl.constexpr, STORED: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    if STORED:
        at = tl.minimum(tl.maximum(tl.load(position), 0), context - 1).to(tl.int32)
    else:
        at = position
    split = tl.program_id(0) % SPLITS
    lead = (tl.program_id(0) // SPLITS).to(tl.int64)  # batch * H + head
    batch, head = lead // num_heads, lead % num_heads
    fields = table + head * (SEGMENTS * NUM_FIELDS)
    k += batch * stride_kb + head // GROUP * stride_kh
    v += batch * stride_vb + head // GROUP * stride_vh
    channel = tl.arange(0, W)
    query = tl.load(q + lead * WIDTH + channel, mask=channel < WIDTH, other=0.0).to(ACCUMULATOR)  # (W,)

    acc = tl.zeros((WV,), ACCUMULATOR)
    m = tl.full((), float("-inf"), ACCUMULATOR)
    total = tl.zeros((), ACCUMULATOR)
    first_tile = split  # of this program in the current segment
    for segment in tl.static_range(SEGMENTS):
        entry = fields + segment * NUM_FIELDS
        # The query order is packed as its inverse: from positions to rows.
        row_fold = load_fold(entry + ROW_FOLD, ROWS[segment])
        row = original_positions(at, True, row_fold, data + tl.load(entry + ROW_LIST), ROWS[segment], False)
        low, high = intervals(row.to(tl.int32), True, entry, data, BOUNDS[segment])
        key_fold = load_fold(entry + COLUMN_FOLD, COLUMNS[segment])
        key_list = data + tl.load(entry + COLUMN_LIST)
        num_tiles = (high - low + BLOCK_K - 1) // BLOCK_K
        for tile in range(first_tile, num_tiles, SPLITS):
            column = low + tile * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = column < high
            key = original_positions(column, inside, key_fold, key_list, COLUMNS[segment], True)  # (BLOCK_K,)
            k_tile = load_rows(k, key, stride_kn, inside, WIDTH, W, True).to(ACCUMULATOR)  # (BLOCK_K, W)
            s = tl.sum(k_tile * query[None, :], 1) * (SCALE * LOG2E)  # (BLOCK_K,)
            s = tl.where(inside, s, float("-inf"))
            new_m = tl.maximum(m, tl.max(s, 0))
            p = tl.where(inside, tl.exp2(s - new_m), 0.0)
            fade = tl.where(m == new_m, 1.0, tl.exp2(m - new_m))
            v_tile = load_rows(v, key, stride_vn, inside, VALUE_WIDTH, WV, True).to(ACCUMULATOR)  # (BLOCK_K, WV)
            acc = acc * fade + tl.sum(v_tile * p[:, None], 0)
            total = total * fade + tl.sum(p, 0)
            m = new_m
        first_tile = (first_tile - num_tiles % SPLITS + SPLITS) % SPLITS

    channel = tl.arange(0, WV)
    if SPLITS == 1:
        total = tl.where(total == 0.0, 1.0, total)  # without keys: output 0 and logsumexp m = -inf
        result = (acc / total).to(out.dtype.element_ty)
        tl.store(out + lead * VALUE_WIDTH + channel, result, mask=channel < VALUE_WIDTH)
        tl.store(lse + lead, (m + tl.log2(total)) * LN2)
    else:
        number = lead * SPLITS + split
        tl.store(partial + number * VALUE_WIDTH + channel, acc, mask=channel < VALUE_WIDTH)
        tl.store(partial_stats + number, m)
        tl.store(partial_stats + tl.num_programs(0) + number, total)


@triton.jit
def merge_kernel(
    partial, partial_stats, out, lse, num_heads, context,
    VALUE_WIDTH: tl.constexpr, WV: tl.constexpr, SPLITS: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """Compute the softmax over all splits of a head, one program per head."""
    lead = tl.program_id(0).to(tl.int64)
    split = lead * SPLITS + tl.arange(0, SPLITS)
    channel = tl.arange(0, WV)
    stats = tl.load(partial_stats + split)  # (SPLITS,)
    m = tl.max(stats, 0)
    share = tl.where(stats == m, 1.0, tl.exp2(stats - m)).to(ACCUMULATOR)
    total = tl.sum(tl.load(partial_stats + tl.num_programs(0) * SPLITS + split) * share, 0)
    address = partial + split[:, None] * VALUE_WIDTH + channel[None, :]
    acc = tl.load(address, mask=(channel < VALUE_WIDTH)[None, :], other=0.0)  # (SPLITS, WV)
    total = tl.where(total == 0.0, 1.0, total)
    result = (tl.sum(acc * share[:, None], 0) / total).to(out.dtype.element_ty)
    tl.store(out + lead * VALUE_WIDTH + channel, result, mask=channel < VALUE_WIDTH)
    tl.store(lse + lead, (m + tl.log2(total)) * LN2)
