"""Backward without atomics, third of three: dQ by tiles of queries.

Letters: BLOCK_Q queries, BLOCK_K keys, W padded width of q and k, WV padded width of v, N positions, H heads.
``dkdv_kernel`` has the equations, and says what *isolated* is. Each pass after the first adds to the result of the one
before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longstride.kernels.backends.triton.tile import (
    COLUMN_FOLD,
    COLUMN_LIST,
    COUNTS,
    EARLIER_LIST,
    ISOLATED_ROWS,
    LOG2E,
    NUM_FIELDS,
    allowed_columns,
    has_nan,
    intervals,
    load_fold,
    load_pairs,
    load_rows,
    load_tile,
    narrow,
    nth_tile,
    original_positions,
    read_product,
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
    k,  # of this batch entry and head, or a descriptor of all
    v,
    batch,
    head,
    stride_k,
    stride_v,
    first,  # column of the tile's first key
    end,
    low,  # (BLOCK_Q,)
    high,
    key_fold,
    key_list,
    earlier,  # what ``without_earlier`` needs to know of the rows
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KEYS: tl.constexpr,
    SHAPE: tl.constexpr,
    PARTIAL: tl.constexpr,
    EARLIER: tl.constexpr,
    ISOLATED: tl.constexpr,
    ROUND_BF16: tl.constexpr,
):
    """Add the gradient through one tile of keys."""
    column = first + tl.arange(0, BLOCK_K)
    inside = column < end
    position = original_positions(column, inside, key_fold, key_list, KEYS, PARTIAL)  # (BLOCK_K,)
    k_tile = load_tile(
        k, batch, head, first, position, stride_k, inside, key_fold, WIDTH, W, BLOCK_K, SHAPE, PARTIAL
    )  # (BLOCK_K, W)
    v_tile = load_tile(
        v, batch, head, first, position, stride_v, inside, key_fold, VALUE_WIDTH, WV, BLOCK_K, SHAPE, PARTIAL
    )  # (BLOCK_K, WV)
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
    if ISOLATED:
        return read_product(tl.where(allowed, ds, 0.0), allowed, k_tile, dq, ROUND_BF16)
    return tl.dot(narrow(ds, k_tile.dtype, ROUND_BF16), k_tile, dq, input_precision="ieee", out_dtype=dq.dtype)


@triton.jit
def _sums_of_queries(
    first_row,
    last_row,
    tensors,  # q, k, v, grad_out, per_query and previous of this batch entry and head
    described,  # descriptors of all: see ``dq_kernel``
    batch,
    head,
    fields,
    data,
    context,
    strides,  # from a position to the next, of q, k, v and grad_out
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BOUNDS: tl.constexpr,
    EARLIER: tl.constexpr,
    SHAPES: tl.constexpr,
    RESUME: tl.constexpr,
    ISOLATED: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """dQ (BLOCK_Q, W) of rows, and which of them exist, and their positions."""
    q, k, v, grad_out, per_query, previous = tensors
    stride_qn, stride_kn, stride_vn, stride_gn = strides
    row, inside, position = tile_rows(first_row, last_row, fields, data, BLOCK_Q, ROWS)
    q_tile = load_rows(q, position, stride_qn, inside, WIDTH, W, True)
    grad_tile = load_rows(grad_out, position, stride_gn, inside, VALUE_WIDTH, WV, True)
    row_lse, row_delta = load_pairs(per_query, position, inside, BLOCK_Q, 0, True)
    if RESUME:
        dq_tile = load_rows(previous, position, WIDTH, inside, WIDTH, W, True)
    else:
        dq_tile = tl.zeros((BLOCK_Q, W), ACCUMULATOR)

    for segment in tl.static_range(SEGMENTS):
        own = fields + segment * NUM_FIELDS
        key_fold = load_fold(own + COLUMN_FOLD, COLUMNS[segment])
        key_list = data + tl.load(own + COLUMN_LIST)
        low, high = intervals(row, inside, own, data, BOUNDS[segment])  # (BLOCK_Q,)
        visited = visited_tiles(first_row, last_row, own, data, BLOCK_K, BOUNDS[segment])
        origin, end, count, full_first, full_last = visited
        if SHAPES[segment] == 0 or ISOLATED:
            keys, values = k, v
        else:
            keys, values = described[2 * segment], described[2 * segment + 1]
        if EARLIER[segment] > 0:  # any tile may hold pairs that an earlier part has
            full_first, full_last = count, count
            earlier = (position, inside, data + tl.load(own + EARLIER_LIST), context)
        else:
            earlier = (position, inside, data, context)
        if EARLIER[segment] == 0 and not ISOLATED:
            for number in range(full_first, full_last):
                dq_tile = _add_to_dq(
                    dq_tile, q_tile, grad_tile, row_lse, row_delta, keys, values, batch, head,
                    stride_kn, stride_vn, origin + number * BLOCK_K, end, low, high, key_fold, key_list, earlier,
                    SCALE, WIDTH, W, VALUE_WIDTH, WV,
                    BLOCK_K, COLUMNS[segment], SHAPES[segment], False, 0, False, ROUND_BF16,
                )  # fmt: skip
        if ISOLATED:
            skipped = 0
        else:
            skipped = full_last - full_first
        for partial in tl.range(skipped, count, num_stages=1 if ISOLATED else None):
            number = nth_tile(partial, 0, full_first, full_last)
            dq_tile = _add_to_dq(
                dq_tile, q_tile, grad_tile, row_lse, row_delta, keys, values, batch, head,
                stride_kn, stride_vn, origin + number * BLOCK_K, end, low, high, key_fold, key_list, earlier,
                SCALE, WIDTH, W, VALUE_WIDTH, WV,
                BLOCK_K, COLUMNS[segment], 0 if ISOLATED else SHAPES[segment], True, EARLIER[segment],
                ISOLATED, ROUND_BF16,
            )  # fmt: skip
    return dq_tile, inside, position


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    q,
    k,
    v,
    grad_out,
    per_query,  # (B, H, N, 2)
    previous,  # (B, H, N, D) contiguous, accumulator dtype: the last pass's sums, where RESUME
    dq,
    table,
    data,
    k_first,  # descriptors of k and v for the first segment, and the second: see ``described``
    v_first,
    k_second,
    v_second,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_gb,
    stride_gh,
    stride_gn,
    stride_dqb,
    stride_dqh,
    stride_dqn,
    num_heads,
    context,
    num_tiles,
    table_stride,  # of a batch entry; 0 where all have the same
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BOUNDS: tl.constexpr,
    EARLIER: tl.constexpr,
    GROUP: tl.constexpr,
    SHAPES: tl.constexpr,
    RESUME: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles  # late queries read most: they begin first
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
    batch_index, head_index = batch.to(tl.int32), shared.to(tl.int32)
    tensors = (q, k, v, grad_out, per_query, previous)
    described = (k_first, v_first, k_second, v_second)
    strides = (stride_qn, stride_kn, stride_vn, stride_gn)
    dq_tile, _inside, _position = _sums_of_queries(
        first_row, last_row, tensors, described, batch_index, head_index, fields, data, context, strides,
        SCALE, WIDTH, W, VALUE_WIDTH, WV, BLOCK_Q, BLOCK_K, SEGMENTS, ROWS, COLUMNS, BOUNDS, EARLIER, SHAPES, RESUME,
        False, ROUND_BF16, ACCUMULATOR,
    )  # fmt: skip
    dq += batch * stride_dqb + head * stride_dqh
    begin_row, end_row = tile_bounds(tile, fields)  # anew, so that registers hold none of it during the visits
    if has_nan(dq_tile):
        FEW_Q: tl.constexpr = BLOCK_Q if BLOCK_Q < ISOLATED_ROWS else ISOLATED_ROWS
        FEW_K: tl.constexpr = BLOCK_K if BLOCK_K < ISOLATED_ROWS else ISOLATED_ROWS
        for number in tl.range((end_row - begin_row) // FEW_Q + 1, num_stages=1):
            first = begin_row + number * FEW_Q
            dq_few, exist, at = _sums_of_queries(
                first, tl.minimum(first + FEW_Q - 1, end_row), tensors, described, batch_index, head_index,
                fields, data, context, strides,
                SCALE, WIDTH, W, VALUE_WIDTH, WV, FEW_Q, FEW_K, SEGMENTS, ROWS, COLUMNS, BOUNDS, EARLIER, SHAPES,
                RESUME, True, ROUND_BF16, ACCUMULATOR,
            )  # fmt: skip
            store_rows(dq, at, stride_dqn, exist, dq_few, WIDTH, W)
    else:
        _row, inside, position = tile_rows(begin_row, end_row, fields, data, BLOCK_Q, ROWS)
        store_rows(dq, position, stride_dqn, inside, dq_tile, WIDTH, W)
