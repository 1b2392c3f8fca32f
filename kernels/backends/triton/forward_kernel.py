"""Forward pass: one program per tile of queries, with an online softmax over the tiles of keys in their intervals.

Letters: BLOCK_Q queries, BLOCK_K keys, W padded width of q and k, WV padded width of v, N positions, H heads.
Scores are in units of log2: s is the unscaled product, and s * scale * log2(e) its exponent of 2. The largest exponent
so far, m, is computed from unscaled products, as the scale is positive. The exponent is then one fused multiply-add. m
starts at the lowest finite number, so that a row without keys so far has weights 0 without a special case. A pass after
the first continues the softmax of the previous one: its output has weight 1 at its logsumexp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longstride.kernels.backends.triton.tile import (
    COLUMN_FOLD,
    COLUMN_LIST,
    COUNTS,
    EARLIER_LIST,
    LN2,
    LOG2E,
    LOWEST,
    NUM_FIELDS,
    intervals,
    load_fold,
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
def forward_kernel(
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
    table_stride,  # of a batch entry; 0 if all have the same
    SCALE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BOUNDS: tl.constexpr, EARLIER: tl.constexpr, GROUP: tl.constexpr,
    RESUME: tl.constexpr, FINAL: tl.constexpr, ROUND_BF16: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles  # late queries read most, so they start first
    lead = (tl.program_id(0) // num_tiles).to(tl.int64)  # batch * H + head
    batch, head = lead // num_heads, lead % num_heads
    fields = table + batch * table_stride + head * (SEGMENTS * NUM_FIELDS)
    first_row, last_row = tile_bounds(tile, fields)
    if first_row > last_row:
        return
    shared = head // GROUP  # the head of k and v
    k += batch * stride_kb + shared * stride_kh
    v += batch * stride_vb + shared * stride_vh
    q += batch * stride_qb + head * stride_qh
    lse += lead * context
    row, inside, position = tile_rows(first_row, last_row, fields, data, BLOCK_Q, ROWS)
    q_tile = load_rows(q, position, stride_qn, inside, WIDTH, W, True)
    if RESUME:
        previous += lead * context * VALUE_WIDTH
        acc = load_rows(previous, position, VALUE_WIDTH, inside, VALUE_WIDTH, WV, True)
        m = tl.load(lse + position, mask=inside, other=float("-inf"))
        total = tl.where(m == float("-inf"), 0.0, 1.0).to(ACCUMULATOR)
        m = tl.where(m == float("-inf"), LOWEST, m)
    else:
        acc = tl.zeros((BLOCK_Q, WV), ACCUMULATOR)
        m = tl.full((BLOCK_Q,), LOWEST, ACCUMULATOR)
        total = tl.zeros((BLOCK_Q,), ACCUMULATOR)

    reads = row < 0
    for segment in tl.static_range(SEGMENTS):
        entry = fields + segment * NUM_FIELDS
        key_fold = load_fold(entry + COLUMN_FOLD, COLUMNS[segment])
        key_list = data + tl.load(entry + COLUMN_LIST)
        low, high = intervals(row, inside, entry, data, BOUNDS[segment])  # (BLOCK_Q,)
        reads = reads | (low < high)
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
                column = origin + number * BLOCK_K + tl.arange(0, BLOCK_K)
                exists = column < end
                key = original_positions(column, exists, key_fold, key_list, COLUMNS[segment], PARTIAL)  # (BLOCK_K,)
                k_tile = load_rows(k, key, stride_kn, exists, WIDTH, W, PARTIAL)  # (BLOCK_K, W)
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK_Q, BLOCK_K)
                if PARTIAL:
                    allowed = (column[None, :] >= low[:, None]) & (column[None, :] < high[:, None])
                    if EARLIER[segment] > 0:
                        allowed = without_earlier(
                            allowed, position[:, None], inside[:, None], key[None, :], exists[None, :],
                            earlier_list, context, EARLIER[segment],
                        )  # fmt: skip
                    s = tl.where(allowed, s, float("-inf"))
                new_m = tl.maximum(m, tl.max(s, 1) * (SCALE * LOG2E))
                p = tl.exp2(s * (SCALE * LOG2E) - new_m[:, None])  # (BLOCK_Q, BLOCK_K)
                fade = tl.exp2(m - new_m)
                total = total * fade + tl.sum(p, 1)
                v_tile = load_rows(v, key, stride_vn, exists, VALUE_WIDTH, WV, PARTIAL)  # (BLOCK_K, WV)
                acc = acc * fade[:, None]
                p = narrow(p, v_tile.dtype, ROUND_BF16)
                acc = tl.dot(p, v_tile, acc, input_precision="ieee", out_dtype=ACCUMULATOR)
                m = new_m

    out += batch * stride_ob + head * stride_oh
    first_row, last_row = tile_bounds(tile, fields)  # recomputed, to free registers during the visits
    row, inside, position = tile_rows(first_row, last_row, fields, data, BLOCK_Q, ROWS)
    empty = total == 0.0  # without keys: output 0, logsumexp -inf; if all scores of a row are -inf, both are NaN
    m = tl.where(empty, float("-inf"), m)
    total = tl.where(empty, tl.where(reads, float("nan"), 1.0), total)
    store_rows(out, position, stride_on, inside, acc / total[:, None], VALUE_WIDTH, WV)
    log2_sum = m + tl.log2(total)
    tl.store(lse + position, log2_sum * LN2 if FINAL else log2_sum, mask=inside)
