"""Backward without atomics: delta, then dK and dV by tiles of keys, then dQ by tiles of queries.

Letters: BLOCK_Q queries, BLOCK_K keys, W padded width of q and k, WV padded width of v, N positions, H heads.
With P the weights, recomputed from lse (the merged one, whatever part this pass holds):

    dV = P^T dOut        dP = dOut V^T        dS = scale * P * (dP - delta)        dK = dS^T Q        dQ = dS K

where delta = sum(out * dOut) - dlse of each query. The scale goes into dS before it is rounded to 16 bits, so that
gradients under a loss scale neither overflow nor vanish there. Passes after the first add to the last one's result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.backends.triton.tile import (
    BITSETS,
    COLUMN_ORDER,
    FULL,
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
def delta_kernel(
    out,  # (B, H, N, Dv) contiguous
    grad_out,
    lse,  # (B, H, N)
    grad_lse,  # (B, H, N), where GRAD_LSE
    delta,  # (B, H, N)
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
    grad_out += batch * stride_gb + head * stride_gh
    out_tile = load_rows(out + first_row * VALUE_WIDTH, position, VALUE_WIDTH, inside, VALUE_WIDTH, WV, True)
    grad_tile = load_rows(grad_out, position, stride_gn, inside, VALUE_WIDTH, WV, True)
    result = tl.sum(out_tile.to(ACCUMULATOR) * grad_tile.to(ACCUMULATOR), 1)  # (BLOCK,)
    if GRAD_LSE:
        result -= tl.load(grad_lse + first_row + position, mask=inside, other=0.0).to(ACCUMULATOR)
    # A query without keys has no gradient, whatever a caller that merged by lse hands back for its -inf.
    blind = tl.load(lse + first_row + position, mask=inside, other=0.0) == float("-inf")
    tl.store(delta + first_row + position, tl.where(blind, 0.0, result), mask=inside)


@triton.jit
def _add_to_dkdv(
    dk,  # (BLOCK_K, W)
    dv,  # (BLOCK_K, WV)
    k_tile,  # (BLOCK_K, W)
    v_tile,  # (BLOCK_K, WV)
    q,
    grad_out,
    lse,
    delta,
    stride_q,
    stride_g,
    query_order,
    num_queries,
    query_tile,
    bitsets,
    bitset,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUERIES_ORDERED: tl.constexpr,
    PARTIAL: tl.constexpr,
    ROUND_BF16: tl.constexpr,
):
    """Add what one tile of queries gives; scores are transposed, so that no product needs P or dS transposed."""
    index = query_tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = index < num_queries
    position = original_positions(query_order, index, inside, QUERIES_ORDERED, PARTIAL)  # (BLOCK_Q,)
    q_tile = load_rows(q, position, stride_q, inside, WIDTH, W, PARTIAL)  # (BLOCK_Q, W)
    if PARTIAL:
        row_lse = tl.load(lse + position, mask=inside, other=0.0)
        row_delta = tl.load(delta + position, mask=inside, other=0.0)
    else:
        row_lse, row_delta = tl.load(lse + position), tl.load(delta + position)
    s = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")  # (BLOCK_K, BLOCK_Q)
    p = tl.exp2(s * (SCALE * LOG2E) - (row_lse * LOG2E)[None, :])
    if PARTIAL:
        allowed = allowed_pairs(bitsets, bitset, BLOCK_K, BLOCK_Q)
        p = tl.where(allowed, p, 0.0)
    grad_tile = load_rows(grad_out, position, stride_g, inside, VALUE_WIDTH, WV, PARTIAL)  # (BLOCK_Q, WV)
    dv = tl.dot(narrow(p, grad_tile.dtype, ROUND_BF16), grad_tile, dv, input_precision="ieee", out_dtype=dv.dtype)
    dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision="ieee")  # (BLOCK_K, BLOCK_Q)
    ds = p * (dp - row_delta[None, :]) * SCALE
    dk = tl.dot(narrow(ds, q_tile.dtype, ROUND_BF16), q_tile, dk, input_precision="ieee", out_dtype=dk.dtype)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q,
    k,
    v,
    grad_out,
    lse,
    delta,
    previous_k,  # (B, H, N, D) accumulator dtype: the last pass's sums, where RESUME
    previous_v,  # (B, H, N, Dv)
    dk_out,  # (B, H, N, D) contiguous
    dv_out,  # (B, H, N, Dv) contiguous
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
    stride_gb,
    stride_gh,
    stride_gn,
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
    first_row = lead * context
    q += batch * stride_qb + head * stride_qh
    grad_out += batch * stride_gb + head * stride_gh
    lse += first_row
    delta += first_row
    num_queries = tl.load(layout + NUM_COLUMNS)
    query_order = data + tl.load(layout + COLUMN_ORDER)
    bitsets = data + tl.load(layout + BITSETS)

    row = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = row < tl.load(layout + NUM_ROWS)
    position = original_positions(data + tl.load(layout + ROW_ORDER), row, inside, KEYS_ORDERED, True)
    k_tile = load_rows(k + batch * stride_kb + head * stride_kh, position, stride_kn, inside, WIDTH, W, True)
    v_tile = load_rows(v + batch * stride_vb + head * stride_vh, position, stride_vn, inside, VALUE_WIDTH, WV, True)
    if RESUME:
        dk = load_rows(previous_k + first_row * WIDTH, position, WIDTH, inside, WIDTH, W, True)
        dv = load_rows(previous_v + first_row * VALUE_WIDTH, position, VALUE_WIDTH, inside, VALUE_WIDTH, WV, True)
    else:
        dk = tl.zeros((BLOCK_K, W), ACCUMULATOR)
        dv = tl.zeros((BLOCK_K, WV), ACCUMULATOR)

    full = data + tl.load(layout + FULL) + tile
    for query_tile in range(tl.load(full), tl.load(full + num_row_tiles)):
        dk, dv = _add_to_dkdv(
            dk, dv, k_tile, v_tile, q, grad_out, lse, delta, stride_qn, stride_gn, query_order, num_queries,
            query_tile, bitsets, query_tile,
            SCALE, WIDTH, W, VALUE_WIDTH, WV, BLOCK_Q, BLOCK_K, QUERIES_ORDERED, False, ROUND_BF16,
        )  # fmt: skip
    partial_tile = data + tl.load(layout + PARTIAL_TILE)
    partial_bitset = data + tl.load(layout + PARTIAL_BITSET)
    start = data + tl.load(layout + PARTIAL_START) + tile
    for entry in range(tl.load(start), tl.load(start + 1)):
        dk, dv = _add_to_dkdv(
            dk, dv, k_tile, v_tile, q, grad_out, lse, delta, stride_qn, stride_gn, query_order, num_queries,
            tl.load(partial_tile + entry), bitsets, tl.load(partial_bitset + entry),
            SCALE, WIDTH, W, VALUE_WIDTH, WV, BLOCK_Q, BLOCK_K, QUERIES_ORDERED, True, ROUND_BF16,
        )  # fmt: skip

    store_rows(dk_out + first_row * WIDTH, position, WIDTH, inside, dk, WIDTH, W)
    store_rows(dv_out + first_row * VALUE_WIDTH, position, VALUE_WIDTH, inside, dv, VALUE_WIDTH, WV)


@triton.jit
def _add_to_dq(
    dq,  # (BLOCK_Q, W)
    q_tile,  # (BLOCK_Q, W)
    grad_tile,  # (BLOCK_Q, WV)
    row_lse,  # (BLOCK_Q,) in log2
    row_delta,  # (BLOCK_Q,)
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
    """Add what one tile of keys gives."""
    index = key_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = index < num_keys
    position = original_positions(key_order, index, inside, KEYS_ORDERED, PARTIAL)  # (BLOCK_K,)
    k_tile = load_rows(k, position, stride_k, inside, WIDTH, W, PARTIAL)  # (BLOCK_K, W)
    v_tile = load_rows(v, position, stride_v, inside, VALUE_WIDTH, WV, PARTIAL)  # (BLOCK_K, WV)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK_Q, BLOCK_K)
    p = tl.exp2(s * (SCALE * LOG2E) - row_lse[:, None])
    if PARTIAL:
        allowed = allowed_pairs(bitsets, bitset, BLOCK_Q, BLOCK_K)
        p = tl.where(allowed, p, 0.0)
    dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")  # (BLOCK_Q, BLOCK_K)
    ds = p * (dp - row_delta[:, None]) * SCALE
    return tl.dot(narrow(ds, k_tile.dtype, ROUND_BF16), k_tile, dq, input_precision="ieee", out_dtype=dq.dtype)


@triton.jit
def dq_kernel(
    q,
    k,
    v,
    grad_out,
    lse,
    delta,
    previous,  # (B, H, N, D) accumulator dtype: the last pass's sums, where RESUME
    dq_out,  # (B, H, N, D) contiguous
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
    stride_gb,
    stride_gh,
    stride_gn,
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
    grad_out += batch * stride_gb + head * stride_gh
    q_tile = load_rows(q + batch * stride_qb + head * stride_qh, position, stride_qn, inside, WIDTH, W, True)
    grad_tile = load_rows(grad_out, position, stride_gn, inside, VALUE_WIDTH, WV, True)
    first_row = lead * context
    row_lse = tl.load(lse + first_row + position, mask=inside, other=0.0) * LOG2E
    row_delta = tl.load(delta + first_row + position, mask=inside, other=0.0)
    if RESUME:
        dq = load_rows(previous + first_row * WIDTH, position, WIDTH, inside, WIDTH, W, True)
    else:
        dq = tl.zeros((BLOCK_Q, W), ACCUMULATOR)

    full = data + tl.load(layout + FULL) + tile
    for key_tile in range(tl.load(full), tl.load(full + num_row_tiles)):
        dq = _add_to_dq(
            dq, q_tile, grad_tile, row_lse, row_delta, k, v, stride_kn, stride_vn, key_order, num_keys,
            key_tile, bitsets, key_tile,
            SCALE, WIDTH, W, VALUE_WIDTH, WV, BLOCK_Q, BLOCK_K, KEYS_ORDERED, False, ROUND_BF16,
        )  # fmt: skip
    partial_tile = data + tl.load(layout + PARTIAL_TILE)
    partial_bitset = data + tl.load(layout + PARTIAL_BITSET)
    start = data + tl.load(layout + PARTIAL_START) + tile
    for entry in range(tl.load(start), tl.load(start + 1)):
        dq = _add_to_dq(
            dq, q_tile, grad_tile, row_lse, row_delta, k, v, stride_kn, stride_vn, key_order, num_keys,
            tl.load(partial_tile + entry), bitsets, tl.load(partial_bitset + entry),
            SCALE, WIDTH, W, VALUE_WIDTH, WV, BLOCK_Q, BLOCK_K, KEYS_ORDERED, True, ROUND_BF16,
        )  # fmt: skip
    store_rows(dq_out + first_row * WIDTH, position, WIDTH, inside, dq, WIDTH, W)
