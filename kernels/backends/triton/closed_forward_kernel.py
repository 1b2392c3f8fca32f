"""Forward pass over independent runs: one program computes the softmax of a full block or column.

Letters: BLOCK rows of a run or of several, queries and keys alike, W padded width of q and k, WV padded width of v,
N positions, H heads.
A part is *closed* if each run of rows reads exactly its own positions (``forms.Bounds``), so no row has a second tile:
q, k and v are loaded together, and there is no state between tiles. ``forward_kernel`` describes the units, and
how a pass continues the one before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longstride.kernels.backends.triton.tile import (
    COUNTS,
    LN2,
    LOG2E,
    NUM_FIELDS,
    allowed_columns,
    intervals,
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
