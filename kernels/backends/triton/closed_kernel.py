"""Backward of independent runs: dQ, dK and dV of a whole block, or of a whole column, by one program.

Letters: BLOCK rows of a run or of several, queries and keys alike, W padded width of q and k, WV padded width of v,
N positions, H heads.
A part is *closed* where each run of rows reads exactly its own positions (``forms.Bounds``). Then a run needs nothing
twice: five products instead of seven, and q, k, v, out and dOut are read once, which is what bounds such heads.
``dkdv_kernel`` has the equations, and says how the sums of other parts reach the last pass, which this one is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longstride.kernels.backends.triton.dkdv_kernel import add_sources
from longstride.kernels.backends.triton.tile import (
    COUNTS,
    LOG2E,
    NUM_FIELDS,
    NUM_SOURCE_FIELDS,
    intervals,
    load_rows,
    narrow,
    store_rows,
    tile_bounds,
    tile_rows,
)


@triton.jit(do_not_specialize=COUNTS)
def closed_kernel(
    q,
    k,
    v,
    out,
    grad_out,
    lse,  # (B, H, N)
    delta,  # (B, H, N), where RESUME; else the gradient of lse, where GRAD_LSE
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
    row, inside, position = tile_rows(first_row, last_row, fields, data, BLOCK, ROWS)
    k_tile = load_rows(k + batch * stride_kb + head // GROUP * stride_kh, position, stride_kn, inside, WIDTH, W, True)
    q_tile = load_rows(q + batch * stride_qb + head * stride_qh, position, stride_qn, inside, WIDTH, W, True)
    grad_out += batch * stride_gb + head * stride_gh
    grad_tile = load_rows(grad_out, position, stride_gn, inside, VALUE_WIDTH, WV, True)
    v_tile = load_rows(
        v + batch * stride_vb + head // GROUP * stride_vh, position, stride_vn, inside, VALUE_WIDTH, WV, True
    )
    first = lead * context
    row_lse = tl.load(lse + first + position, mask=inside, other=0.0)
    if RESUME:
        row_delta = tl.load(delta + first + position, mask=inside, other=0.0)
    else:
        out += batch * stride_ob + head * stride_oh
        out_tile = load_rows(out, position, stride_on, inside, VALUE_WIDTH, WV, True)
        row_delta = tl.sum(out_tile.to(ACCUMULATOR) * grad_tile.to(ACCUMULATOR), 1)  # (BLOCK,)
        if GRAD_LSE:
            row_delta -= tl.load(delta + first + position, mask=inside, other=0.0).to(ACCUMULATOR)
        row_delta = tl.where(row_lse == float("-inf"), 0.0, row_delta)  # a query without keys has no gradient

    # Transposed, (keys, queries), so that one product alone needs a transposed operand. A key's queries are an interval
    # of rows, and so are a query's keys.
    s = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")  # (BLOCK, BLOCK)
    low, high = intervals(row, inside, fields, data, BOUNDS)  # the queries of each key
    allowed = (row[None, :] >= low[:, None]) & (row[None, :] < high[:, None]) & inside[None, :]
    p = tl.where(allowed, tl.exp2(s * (SCALE * LOG2E) - (row_lse * LOG2E)[None, :]), 0.0)
    dv_tile = tl.dot(
        narrow(p, grad_tile.dtype, ROUND_BF16), grad_tile, input_precision="ieee", out_dtype=ACCUMULATOR
    )  # (BLOCK, WV)
    dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision="ieee")  # (BLOCK, BLOCK)
    ds = narrow(p * (dp - row_delta[None, :]) * SCALE, q_tile.dtype, ROUND_BF16)
    dk_tile = tl.dot(ds, q_tile, input_precision="ieee", out_dtype=ACCUMULATOR)  # (BLOCK, W)
    dq_tile = tl.dot(tl.trans(ds), k_tile, input_precision="ieee", out_dtype=ACCUMULATOR)  # (BLOCK, W)

    if RESUME:
        dq_tile += load_rows(previous + first * WIDTH, position, WIDTH, inside, WIDTH, W, True)
        dk_tile, dv_tile = add_sources(
            dk_tile, dv_tile, position, inside, workspace + lead * workspace_rows * (WIDTH + VALUE_WIDTH),
            source_table + head * (num_sources * NUM_SOURCE_FIELDS), source_data, num_sources,
            WIDTH, W, VALUE_WIDTH, WV, SOURCE_FORM,
        )  # fmt: skip
    store_rows(dq + batch * stride_dqb + head * stride_dqh, position, stride_dqn, inside, dq_tile, WIDTH, W)
    store_rows(dk + batch * stride_dkb + head * stride_dkh, position, stride_dkn, inside, dk_tile, WIDTH, W)
    store_rows(dv + batch * stride_dvb + head * stride_dvh, position, stride_dvn, inside, dv_tile, VALUE_WIDTH, WV)
