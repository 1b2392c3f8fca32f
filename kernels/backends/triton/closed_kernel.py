"""Forward and backward pass over independent runs: one program computes a full block or column.

Letters: BLOCK rows of a run or of several, queries and keys alike, W padded width of q and k, WV padded width of v,
N positions, H heads.
A part is *closed* if each run of rows reads exactly its own positions (``forms.Bounds``), so no row has a second tile:
all rows are loaded together, and there is no state between tiles. ``forward_kernel`` describes the units, and how a
pass continues the one before. In the backward pass five products suffice instead of seven, and q, k, v, out and dOut
are read once, which bounds the time of such heads. ``backward_kernel`` has the equations, and describes how the sums of
other parts reach the last pass, which is this one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longstride.kernels.backends.triton.sums_kernel import store_sums
from longstride.kernels.backends.triton.tile import (
    COUNTS,
    LN2,
    LOG2E,
    NUM_FIELDS,
    NUM_SOURCE_FIELDS,
    allowed_columns,
    intervals,
    load_pairs,
    load_rows,
    narrow,
    store_rows,
    tile_bounds,
    tile_rows,
)


@triton.jit(do_not_specialize=COUNTS)
def closed_forward_kernel(
    q, k, v,
    previous,  # (B, H, N, Dv) contiguous, accumulator dtype: the previous pass's output, if RESUME
    out,
    lse,  # (B, H, N): in log2 between passes, natural if FINAL
    table, data,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on,
    num_heads, context, num_tiles,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BOUNDS: tl.constexpr, GROUP: tl.constexpr, RESUME: tl.constexpr,
    FINAL: tl.constexpr, ROUND_BF16: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % num_tiles
    lead = (tl.program_id(0) // num_tiles).to(tl.int64)  # batch * H + head
    batch, head = lead // num_heads, lead % num_heads
    fields = table + head * NUM_FIELDS
    first_row, last_row = tile_bounds(tile, fields)
    if first_row > last_row:
        return
    row, inside, position = tile_rows(first_row, last_row, fields, data, BLOCK, ROWS)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head // GROUP * stride_kh
    v += batch * stride_vb + head // GROUP * stride_vh
    q_tile = load_rows(q, position, stride_qn, inside, WIDTH, W, True)
    k_tile = load_rows(k, position, stride_kn, inside, WIDTH, W, True)
    v_tile = load_rows(v, position, stride_vn, inside, VALUE_WIDTH, WV, True)
    lse += lead * context
    previous += lead * context * VALUE_WIDTH
    if RESUME:
        acc = load_rows(previous, position, VALUE_WIDTH, inside, VALUE_WIDTH, WV, True)
        m = tl.load(lse + position, mask=inside, other=float("-inf"))
    low, high = intervals(row, inside, fields, data, BOUNDS)  # keys of each query, as rows of this tile
    high = tl.minimum(high, last_row + 1)

    s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK, BLOCK)
    allowed = allowed_columns(first_row, low, high, BLOCK)
    s = tl.where(allowed, s, float("-inf"))
    new_m = tl.max(s, 1) * (SCALE * LOG2E)
    if RESUME:
        new_m = tl.maximum(m, new_m)
    safe_m = tl.where(new_m == float("-inf"), 0.0, new_m)  # for rows without keys, with weights 0
    p = tl.exp2(s * (SCALE * LOG2E) - safe_m[:, None])
    total = tl.sum(p, 1)
    if RESUME:
        fade = tl.exp2(m - safe_m)  # 0 for rows without keys so far
        total += fade
        acc = acc * fade[:, None]
    else:
        acc = tl.zeros((BLOCK, WV), ACCUMULATOR)
    acc = tl.dot(narrow(p, v_tile.dtype, ROUND_BF16), v_tile, acc, input_precision="ieee", out_dtype=ACCUMULATOR)

    # Without keys: output 0 and logsumexp m = -inf. If all scores are -inf: NaN, as in softmax.
    total = tl.where(total == 0.0, tl.where(low < high, float("nan"), 1.0), total)
    out += batch * stride_ob + head * stride_oh
    store_rows(out, position, stride_on, inside, acc * (1.0 / total)[:, None], VALUE_WIDTH, WV)
    log2_sum = new_m + tl.log2(total)
    tl.store(lse + position, log2_sum * LN2 if FINAL else log2_sum, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def closed_kernel(
    q, k, v, out, grad_out,
    lse,  # (B, H, N)
    delta,  # ``per_query`` (B, H, N, 2) if RESUME, else the gradient of lse (B, H, N) if GRAD_LSE
    previous,  # (B, H, N, D) contiguous, accumulator dtype: dQ of the other parts, if RESUME
    workspace,  # (B, H, R, D + Dv) accumulator dtype: dK and dV of the other parts, if RESUME
    dq, dk, dv, table, data, source_table, source_data,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on,
    stride_gb, stride_gh, stride_gn,
    stride_dqb, stride_dqh, stride_dqn,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dvb, stride_dvh, stride_dvn,
    num_heads, context, num_tiles,
    workspace_rows,  # R
    num_sources,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BOUNDS: tl.constexpr, GROUP: tl.constexpr, RESUME: tl.constexpr,
    GRAD_LSE: tl.constexpr, SOURCE_FORM: tl.constexpr, ROUND_BF16: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
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
    head_sources = source_table + head * (num_sources * NUM_SOURCE_FIELDS)

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
    # Transposed, (keys, queries), so that only one product needs a transposed operand. The queries of a key are an
    # interval of rows, as are the keys of a query.
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

    if RESUME:  # add the other parts
        dq_tile += load_rows(previous, position, WIDTH, inside, WIDTH, W, True)
    store_rows(dq, position, stride_dqn, inside, dq_tile, WIDTH, W)
    store_sums(
        dk_tile, dv_tile, row, inside, position, dk, dv, workspace, 0,
        (head_sources, source_data, num_sources), (stride_dkn, stride_dvn),
        WIDTH, W, VALUE_WIDTH, WV, True, RESUME, SOURCE_FORM,
    )  # fmt: skip
