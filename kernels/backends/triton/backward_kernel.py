"""Backward pass without atomics: delta, then dK and dV by tiles of keys, then dQ by tiles of queries.

Letters: BLOCK queries of delta, BLOCK_Q queries, BLOCK_K keys, W padded width of q and k, WV padded width of v,
N positions, H heads.
P are the weights, recomputed from the lse of the full pattern, whatever parts this pass has:

    delta = sum(out * dOut) - dLse
    dV = P^T dOut        dP = dOut V^T        dS = scale * P * (dP - delta)        dK = dS^T Q        dQ = dS K

dS includes the scale before it is rounded to 16 bits, so that it neither overflows nor underflows with loss scaling.
``per_query`` has two numbers per query for all passes: lse in units of log2, and delta.

Each pass writes its sums to its rows of a workspace, one set per slice of queries. The last pass adds them in a fixed
order as it finishes each key. If the last pass does not have every key, or is split, it also writes to the workspace,
and ``gather_kernel`` adds the sums. Each pass of dQ after the first adds to the previous result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longstride.kernels.backends.triton.sums_kernel import store_sums
from longstride.kernels.backends.triton.tile import (
    COLUMN_FOLD,
    COLUMN_LIST,
    COUNTS,
    EARLIER_LIST,
    LOG2E,
    NUM_FIELDS,
    NUM_SOURCE_FIELDS,
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


@triton.jit(do_not_specialize=COUNTS)
def delta_kernel(
    out, grad_out,
    lse,  # (B, H, N)
    grad_lse,  # (B, H, N), if GRAD_LSE
    per_query,  # (B, H, N, 2)
    stride_ob, stride_oh, stride_on,
    stride_gb, stride_gh, stride_gn,
    num_heads, context, num_blocks,
    VALUE_WIDTH: tl.constexpr, WV: tl.constexpr, BLOCK: tl.constexpr, GRAD_LSE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    lead = (tl.program_id(0) // num_blocks).to(tl.int64)  # batch * H + head
    batch, head = lead // num_heads, lead % num_heads
    position = (tl.program_id(0) % num_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < context
    first_row = lead * context
    out += batch * stride_ob + head * stride_oh
    grad_out += batch * stride_gb + head * stride_gh
    out_tile = load_rows(out, position, stride_on, inside, VALUE_WIDTH, WV, True)
    grad_tile = load_rows(grad_out, position, stride_gn, inside, VALUE_WIDTH, WV, True)
    result = tl.sum(out_tile.to(ACCUMULATOR) * grad_tile.to(ACCUMULATOR), 1)  # (BLOCK,)
    if GRAD_LSE:
        result -= tl.load(grad_lse + first_row + position, mask=inside, other=0.0).to(ACCUMULATOR)
    # A query without keys has no gradient, even if a caller that merges by lse passes one for its -inf.
    row_lse = tl.load(lse + first_row + position, mask=inside, other=0.0)
    result = tl.where(row_lse == float("-inf"), 0.0, result)
    address = per_query + ((first_row + position) * 2)[:, None] + tl.arange(0, 2)[None, :]
    tl.store(address, tl.join(row_lse * LOG2E, result), mask=inside[:, None])


@triton.jit(do_not_specialize=COUNTS)
def dkdv_kernel(
    q, k, v, grad_out,
    per_query,  # (B, H, N, 2)
    workspace,  # (B, H, R, D + Dv) accumulator dtype, R rows of all sources
    dk, dv, table, data, source_table, source_data,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dvb, stride_dvh, stride_dvn,
    num_heads, context, num_tiles, num_slices,
    slice_rows,  # workspace rows of one slice
    workspace_base,  # first row of this pass
    workspace_rows,  # R
    num_sources,
    table_stride,  # of a batch entry; 0 if all have the same
    source_stride,  # likewise
    SCALE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BOUNDS: tl.constexpr, EARLIER: tl.constexpr, GROUP: tl.constexpr, DOUBLINGS: tl.constexpr,
    FINAL: tl.constexpr, SOURCES: tl.constexpr, SOURCE_FORM: tl.constexpr, ROUND_BF16: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    # Heads vary fastest, then slices of a tile, so that the longest programs, those of the first tiles, start first.
    num_leads = tl.num_programs(0) // (num_tiles * num_slices)
    lead = (tl.program_id(0) % num_leads).to(tl.int64)  # batch * H + head
    part = tl.program_id(0) // num_leads % num_slices
    tile = tl.program_id(0) // num_leads // num_slices
    batch, head = lead // num_heads, lead % num_heads
    fields = table + batch * table_stride + head * NUM_FIELDS
    first_row, last_row = tile_bounds(tile, fields)
    if first_row > last_row:
        return
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head // GROUP * stride_kh
    v += batch * stride_vb + head // GROUP * stride_vh
    grad_out += batch * stride_gb + head * stride_gh
    per_query += lead * context * 2
    # This slice has the tiles begin <= number < stop of queries.
    origin, end, count, full_first, full_last = visited_tiles(first_row, last_row, fields, data, BLOCK_Q, BOUNDS)
    share, remainder = count // num_slices, count % num_slices  # the first slices get one tile more
    begin = part * share + tl.minimum(part, remainder)
    stop = begin + share + (part < remainder).to(tl.int32)
    if EARLIER > 0:  # any tile may have pairs of an earlier part
        full_first, full_last = stop, stop
    full_first = tl.minimum(tl.maximum(full_first, begin), stop)
    full_last = tl.minimum(tl.maximum(full_last, full_first), stop)
    row, inside, position = tile_rows(first_row, last_row, fields, data, BLOCK_K, ROWS)
    k_tile = load_rows(k, position, stride_kn, inside, WIDTH, W, True)
    v_tile = load_rows(v, position, stride_vn, inside, VALUE_WIDTH, WV, True)
    dk_tile = tl.zeros((BLOCK_K, W), ACCUMULATOR)
    dv_tile = tl.zeros((BLOCK_K, WV), ACCUMULATOR)
    query_fold = load_fold(fields + COLUMN_FOLD, COLUMNS)
    query_list = data + tl.load(fields + COLUMN_LIST)
    low, high = intervals(row, inside, fields, data, BOUNDS)  # (BLOCK_K,)
    earlier_list = data + tl.load(fields + EARLIER_LIST)
    num_full = full_last - full_first
    for PARTIAL in tl.static_range(EARLIER > 0, 2):  # full tiles, then those with a mask
        if PARTIAL:
            first_turn, last_turn = begin, stop - num_full
        else:
            first_turn, last_turn = full_first, full_last
        for turn in range(first_turn, last_turn):
            number = tl.where(turn < full_first, turn, turn + num_full) if PARTIAL else turn
            first = origin + number * BLOCK_Q
            column = first + tl.arange(0, BLOCK_Q)
            exists = column < end
            query = original_positions(column, exists, query_fold, query_list, COLUMNS, PARTIAL)  # (BLOCK_Q,)
            q_tile = load_rows(q, query, stride_qn, exists, WIDTH, W, PARTIAL)  # (BLOCK_Q, W)
            row_lse, row_delta = load_pairs(per_query, query, exists, BLOCK_Q, DOUBLINGS, PARTIAL)
            # Scores are transposed, so that no product needs P or dS transposed.
            s = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")  # (BLOCK_K, BLOCK_Q)
            p = tl.exp2(s * (SCALE * LOG2E) - row_lse[None, :])
            if PARTIAL:
                allowed = allowed_columns(first, low, high, BLOCK_Q)
                if EARLIER > 0:
                    allowed = without_earlier(
                        allowed, query[None, :], exists[None, :], position[:, None], inside[:, None],
                        earlier_list, context, EARLIER,
                    )  # fmt: skip
                p = tl.where(allowed, p, 0.0)
            grad_tile = load_rows(grad_out, query, stride_gn, exists, VALUE_WIDTH, WV, PARTIAL)  # (BLOCK_Q, WV)
            narrow_p = narrow(p, grad_tile.dtype, ROUND_BF16)
            dv_tile = tl.dot(narrow_p, grad_tile, dv_tile, input_precision="ieee", out_dtype=ACCUMULATOR)
            dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision="ieee")  # (BLOCK_K, BLOCK_Q)
            ds = narrow(p * (dp - row_delta[None, :]) * SCALE, q_tile.dtype, ROUND_BF16)
            dk_tile = tl.dot(ds, q_tile, dk_tile, input_precision="ieee", out_dtype=ACCUMULATOR)

    dk += batch * stride_dkb + head * stride_dkh
    dv += batch * stride_dvb + head * stride_dvh
    workspace += lead * workspace_rows * (WIDTH + VALUE_WIDTH)
    head_sources = source_table + batch * source_stride + head * (num_sources * NUM_SOURCE_FIELDS)
    first_row, last_row = tile_bounds(tile, fields)  # recomputed, to free registers during the visits
    row, inside, position = tile_rows(first_row, last_row, fields, data, BLOCK_K, ROWS)
    store_sums(
        dk_tile, dv_tile, row, inside, position, dk, dv, workspace, workspace_base + part * slice_rows,
        (head_sources, source_data, num_sources), (stride_dkn, stride_dvn),
        WIDTH, W, VALUE_WIDTH, WV, FINAL, SOURCES, SOURCE_FORM,
    )  # fmt: skip


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
        earlier_list = data + tl.load(entry + EARLIER_LIST)
        if EARLIER[segment] > 0:  # any tile may have pairs of an earlier part
            full_first, full_last = count, count
        num_full = full_last - full_first
        for PARTIAL in tl.static_range(EARLIER[segment] > 0, 2):  # full tiles, then those with a mask
            if PARTIAL:
                begin, stop = 0, count - num_full
            else:
                begin, stop = full_first, full_last
            for turn in range(begin, stop):
                number = tl.where(turn < full_first, turn, turn + num_full) if PARTIAL else turn
                first = origin + number * BLOCK_K
                column = first + tl.arange(0, BLOCK_K)
                exists = column < end
                key = original_positions(column, exists, key_fold, key_list, COLUMNS[segment], PARTIAL)  # (BLOCK_K,)
                k_tile = load_rows(k, key, stride_kn, exists, WIDTH, W, PARTIAL)  # (BLOCK_K, W)
                v_tile = load_rows(v, key, stride_vn, exists, VALUE_WIDTH, WV, PARTIAL)  # (BLOCK_K, WV)
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK_Q, BLOCK_K)
                p = tl.exp2(s * (SCALE * LOG2E) - row_lse[:, None])
                if PARTIAL:
                    allowed = allowed_columns(first, low, high, BLOCK_K)
                    if EARLIER[segment] > 0:
                        allowed = without_earlier(
                            allowed, position[:, None], inside[:, None], key[None, :], exists[None, :],
                            earlier_list, context, EARLIER[segment],
                        )  # fmt: skip
                    p = tl.where(allowed, p, 0.0)
                dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")  # (BLOCK_Q, BLOCK_K)
                ds = narrow(p * (dp - row_delta[:, None]) * SCALE, k_tile.dtype, ROUND_BF16)
                dq_tile = tl.dot(ds, k_tile, dq_tile, input_precision="ieee", out_dtype=ACCUMULATOR)

    dq += batch * stride_dqb + head * stride_dqh
    first_row, last_row = tile_bounds(tile, fields)  # recomputed, to free registers during the visits
    row, inside, position = tile_rows(first_row, last_row, fields, data, BLOCK_Q, ROWS)
    store_rows(dq, position, stride_dqn, inside, dq_tile, WIDTH, W)
