"""Forward whose warps specialise: one copies tiles by the tensor memory accelerator, two groups of others multiply.

For one segment whose queries and keys are in the natural order. While one group computes exponents, the other
multiplies. The compiler makes that of a loop with a mark (triton 3.6, sm_90, 4 warps); it demands that all tiles are
loaded by descriptors of two axes, and that the program has no branch. So every tile is masked, programs without rows
go on, and NaN is repaired by ``forward_kernel``, launched next: a row's logsumexp is NaN where its output has one.
Letters and units are those of ``forward_kernel``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longstride.kernels.backends.triton.tile import (
    COUNTS,
    LN2,
    LOG2E,
    LOWEST,
    NUM_FIELDS,
    intervals,
    narrow,
    store_rows,
    tile_bounds,
    visited_tiles,
)


@triton.jit(do_not_specialize=COUNTS)
def specialized_kernel(
    q,  # descriptors: see ``call.Flat``
    k,
    v,
    out,
    lse,  # (B, H, N)
    table,
    data,
    stride_ob,
    stride_oh,
    stride_on,
    num_heads,
    context,
    num_tiles,
    table_stride,
    q_row_b,  # where a batch entry and a head begin: rows and columns
    q_row_h,
    q_column_h,
    k_row_b,
    k_row_h,
    k_column_h,
    v_row_b,
    v_row_h,
    v_column_h,
    SCALE: tl.constexpr,
    W: tl.constexpr,
    WV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BOUNDS: tl.constexpr,
    GROUP: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    lead = tl.program_id(0) // num_tiles
    batch, head = lead // num_heads, lead % num_heads
    fields = table + batch * table_stride + head * NUM_FIELDS
    first_row, last_row = tile_bounds(tile, fields)
    row = first_row + tl.arange(0, BLOCK_Q)
    inside = row <= last_row
    low, high = intervals(row, inside, fields, data, BOUNDS)  # (BLOCK_Q,)
    origin, _end, count, _first, _last = visited_tiles(first_row, last_row, fields, data, BLOCK_K, BOUNDS)

    q_tile = q.load([batch * q_row_b + head * q_row_h + first_row, head * q_column_h])
    shared = head // GROUP  # the head of k and v
    k_row = batch * k_row_b + shared * k_row_h + origin
    v_row = batch * v_row_b + shared * v_row_h + origin
    acc = tl.zeros((BLOCK_Q, WV), ACCUMULATOR)
    m = tl.full((BLOCK_Q,), LOWEST, ACCUMULATOR)
    total = tl.zeros((BLOCK_Q,), ACCUMULATOR)
    for number in tl.range(count, warp_specialize=SPECIALIZE):
        k_tile = k.load([k_row + number * BLOCK_K, shared * k_column_h])
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK_Q, BLOCK_K)
        column = origin + number * BLOCK_K + tl.arange(0, BLOCK_K)
        allowed = (column[None, :] >= low[:, None]) & (column[None, :] < high[:, None])
        s = tl.where(allowed, s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1) * (SCALE * LOG2E))
        p = tl.exp2(s * (SCALE * LOG2E) - new_m[:, None])
        fade = tl.exp2(m - new_m)
        total = total * fade + tl.sum(p, 1)
        m = new_m
        v_tile = v.load([v_row + number * BLOCK_K, shared * v_column_h])
        acc = acc * fade[:, None]
        acc = tl.dot(narrow(p, v_tile.dtype, ROUND_BF16), v_tile, acc, input_precision="ieee", out_dtype=acc.dtype)

    empty = total == 0.0
    m = tl.where(empty, float("-inf"), m)
    total = tl.where(empty, tl.where(low < high, float("nan"), 1.0), total)
    out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    store_rows(out, row.to(tl.int64), stride_on, inside, acc / total[:, None], WV, WV)
    sums = tl.sum(acc, 1)  # NaN where an output of the row is
    log2_sum = m + tl.log2(total) + tl.where(sums == sums, 0.0, float("nan"))
    tl.store(lse + lead.to(tl.int64) * context + row, log2_sum * LN2, mask=inside)
