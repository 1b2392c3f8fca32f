"""Backward of independent runs: dQ, dK and dV of a whole block, or of a whole column, by one program.

Letters: BLOCK rows of a run or of several, queries and keys alike, W padded width of q and k, WV padded width of v,
N positions, H heads.
A part is *closed* where each run of rows reads exactly its own positions (``forms.Bounds``). Then a run needs nothing
twice: five products instead of seven, and q, k, v, out and dOut are read once, which is what bounds such heads.
``dkdv_kernel`` has the equations, and says what *isolated* is, and how the sums of other parts reach the last pass,
which this one is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longstride.kernels.backends.triton.sums_kernel import store_sums
from longstride.kernels.backends.triton.tile import (
    COUNTS,
    ISOLATED_ROWS,
    LOG2E,
    NUM_FIELDS,
    NUM_SOURCE_FIELDS,
    allowed_columns,
    has_nan,
    intervals,
    load_pairs,
    load_rows,
    narrow,
    read_product,
    store_rows,
    tile_bounds,
    tile_rows,
)


@triton.jit
def _load_run(
    first_row,
    last_row,
    tensors,  # q, k, v, out, grad_out, lse and delta of this batch entry and head, the last two as the kernel has them
    fields,
    data,
    strides,  # from a position to the next, of q, k, v, out and grad_out
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RESUME: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """What rows hold: q, k, v and dOut (BLOCK, W or WV), and (BLOCK,) lse in log2, delta, row, inside, position."""
    q, k, v, out, grad_out, lse, delta = tensors
    stride_qn, stride_kn, stride_vn, stride_on, stride_gn = strides
    row, inside, position = tile_rows(first_row, last_row, fields, data, BLOCK, ROWS)
    k_tile = load_rows(k, position, stride_kn, inside, WIDTH, W, True)
    q_tile = load_rows(q, position, stride_qn, inside, WIDTH, W, True)
    grad_tile = load_rows(grad_out, position, stride_gn, inside, VALUE_WIDTH, WV, True)
    v_tile = load_rows(v, position, stride_vn, inside, VALUE_WIDTH, WV, True)
    if RESUME:
        row_lse, row_delta = load_pairs(delta, position, inside, BLOCK, 0, True)
    else:
        row_lse = tl.load(lse + position, mask=inside, other=0.0) * LOG2E
        out_tile = load_rows(out, position, stride_on, inside, VALUE_WIDTH, WV, True)
        row_delta = tl.sum(out_tile.to(ACCUMULATOR) * grad_tile.to(ACCUMULATOR), 1)  # (BLOCK,)
        if GRAD_LSE:
            row_delta -= tl.load(delta + position, mask=inside, other=0.0).to(ACCUMULATOR)
        row_delta = tl.where(row_lse == float("-inf"), 0.0, row_delta)  # a query without keys has no gradient
    return q_tile, k_tile, v_tile, grad_tile, row_lse, row_delta, row, inside, position


@triton.jit
def _isolated_keys(
    begin,  # the first of these rows
    first_row,  # of the tile that they are in
    last_row,
    tensors,  # as for ``_load_run``
    fields,
    data,
    strides,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDS: tl.constexpr,
    RESUME: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """dK (BLOCK, W) and dV (BLOCK, WV) of a few rows of a tile, and those rows."""
    _q, k_tile, v_tile, _grad, _lse, _delta, row, inside, position = _load_run(
        begin, last_row, tensors, fields, data, strides,
        WIDTH, W, VALUE_WIDTH, WV, BLOCK, ROWS, RESUME, GRAD_LSE, ACCUMULATOR,
    )  # fmt: skip
    low, high = intervals(row, inside, fields, data, BOUNDS)
    dk_tile, dv_tile = tl.zeros((BLOCK, W), ACCUMULATOR), tl.zeros((BLOCK, WV), ACCUMULATOR)
    for other in tl.range(first_row, last_row + 1, BLOCK, num_stages=1):
        q_tile, _k, _v, grad_tile, row_lse, row_delta, _row, exist, _position = _load_run(
            other, last_row, tensors, fields, data, strides,
            WIDTH, W, VALUE_WIDTH, WV, BLOCK, ROWS, RESUME, GRAD_LSE, ACCUMULATOR,
        )  # fmt: skip
        allowed = allowed_columns(other, low, high, BLOCK) & exist[None, :]
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")  # (BLOCK, BLOCK)
        p = tl.where(allowed, tl.exp2(s * (SCALE * LOG2E) - row_lse[None, :]), 0.0)
        dv_tile = read_product(p, allowed, grad_tile, dv_tile, ROUND_BF16)
        dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision="ieee")
        ds = tl.where(allowed, p * (dp - row_delta[None, :]) * SCALE, 0.0)
        dk_tile = read_product(ds, allowed, q_tile, dk_tile, ROUND_BF16)
    return dk_tile, dv_tile, row, inside, position


@triton.jit
def _isolated_queries(
    begin,  # the first of these rows
    first_row,  # of the tile that they are in
    last_row,
    tensors,  # as for ``_load_run``
    fields,
    data,
    strides,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDS: tl.constexpr,
    RESUME: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """dQ (BLOCK, W) of a few rows of a tile, which of them exist, and their positions."""
    q_tile, _k, _v, grad_tile, row_lse, row_delta, row, inside, position = _load_run(
        begin, last_row, tensors, fields, data, strides,
        WIDTH, W, VALUE_WIDTH, WV, BLOCK, ROWS, RESUME, GRAD_LSE, ACCUMULATOR,
    )  # fmt: skip
    dq_tile = tl.zeros((BLOCK, W), ACCUMULATOR)
    for other in tl.range(first_row, last_row + 1, BLOCK, num_stages=1):
        _q, k_tile, v_tile, _grad, _lse, _delta, key, exist, _position = _load_run(
            other, last_row, tensors, fields, data, strides,
            WIDTH, W, VALUE_WIDTH, WV, BLOCK, ROWS, RESUME, GRAD_LSE, ACCUMULATOR,
        )  # fmt: skip
        low, high = intervals(key, exist, fields, data, BOUNDS)
        allowed = (row[:, None] >= low[None, :]) & (row[:, None] < high[None, :]) & exist[None, :]
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK, BLOCK)
        p = tl.where(allowed, tl.exp2(s * (SCALE * LOG2E) - row_lse[:, None]), 0.0)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
        ds = tl.where(allowed, p * (dp - row_delta[:, None]) * SCALE, 0.0)
        dq_tile = read_product(ds, allowed, k_tile, dq_tile, ROUND_BF16)
    return dq_tile, inside, position


@triton.jit
def _store_dq(
    dq_tile,  # (BLOCK, W)
    inside,
    position,
    dq,  # of this batch entry and head, likewise previous
    previous,
    stride,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    RESUME: tl.constexpr,
):
    """With what the other parts gave."""
    if RESUME:
        dq_tile += load_rows(previous, position, WIDTH, inside, WIDTH, W, True)
    store_rows(dq, position, stride, inside, dq_tile, WIDTH, W)


@triton.jit(do_not_specialize=COUNTS)
def closed_kernel(
    q,
    k,
    v,
    out,
    grad_out,
    lse,  # (B, H, N)
    delta,  # ``per_query`` (B, H, N, 2), where RESUME; else the gradient of lse (B, H, N), where GRAD_LSE
    previous,  # (B, H, N, D) contiguous, accumulator dtype: dQ of the other parts, where RESUME
    workspace,  # (B, H, R, D + Dv) accumulator dtype: dK and dV of the other parts, where RESUME
    dq,
    dk,
    dv,
    table,
    data,
    source_table,
    source_data,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_on,
    stride_gb,
    stride_gh,
    stride_gn,
    stride_dqb,
    stride_dqh,
    stride_dqn,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    num_heads,
    context,
    num_tiles,
    workspace_rows,  # R
    num_sources,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDS: tl.constexpr,
    GROUP: tl.constexpr,
    RESUME: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    SOURCE_FORM: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    tile = tl.program_id(0) % num_tiles
    lead = (tl.program_id(0) // num_tiles).to(tl.int64)  # batch * H + head
    batch, head = lead // num_heads, lead % num_heads
    fields = table + head * NUM_FIELDS
    first_row, last_row = tile_bounds(tile, fields)
    if first_row > last_row:
        return
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head // GROUP * stride_kh
    v += batch * stride_vb + head // GROUP * stride_vh
    out += batch * stride_ob + head * stride_oh
    grad_out += batch * stride_gb + head * stride_gh
    dq += batch * stride_dqb + head * stride_dqh
    dk += batch * stride_dkb + head * stride_dkh
    dv += batch * stride_dvb + head * stride_dvh
    first = lead * context
    lse += first
    delta += first * 2 if RESUME else first
    previous += first * WIDTH
    workspace += lead * workspace_rows * (WIDTH + VALUE_WIDTH)
    own_sources = source_table + head * (num_sources * NUM_SOURCE_FIELDS)
    tensors = (q, k, v, out, grad_out, lse, delta)
    strides = (stride_qn, stride_kn, stride_vn, stride_on, stride_gn)
    sources, to = (own_sources, source_data, num_sources), (stride_dkn, stride_dvn)

    q_tile, k_tile, v_tile, grad_tile, row_lse, row_delta, row, inside, position = _load_run(
        first_row, last_row, tensors, fields, data, strides,
        WIDTH, W, VALUE_WIDTH, WV, BLOCK, ROWS, RESUME, GRAD_LSE, ACCUMULATOR,
    )  # fmt: skip
    # Transposed, (keys, queries), so that one product alone needs a transposed operand. A key's queries are an interval
    # of rows, and so are a query's keys.
    s = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")  # (BLOCK, BLOCK)
    low, high = intervals(row, inside, fields, data, BOUNDS)  # the queries of each key
    allowed = allowed_columns(first_row, low, high, BLOCK) & inside[None, :]
    p = tl.where(allowed, tl.exp2(s * (SCALE * LOG2E) - row_lse[None, :]), 0.0)
    dv_tile = tl.dot(
        narrow(p, grad_tile.dtype, ROUND_BF16), grad_tile, input_precision="ieee", out_dtype=ACCUMULATOR
    )  # (BLOCK, WV)
    dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision="ieee")  # (BLOCK, BLOCK)
    ds = narrow(p * (dp - row_delta[None, :]) * SCALE, q_tile.dtype, ROUND_BF16)
    dk_tile = tl.dot(ds, q_tile, input_precision="ieee", out_dtype=ACCUMULATOR)  # (BLOCK, W)
    dq_tile = tl.dot(tl.trans(ds), k_tile, input_precision="ieee", out_dtype=ACCUMULATOR)  # (BLOCK, W)

    if has_nan(dk_tile + dq_tile):
        FEW: tl.constexpr = BLOCK if BLOCK < ISOLATED_ROWS else ISOLATED_ROWS
        for begin in tl.range(first_row, last_row + 1, FEW, num_stages=1):
            dk_few, dv_few, few, exist, at = _isolated_keys(
                begin, first_row, last_row, tensors, fields, data, strides,
                SCALE, WIDTH, W, VALUE_WIDTH, WV, FEW, ROWS, BOUNDS, RESUME, GRAD_LSE, ROUND_BF16, ACCUMULATOR,
            )  # fmt: skip
            store_sums(
                dk_few, dv_few, few, exist, at, dk, dv, workspace, 0, sources, to,
                WIDTH, W, VALUE_WIDTH, WV, True, RESUME, SOURCE_FORM,
            )  # fmt: skip
        for begin in tl.range(first_row, last_row + 1, FEW, num_stages=1):
            dq_few, exist, at = _isolated_queries(
                begin, first_row, last_row, tensors, fields, data, strides,
                SCALE, WIDTH, W, VALUE_WIDTH, WV, FEW, ROWS, BOUNDS, RESUME, GRAD_LSE, ROUND_BF16, ACCUMULATOR,
            )  # fmt: skip
            _store_dq(dq_few, exist, at, dq, previous, stride_dqn, WIDTH, W, RESUME)
    else:
        _store_dq(dq_tile, inside, position, dq, previous, stride_dqn, WIDTH, W, RESUME)
        store_sums(
            dk_tile, dv_tile, row, inside, position, dk, dv, workspace, 0, sources, to,
            WIDTH, W, VALUE_WIDTH, WV, True, RESUME, SOURCE_FORM,
        )  # fmt: skip
