"""Host side of one query at a time: packs what positions read, launches the splits and their merge.

Letters: B batch, H heads, S segments (the parts of a pattern), N positions, D width of q and k, Dv width of v.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from longstride.kernels.backends.triton.call import Call
from longstride.kernels.backends.triton.decode_kernel import decode_kernel, merge_kernel
from longstride.kernels.backends.triton.packing import (
    FIELDS,
    Data,
    Form,
    form_of,
    form_of_bounds,
    int32_table,
    no_columns,
    view_fields,
)
from longstride.kernels.patterns.base import Pattern
from longstride.kernels.patterns.forms import Fold
from longstride.kernels.plan import View
from longstride.kernels.reads import most_reads, query_views

ELEMENTS_A_TILE = 4096  # of keys, and of values: 32 registers a thread each, in fp32
LONGEST_TILE = 128  # keys
KEYS_A_SPLIT = 256
MOST_SPLITS = 32
NUM_WARPS = 4


@dataclass(frozen=True, eq=False)
class Layout:
    """What the kernel reads of all heads, on the device; the same for all positions."""

    table: Tensor  # (H, S, FIELDS) int32
    data: Tensor  # int32
    rows: tuple[Form, ...]  # of each segment: how the row of a position is found
    columns: tuple[Form, ...]
    bounds: tuple[Form, ...]
    splits: int  # programs a head, a power of two


def attend_one(
    k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, q: Tensor, position: int, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Output (B, H, Dv) in v's dtype and logsumexp (B, H); ``patterns`` is one a head."""
    call = Call(k, v, patterns)
    q, k, v = (call.readable(t) for t in (q.contiguous(), k, v))
    one = layout(patterns, call.context, KEYS_A_SPLIT, q.device)
    out = v.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(q.shape[:2], dtype=call.wide)
    partial, partial_stats = out, lse  # not looked at where nothing is split
    if one.splits > 1:
        partial = q.new_empty(*q.shape[:2], one.splits, v.shape[-1], dtype=call.wide)
        partial_stats = q.new_empty(2, *q.shape[:2], one.splits, dtype=call.wide)
    call.launch(
        decode_kernel,
        one.splits,
        (q, k, v, out, lse, partial, partial_stats, one.table, one.data),
        (k, v),
        (position,),
        None,
        **call.widths,
        SCALE=scale,
        BLOCK_K=block_of(max(call.widths["W"], call.widths["WV"])),
        SPLITS=one.splits,
        SEGMENTS=len(one.columns),
        ROWS=tuple(map(int, one.rows)),
        COLUMNS=tuple(map(int, one.columns)),
        BOUNDS=tuple(map(int, one.bounds)),
        num_warps=NUM_WARPS,
    )
    if one.splits > 1:
        widths = {name: call.widths[name] for name in ("VALUE_WIDTH", "WV")}
        call.launch(merge_kernel, 1, (partial, partial_stats, out, lse), (), (), None, **widths, SPLITS=one.splits)
    return out.to(call.dtype), lse


def block_of(width: int) -> int:
    """Keys a tile, for a padded head width."""
    return min(LONGEST_TILE, max(16, ELEMENTS_A_TILE // width))


def num_splits(most_keys: int, keys_a_split: int) -> int:
    """Programs a head where no position reads more keys than this."""
    return min(MOST_SPLITS, triton.next_power_of_2(max(1, -(-most_keys // keys_a_split))))


@lru_cache(maxsize=64)
def layout(patterns: tuple[Pattern, ...], context: int, keys_a_split: int, device: torch.device) -> Layout:
    """What heads of these patterns read at this context, whatever the position; cached."""
    heads = {pattern: query_views(pattern, context) for pattern in patterns}
    num_segments = max(len(views) for views in heads.values())
    nothing = no_columns(context, "queries")
    padded = [[*map(_by_position, heads[p]), *[nothing] * (num_segments - len(heads[p]))] for p in patterns]
    segments = list(zip(*padded, strict=True))
    rows = tuple(max(form_of(one.row_order) for one in segment) for segment in segments)
    columns = tuple(max(form_of(one.column_order) for one in segment) for segment in segments)
    bounds = tuple(max(form_of_bounds(one) for one in segment) for segment in segments)
    data = Data()
    table = [
        view_fields(one, 0, data, *forms)
        for views in padded
        for one, *forms in zip(views, rows, columns, bounds, strict=True)
    ]
    return Layout(
        table=int32_table(table, device).view(len(patterns), num_segments, len(FIELDS)),
        data=data.tensor(device),
        rows=rows,
        columns=columns,
        bounds=bounds,
        splits=num_splits(max(most_reads(pattern, context) for pattern in heads), keys_a_split),
    )


def _by_position(one: View) -> View:
    """The view with the inverse of its rows' order: what a position's row is, not what a row's position is."""
    if one.row_order is None:
        return one
    inverse = one.row_order.inverse() if isinstance(one.row_order, Fold) else one.row_of_position
    return dataclasses.replace(one, row_order=inverse)
