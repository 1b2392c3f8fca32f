"""Backward without atomics, first and second of three: delta, then dK and dV by tiles of keys.

Letters: BLOCK queries of delta, BLOCK_Q queries, BLOCK_K keys, W padded width of q and k, WV padded width of v,
N positions, H heads.
With P the weights, recomputed from lse (that of the whole pattern, whatever parts this pass holds):

    delta = sum(out * dOut) - dLse
    dV = P^T dOut        dP = dOut V^T        dS = scale * P * (dP - delta)        dK = dS^T Q        dQ = dS K

The scale goes into dS before it is rounded to 16 bits, so that gradients under a loss scale neither overflow nor vanish
there. Each pass writes its sums into its rows of a workspace, one set for each slice of queries that it is split into.
The last pass adds them up in a fixed order as it finishes each key. Where the last pass does not hold every key, or is
split itself, it writes to the workspace too and ``gather_kernel`` adds up.
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
    NUM_SOURCE_FIELDS,
    intervals,
    load_fold,
    load_rows,
    load_tile,
    narrow,
    original_positions,
    source_rows,
    store_rows,
    tile_bounds,
    tile_rows,
    visited_tiles,
    without_earlier,
)


@triton.jit(do_not_specialize=COUNTS)
def delta_kernel(
    out,
    grad_out,
    lse,  # (B, H, N)
    grad_lse,  # (B, H, N), where GRAD_LSE
    delta,  # (B, H, N)
    stride_ob,
    stride_oh,
    stride_on,
    stride_gb,
    stride_gh,
    stride_gn,
    num_heads,
    context,
    num_blocks,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
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
    # A query without keys has no gradient, whatever gradient a caller that merges by lse gives its -inf.
    blind = tl.load(lse + first_row + position, mask=inside, other=0.0) == float("-inf")
    tl.store(delta + first_row + position, tl.where(blind, 0.0, result), mask=inside)


@triton.jit
def _add_to_dkdv(
    dk,  # (BLOCK_K, W)
    dv,  # (BLOCK_K, WV)
    k_tile,  # (BLOCK_K, W)
    v_tile,  # (BLOCK_K, WV)
    q,  # of this batch entry and head, or a descriptor of all
    grad_out,
    lse,
    delta,
    batch,
    head,
    stride_q,
    stride_g,
    first,  # column of the tile's first query
    end,
    low,  # (BLOCK_K,)
    high,
    query_fold,
    query_list,
    earlier,  # what ``without_earlier`` needs to know of the rows
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    QUERIES: tl.constexpr,
    SHAPE: tl.constexpr,
    PARTIAL: tl.constexpr,
    EARLIER: tl.constexpr,
    ROUND_BF16: tl.constexpr,
):
    """Add what one tile of queries gives; scores are transposed, so that no product needs P or dS transposed."""
    column = first + tl.arange(0, BLOCK_Q)
    inside = column < end
    position = original_positions(column, inside, query_fold, query_list, QUERIES, PARTIAL)  # (BLOCK_Q,)
    q_tile = load_tile(
        q, batch, head, first, position, stride_q, inside, query_fold, WIDTH, W, BLOCK_Q, SHAPE, PARTIAL
    )  # (BLOCK_Q, W)
    if PARTIAL:
        row_lse = tl.load(lse + position, mask=inside, other=0.0)
        row_delta = tl.load(delta + position, mask=inside, other=0.0)
    else:
        row_lse, row_delta = tl.load(lse + position), tl.load(delta + position)
    s = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")  # (BLOCK_K, BLOCK_Q)
    p = tl.exp2(s * (SCALE * LOG2E) - (row_lse * LOG2E)[None, :])
    if PARTIAL:
        allowed = (column[None, :] >= low[:, None]) & (column[None, :] < high[:, None])
        if EARLIER > 0:
            rows, exist, lists, context = earlier
            allowed = without_earlier(
                allowed, position[None, :], inside[None, :], rows[:, None], exist[:, None], lists, context, EARLIER
            )  # fmt: skip
        p = tl.where(allowed, p, 0.0)
    grad_tile = load_tile(
        grad_out, batch, head, first, position, stride_g, inside, query_fold, VALUE_WIDTH, WV, BLOCK_Q, SHAPE, PARTIAL
    )  # (BLOCK_Q, WV)
    dv = tl.dot(narrow(p, grad_tile.dtype, ROUND_BF16), grad_tile, dv, input_precision="ieee", out_dtype=dv.dtype)
    dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision="ieee")  # (BLOCK_K, BLOCK_Q)
    ds = p * (dp - row_delta[None, :]) * SCALE
    dk = tl.dot(narrow(ds, q_tile.dtype, ROUND_BF16), q_tile, dk, input_precision="ieee", out_dtype=dk.dtype)
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def dkdv_kernel(
    q,
    k,
    v,
    grad_out,
    lse,
    delta,
    workspace,  # (B, H, R, D + Dv) accumulator dtype, R rows of all sources
    dk,
    dv,
    table,
    data,
    source_table,
    source_data,
    q_described,  # descriptors of q and grad_out: see ``described``
    grad_described,
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
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    num_heads,
    context,
    num_tiles,
    num_slices,
    slice_rows,  # workspace rows of one slice
    workspace_base,  # the first of this pass
    workspace_rows,  # R
    num_sources,
    table_stride,  # of a batch entry; 0 where all have the same
    source_stride,  # likewise
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BOUNDS: tl.constexpr,
    EARLIER: tl.constexpr,
    GROUP: tl.constexpr,
    SHAPE: tl.constexpr,
    FINAL: tl.constexpr,
    SOURCES: tl.constexpr,
    SOURCE_FORM: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    tile = tl.program_id(0) % num_tiles
    part = tl.program_id(0) // num_tiles % num_slices
    lead = (tl.program_id(0) // num_tiles // num_slices).to(tl.int64)  # batch * H + head
    batch, head = lead // num_heads, lead % num_heads
    fields = table + batch * table_stride + head * NUM_FIELDS
    first_row, last_row = tile_bounds(tile, fields)
    if first_row > last_row:
        return
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head // GROUP * stride_kh
    v += batch * stride_vb + head // GROUP * stride_vh
    grad_out += batch * stride_gb + head * stride_gh
    lse += lead * context
    delta += lead * context

    row, inside, position = tile_rows(first_row, last_row, fields, data, BLOCK_K, ROWS)
    k_tile = load_rows(k, position, stride_kn, inside, WIDTH, W, True)
    v_tile = load_rows(v, position, stride_vn, inside, VALUE_WIDTH, WV, True)
    dk_tile = tl.zeros((BLOCK_K, W), ACCUMULATOR)
    dv_tile = tl.zeros((BLOCK_K, WV), ACCUMULATOR)

    query_fold = load_fold(fields + COLUMN_FOLD, COLUMNS)
    query_list = data + tl.load(fields + COLUMN_LIST)
    low, high = intervals(row, inside, fields, data, BOUNDS)  # (BLOCK_K,)
    origin, end, count, full_first, full_last = visited_tiles(first_row, last_row, fields, data, BLOCK_Q, BOUNDS)
    share, rest = count // num_slices, count % num_slices  # the first slices take one tile more
    begin = part * share + tl.minimum(part, rest)  # the tiles of this slice
    stop = begin + share + (part < rest).to(tl.int32)
    full_first = tl.minimum(tl.maximum(full_first, begin), stop)
    full_last = tl.minimum(tl.maximum(full_last, full_first), stop)
    if SHAPE == 0:
        queries, grads = q, grad_out
    else:
        queries, grads = q_described, grad_described
    batch_index, head_index = batch.to(tl.int32), head.to(tl.int32)
    if EARLIER > 0:  # any tile may hold pairs that an earlier part has
        full_first, full_last = stop, stop
        earlier = (position, inside, data + tl.load(fields + EARLIER_LIST), context)
    else:
        earlier = (position, inside, data, context)
        for number in range(full_first, full_last):
            dk_tile, dv_tile = _add_to_dkdv(
                dk_tile, dv_tile, k_tile, v_tile, queries, grads, lse, delta, batch_index, head_index,
                stride_qn, stride_gn, origin + number * BLOCK_Q, end, low, high, query_fold, query_list, earlier,
                SCALE, WIDTH, W, VALUE_WIDTH, WV, BLOCK_Q, COLUMNS, SHAPE, False, 0, ROUND_BF16,
            )  # fmt: skip
    before = full_first - begin
    for partial in range(before + stop - full_last):
        number = tl.where(partial < before, begin + partial, full_last + partial - before)
        dk_tile, dv_tile = _add_to_dkdv(
            dk_tile, dv_tile, k_tile, v_tile, queries, grads, lse, delta, batch_index, head_index, stride_qn, stride_gn,
            origin + number * BLOCK_Q, end, low, high, query_fold, query_list, earlier,
            SCALE, WIDTH, W, VALUE_WIDTH, WV, BLOCK_Q, COLUMNS, SHAPE, True, EARLIER, ROUND_BF16,
        )  # fmt: skip

    workspace += lead * workspace_rows * (WIDTH + VALUE_WIDTH)
    if FINAL:
        if SOURCES:
            dk_tile, dv_tile = add_sources(
                dk_tile, dv_tile, position, inside, workspace,
                source_table + batch * source_stride + head * (num_sources * NUM_SOURCE_FIELDS),
                source_data, num_sources,
                WIDTH, W, VALUE_WIDTH, WV, SOURCE_FORM,
            )  # fmt: skip
        store_rows(dk + batch * stride_dkb + head * stride_dkh, position, stride_dkn, inside, dk_tile, WIDTH, W)
        store_rows(dv + batch * stride_dvb + head * stride_dvh, position, stride_dvn, inside, dv_tile, VALUE_WIDTH, WV)
    else:
        row = (workspace_base + part * slice_rows + row).to(tl.int64)
        store_rows(workspace, row, WIDTH + VALUE_WIDTH, inside, dk_tile, WIDTH, W)
        store_rows(workspace + WIDTH, row, WIDTH + VALUE_WIDTH, inside, dv_tile, VALUE_WIDTH, WV)


@triton.jit
def add_sources(
    dk,  # (BLOCK_K, W)
    dv,  # (BLOCK_K, WV)
    position,  # (BLOCK_K,)
    inside,
    workspace,
    fields,
    data,
    num_sources,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    FORM: tl.constexpr,
):
    """Add what earlier passes found for these keys, in the order of the passes and slices."""
    for number in range(num_sources):
        row, found = source_rows(position, inside, fields + number * NUM_SOURCE_FIELDS, data, FORM)
        dk += load_rows(workspace, row, WIDTH + VALUE_WIDTH, found, WIDTH, W, True)
        dv += load_rows(workspace + WIDTH, row, WIDTH + VALUE_WIDTH, found, VALUE_WIDTH, WV, True)
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def gather_kernel(
    workspace,  # (B, H, R, D + Dv) accumulator dtype
    dk,
    dv,
    source_table,
    source_data,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    num_heads,
    context,
    num_blocks,
    workspace_rows,
    num_sources,
    source_stride,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK: tl.constexpr,
    SOURCE_FORM: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """dK and dV of every position from the workspace, 0 where no source has it."""
    lead = (tl.program_id(0) // num_blocks).to(tl.int64)  # batch * H + head
    batch, head = lead // num_heads, lead % num_heads
    position = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = position < context
    dk_tile, dv_tile = add_sources(
        tl.zeros((BLOCK, W), ACCUMULATOR), tl.zeros((BLOCK, WV), ACCUMULATOR), position, inside,
        workspace + lead * workspace_rows * (WIDTH + VALUE_WIDTH),
        source_table + batch * source_stride + head * (num_sources * NUM_SOURCE_FIELDS), source_data, num_sources,
        WIDTH, W, VALUE_WIDTH, WV, SOURCE_FORM,
    )  # fmt: skip
    position = position.to(tl.int64)
    store_rows(dk + batch * stride_dkb + head * stride_dkh, position, stride_dkn, inside, dk_tile, WIDTH, W)
    store_rows(dv + batch * stride_dvb + head * stride_dvh, position, stride_dvn, inside, dv_tile, VALUE_WIDTH, WV)


@triton.jit
def groups_kernel(
    dk_by_head,  # (B, H, N, D) contiguous, accumulator dtype: what each head of q gives
    dv_by_head,  # (B, H, N, Dv) likewise
    dk,  # (B, K, N, D), K heads for H = K * GROUP
    dv,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    num_heads,
    context,
    num_blocks,  # of a head of q
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """dK and dV of heads that several heads of q share: their sums, in the order of those heads."""
    lead = (tl.program_id(0) // num_blocks).to(tl.int64)  # batch * H + head
    batch, head = lead // num_heads, lead % num_heads
    shared = head // GROUP
    block = tl.program_id(0) % num_blocks * GROUP + head % GROUP
    position = block * BLOCK + tl.arange(0, BLOCK)
    inside = position < context
    first = (lead - head % GROUP) * context
    dk_tile = tl.zeros((BLOCK, W), ACCUMULATOR)
    dv_tile = tl.zeros((BLOCK, WV), ACCUMULATOR)
    for _ in range(GROUP):
        dk_tile += load_rows(dk_by_head + first * WIDTH, position, WIDTH, inside, WIDTH, W, True)
        dv_tile += load_rows(dv_by_head + first * VALUE_WIDTH, position, VALUE_WIDTH, inside, VALUE_WIDTH, WV, True)
        first += context
    store_rows(dk + batch * stride_dkb + shared * stride_dkh, position, stride_dkn, inside, dk_tile, WIDTH, W)
    store_rows(dv + batch * stride_dvb + shared * stride_dvh, position, stride_dvn, inside, dv_tile, VALUE_WIDTH, WV)
