"""Backward pass without atomics, third of three: dQ by tiles of queries.

Letters: BLOCK_Q queries, BLOCK_K keys, W padded width of q and k, WV padded width of v, N positions, H heads.
``dkdv_kernel`` has the equations. Each pass after the first adds to the previous result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longstride.kernels.backends.triton.tile import (
    COLUMN_FOLD,
    COLUMN_LIST,
    COUNTS,
    EARLIER_LIST,
    LOG2E,
    NUM_FIELDS,
    allowed_columns,
    intervals,
    load_fold,
    load_pairs,
    load_rows,
    narrow,
    original_positions,
    store_rows,
    tile_bounds,
    tile_rows,
    visited_tiles,
    without_earlier,
)


@triton.jit
def _add_to_dq(
    dq,  # (BLOCK_Q, W)
    q_tile,  # (BLOCK_Q, W)
    grad_tile,  # (BLOCK_Q, WV)
    row_lse,  # (BLOCK_Q,) in log2
    row_delta,  # (BLOCK_Q,)
    k,  # of this batch entry and head, as is v
    v, stride_k, stride_v,
    first,  # column of the tile's first key
    end,
    low,  # (BLOCK_Q,)
    high, key_fold, key_list,
    earlier,  # arguments of ``without_earlier`` about the rows
    SCALE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr,
    BLOCK_K: tl.constexpr, KEYS: tl.constexpr, PARTIAL: tl.constexpr, EARLIER: tl.constexpr,
    ROUND_BF16: tl.constexpr,
):  # fmt: skip
    """Add the gradient through one tile of keys."""
    column = first + tl.arange(0, BLOCK_K)
    inside = column < end
    position = original_positions(column, inside, key_fold, key_list, KEYS, PARTIAL)  # (BLOCK_K,)
    k_tile = load_rows(k, position, stride_k, inside, WIDTH, W, PARTIAL)  # (BLOCK_K, W)
    v_tile = load_rows(v, position, stride_v, inside, VALUE_WIDTH, WV, PARTIAL)  # (BLOCK_K, WV)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK_Q, BLOCK_K)
    p = tl.exp2(s * (SCALE * LOG2E) - row_lse[:, None])
    if PARTIAL:
        allowed = allowed_columns(first, low, high, BLOCK_K)
        if EARLIER > 0:
            rows, exist, lists, context = earlier
            allowed = without_earlier(
                allowed, rows[:, None], exist[:, None], position[None, :], inside[None, :], lists, context, EARLIER
            )  # fmt: skip
        p = tl.where(allowed, p, 0.0)
    dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")  # (BLOCK_Q, BLOCK_K)
    ds = p * (dp - row_delta[:, None]) * SCALE
    return tl.dot(narrow(ds, k_tile.dtype, ROUND_BF16), k_tile, dq, input_precision="ieee", out_dtype=dq.dtype)


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    q, k, v, grad_out,
    per_query,  # (B, H, N, 2)
    previous,  # (B, H, N, D) contiguous, accumulator dtype: the previous pass's sums, if RESUME
    dq, table, data,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    stride_dqb, stride_dqh, stride_dqn,
    num_heads, context, num_tiles,
    table_stride,  # of a batch entry; 0 if all have the same
    SCALE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BOUNDS: tl.constexpr, EARLIER: tl.constexpr, GROUP: tl.constexpr,
    RESUME: tl.constexpr, ROUND_BF16: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles  # late queries read most, so they start first
    lead = (tl.program_id(0) // num_tiles).to(tl.int64)  # batch * H + head
    batch, head = lead // num_heads, lead % num_heads
    fields = table + batch * table_stride + head * (SEGMENTS * NUM_FIELDS)
    first_row, last_row = tile_bounds(tile, fields)
    if first_row > last_row:
        return
    q += batch * stride_qb + head * stride_qh
    shared = head // GROUP  # the head of k and v
    k += batch * stride_kb + shared * stride_kh
    v += batch * stride_vb + shared * stride_vh
    grad_out += batch * stride_gb + head * stride_gh
    per_query += lead * context * 2
    if RESUME:
        previous += lead * context * WIDTH
    row, inside, position = tile_rows(first_row, last_row, fields, data, BLOCK_Q, ROWS)
    q_tile = load_rows(q, position, stride_qn, inside, WIDTH, W, True)
    grad_tile = load_rows(grad_out, position, stride_gn, inside, VALUE_WIDTH, WV, True)
    row_lse, row_delta = load_pairs(per_query, position, inside, BLOCK_Q, 0, True)
    if RESUME:
        dq_tile = load_rows(previous, position, WIDTH, inside, WIDTH, W, True)
    else:
        dq_tile = tl.zeros((BLOCK_Q, W), ACCUMULATOR)

    for segment in tl.static_range(SEGMENTS):
        entry = fields + segment * NUM_FIELDS
        key_fold = load_fold(entry + COLUMN_FOLD, COLUMNS[segment])
        key_list = data + tl.load(entry + COLUMN_LIST)
        low, high = intervals(row, inside, entry, data, BOUNDS[segment])  # (BLOCK_Q,)
        visited = visited_tiles(first_row, last_row, entry, data, BLOCK_K, BOUNDS[segment])
        origin, end, count, full_first, full_last = visited
        if EARLIER[segment] > 0:  # any tile may have pairs of an earlier part
            full_first, full_last = count, count
            earlier = (position, inside, data + tl.load(entry + EARLIER_LIST), context)
        else:
            earlier = (position, inside, data, context)
        num_full = full_last - full_first
        if EARLIER[segment] == 0:
            for number in range(full_first, full_last):
                dq_tile = _add_to_dq(
                    dq_tile, q_tile, grad_tile, row_lse, row_delta, k, v, stride_kn, stride_vn,
                    origin + number * BLOCK_K, end, low, high, key_fold, key_list, earlier,
                    SCALE, WIDTH, W, VALUE_WIDTH, WV, BLOCK_K, COLUMNS[segment], False, 0, ROUND_BF16,
                )  # fmt: skip
        for turn in range(count - num_full):
            number = tl.where(turn < full_first, turn, turn + num_full)
            dq_tile = _add_to_dq(
                dq_tile, q_tile, grad_tile, row_lse, row_delta, k, v, stride_kn, stride_vn,
                origin + number * BLOCK_K, end, low, high, key_fold, key_list, earlier,
                SCALE, WIDTH, W, VALUE_WIDTH, WV, BLOCK_K, COLUMNS[segment], True, EARLIER[segment], ROUND_BF16,
            )  # fmt: skip

    dq += batch * stride_dqb + head * stride_dqh
    first_row, last_row = tile_bounds(tile, fields)  # recomputed, to free registers during the visits
    row, inside, position = tile_rows(first_row, last_row, fields, data, BLOCK_Q, ROWS)
    store_rows(dq, position, stride_dqn, inside, dq_tile, WIDTH, W)
