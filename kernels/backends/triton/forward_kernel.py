"""Forward: one program a tile of queries, online softmax over the tiles its layout names.

Letters: BLOCK_Q queries, BLOCK_K keys, W padded width of q and k, WV padded width of v, N positions, H heads.
Scores are in units of log2: s is the bare product, s * scale * log2(e) its exponent of 2; m, the largest exponent so
far, comes from the bare products (the scale is positive), so that the exponent is one fused multiply-add.
A pass after the first takes up the softmax where the last one left it: its output with weight 1 at its logsumexp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.backends.triton.tile import (
    BITSETS,
    COLUMN_ORDER,
    FULL,
    LN2,
    LOG2E,
    NUM_COLUMNS,
    NUM_FIELDS,
    NUM_ROW_TILES,
    NUM_ROWS,
    PARTIAL_BITSET,
    PARTIAL_START,
    PARTIAL_TILE,
    ROW_ORDER,
    allowed_pairs,
    load_rows,
    narrow,
    original_positions,
    store_rows,
)


@triton.jit
def _attend_tile(
    acc,  # (BLOCK_Q, WV)
    m,  # (BLOCK_Q,)
    total,  # (BLOCK_Q,)
    q_tile,  # (BLOCK_Q, W)
    k,
    v,
    stride_k,
    stride_v,
    key_order,
    num_keys,
    key_tile,
    bitsets,
    bitset,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KEYS_ORDERED: tl.constexpr,
    PARTIAL: tl.constexpr,
    ROUND_BF16: tl.constexpr,
):
    """Take one tile of keys into the running output, maximum and sum."""
    index = key_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = index < num_keys
    position = original_positions(key_order, index, inside, KEYS_ORDERED, PARTIAL)  # (BLOCK_K,)
    k_tile = load_rows(k, position, stride_k, inside, WIDTH, W, PARTIAL)  # (BLOCK_K, W)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK_Q, BLOCK_K)
    if PARTIAL:
        allowed = allowed_pairs(bitsets, bitset, BLOCK_Q, BLOCK_K)
        s = tl.where(allowed, s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1) * (SCALE * LOG2E))
    p = tl.exp2(s * (SCALE * LOG2E) - new_m[:, None])  # (BLOCK_Q, BLOCK_K)
    if PARTIAL:
        p = tl.where(allowed, p, 0.0)  # a row that has no key yet has new_m = -inf
    fade = tl.where(m == new_m, 1.0, tl.exp2(m - new_m))
    total = total * fade + tl.sum(p, 1)
    v_tile = load_rows(v, position, stride_v, inside, VALUE_WIDTH, WV, PARTIAL)  # (BLOCK_K, WV)
    acc = acc * fade[:, None]
    acc = tl.dot(narrow(p, v_tile.dtype, ROUND_BF16), v_tile, acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc, new_m, total


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    previous,  # (B, H, N, Dv) accumulator dtype: the last pass's output, where RESUME
    out,  # (B, H, N, Dv)
    lse,  # (B, H, N): in log2 between passes, natural where FINAL
    layout_of,
    table,
    data,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    num_heads,
    context,
    num_tiles,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUERIES_ORDERED: tl.constexpr,
    KEYS_ORDERED: tl.constexpr,
    RESUME: tl.constexpr,
    FINAL: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    tile = tl.program_id(0) % num_tiles
    lead = (tl.program_id(0) // num_tiles).to(tl.int64)  # batch * H + head
    batch, head = lead // num_heads, lead % num_heads
    layout = table + tl.load(layout_of + head) * NUM_FIELDS
    num_row_tiles = tl.load(layout + NUM_ROW_TILES)
    if tile >= num_row_tiles:
        return
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    num_keys = tl.load(layout + NUM_COLUMNS)
    key_order = data + tl.load(layout + COLUMN_ORDER)
    bitsets = data + tl.load(layout + BITSETS)

    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = row < tl.load(layout + NUM_ROWS)
    position = original_positions(data + tl.load(layout + ROW_ORDER), row, inside, QUERIES_ORDERED, True)
    q_tile = load_rows(q + batch * stride_qb + head * stride_qh, position, stride_qn, inside, WIDTH, W, True)
    first_row = lead * context
    if RESUME:
        acc = load_rows(previous + first_row * VALUE_WIDTH, position, VALUE_WIDTH, inside, VALUE_WIDTH, WV, True)
        m = tl.load(lse + first_row + position, mask=inside, other=float("-inf"))
        total = tl.where(m == float("-inf"), 0.0, 1.0).to(ACCUMULATOR)
    else:
        acc = tl.zeros((BLOCK_Q, WV), ACCUMULATOR)
        m = tl.full((BLOCK_Q,), float("-inf"), ACCUMULATOR)
        total = tl.zeros((BLOCK_Q,), ACCUMULATOR)

    full = data + tl.load(layout + FULL) + tile
    for key_tile in range(tl.load(full), tl.load(full + num_row_tiles)):
        acc, m, total = _attend_tile(
            acc, m, total, q_tile, k, v, stride_kn, stride_vn, key_order, num_keys, key_tile, bitsets, key_tile,
            SCALE, WIDTH, W, VALUE_WIDTH, WV, BLOCK_Q, BLOCK_K, KEYS_ORDERED, False, ROUND_BF16,
        )  # fmt: skip
    partial_tile = data + tl.load(layout + PARTIAL_TILE)
    partial_bitset = data + tl.load(layout + PARTIAL_BITSET)
    start = data + tl.load(layout + PARTIAL_START) + tile
    for entry in range(tl.load(start), tl.load(start + 1)):
        acc, m, total = _attend_tile(
            acc, m, total, q_tile, k, v, stride_kn, stride_vn, key_order, num_keys,
            tl.load(partial_tile + entry), bitsets, tl.load(partial_bitset + entry),
            SCALE, WIDTH, W, VALUE_WIDTH, WV, BLOCK_Q, BLOCK_K, KEYS_ORDERED, True, ROUND_BF16,
        )  # fmt: skip

    total = tl.where(total == 0.0, 1.0, total)  # no key: output 0, and m = -inf is the logsumexp
    store_rows(out + first_row * VALUE_WIDTH, position, VALUE_WIDTH, inside, acc / total[:, None], VALUE_WIDTH, WV)
    log2_sum = m + tl.log2(total)
    tl.store(lse + first_row + position, log2_sum * LN2 if FINAL else log2_sum, mask=inside)
