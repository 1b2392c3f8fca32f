"""The scores of a learned indexer, and the places of the highest (DeepSeek-V3.2, arXiv 2512.02556).

Letters: B batch, J heads, n queries, M keys, Di width; in kernels BLOCK_Q queries, BLOCK_K keys, W padded width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels.backends import accumulator_dtype
from longstride.kernels.backends.triton.indexed import IS_NVIDIA, launch_kernel, readable
from longstride.kernels.backends.triton.launch_plan import INTERPRETED
from longstride.kernels.backends.triton.tile import load_rows

MOST_PLACES = 8192  # of a row whose scores are in registers


@triton.jit(do_not_specialize=("num_heads", "num_queries", "num_keys", "window"))
def scores_kernel(
    q,  # (B, n, J, Di)
    k,  # (B, M, Di)
    weights,  # (B, n, J)
    scores,  # (B, n, M / POOL), rounded up
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kn,
    num_heads,
    num_queries,  # n
    num_keys,  # M
    window,
    WIDTH: tl.constexpr, W: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, POOL: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """Compute the indexer's scores of a tile, the highest of POOL keys.

    Keys are the rows of the tile, as products of many rows use a GPU best.
    """
    query_tiles, key_tiles = tl.cdiv(num_queries, BLOCK_Q), tl.cdiv(num_keys, BLOCK_K)
    batch = (tl.program_id(0) // query_tiles // key_tiles).to(tl.int64)
    first_query = tl.program_id(0) % query_tiles * BLOCK_Q
    first_key = tl.program_id(0) // query_tiles % key_tiles * BLOCK_K
    query = first_query + tl.arange(0, BLOCK_Q).to(tl.int64)
    key = first_key + tl.arange(0, BLOCK_K).to(tl.int64)
    k_tile = load_rows(k + batch * stride_kb, key, stride_kn, key < num_keys, WIDTH, W, True)  # (BLOCK_K, W)
    q += batch * stride_qb
    weights += (batch * num_queries + query) * num_heads
    total = tl.zeros((BLOCK_K, BLOCK_Q), ACCUMULATOR)
    # No query reads a tile of later keys.
    for head in range(tl.where(first_key <= num_keys - num_queries + first_query + BLOCK_Q - 1, num_heads, 0)):
        q_tile = load_rows(q, query, stride_qn, query < num_queries, WIDTH, W, True)  # (BLOCK_Q, W)
        weight = tl.load(weights + head, mask=query < num_queries, other=0.0).to(ACCUMULATOR)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee", out_dtype=ACCUMULATOR)  # (BLOCK_K, BLOCK_Q)
        total += tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
        q += stride_qh
    row, column = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    last = num_keys - num_queries + first_query + row - first_key  # the position of a query is the last that it reads
    behind = last[None, :] - column[:, None]
    total = tl.where(behind < window, float("inf"), total)
    total = tl.where(behind >= 0, total, float("-inf"))
    if POOL > 1:
        total = tl.max(tl.reshape(total, (BLOCK_K // POOL, POOL, BLOCK_Q)), 1)
    pool, num_pools = tl.arange(0, BLOCK_K // POOL), tl.cdiv(num_keys, POOL)
    scores += (batch * num_queries + first_query) * num_pools + first_key // POOL
    inside = (first_key // POOL + pool < num_pools)[:, None] & (first_query + row < num_queries)[None, :]
    tl.store(scores + row[None, :] * num_pools + pool[:, None], total, mask=inside)


@triton.jit(do_not_specialize=("num_places", "count"))
def highest_kernel(scores, numbers, stride, num_places, count, BLOCK: tl.constexpr):
    """List the places of the highest scores of a row: those above the count-th, and the last ones equal to it."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    score = tl.load(scores + row * stride + place, mask=place < num_places, other=float("-inf"))
    # Bits of fp32 have the order of integers once those of negative numbers are reversed; 0 is added to -0.
    bits = (score + 0.0).to(tl.uint32, bitcast=True)
    code = bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
    bound = tl.zeros((1,), tl.uint32)  # the highest that ``count`` codes reach, bit by bit
    for bit in range(32):
        higher = bound | (tl.full((1,), 0x80000000, tl.uint32) >> bit)
        bound = tl.where(tl.sum((code >= higher).to(tl.int32), 0) >= count, higher, bound)
    above, equal = (code > bound).to(tl.int32), (code == bound).to(tl.int32)
    missing = count - tl.sum(above, 0)
    is_late = tl.sum(equal, 0) - tl.cumsum(equal, 0) < missing  # fewer than that of its equals follow
    chosen = ((above > 0) | ((equal > 0) & is_late)) & (score != float("-inf"))
    listed = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(numbers + row * count + listed, place, mask=chosen)


# Launches


def last_highest(scores: Tensor, count: int) -> Tensor:
    """Return the places of the ``count`` highest of scores (n, W) fp32, W at most ``MOST_PLACES``.

    Of equal ones the later are chosen. (n, count) int32, ascending; then -1 in place of scores of -inf.
    """
    numbers = torch.full((len(scores), count), -1, dtype=torch.int32, device=scores.device)
    arguments = (scores, numbers, scores.stride(0), scores.shape[1], count)
    launch_kernel(highest_kernel, len(scores), arguments, row_tiles(scores.shape[1]))
    return numbers


def index_scores(q: Tensor, k: Tensor, weights: Tensor, first: int, window: int = 0, block: int = 1) -> Tensor:
    """Return the scores sum_j weights_tj relu(q_tj k_s) of an indexer for some queries, without gradient.

    Args:
        q: (B, n, J, Di), of the positions from ``first`` on.
        k: (B, M, Di), of all positions up to the last query: M = first + n.
        weights: (B, n, J).
        first: position of the first query.
        window: a query's last positions, whose scores are inf.
        block: L positions, of which the highest score is asked for.

    Returns:
        (B, n, ⌈M / L⌉) in the accumulator's dtype; -inf where all keys of a block are later than the query.
    """
    (batch, num_queries, num_heads, width), num_keys = q.shape, k.shape[1]
    assert num_keys == first + num_queries, f"{num_keys} keys for {num_queries} queries from {first} on"
    q, k, weights = readable(q), readable(k), readable(weights).contiguous()
    padded = max(16, triton.next_power_of_2(width))
    tiles = score_tiles(padded, q.dtype)
    pool = block if tiles["BLOCK_K"] % block == 0 else 1  # whether a tile has whole blocks
    scores = q.new_empty(batch, num_queries, triton.cdiv(num_keys, pool), dtype=accumulator_dtype(q.dtype))
    programs = batch * triton.cdiv(num_queries, tiles["BLOCK_Q"]) * triton.cdiv(num_keys, tiles["BLOCK_K"])
    strides = (*q.stride()[:3], *k.stride()[:2])
    accumulator = tl.float64 if q.dtype == torch.float64 else tl.float32
    launch_kernel(
        scores_kernel,
        programs,
        (q, k, weights, scores, *strides, num_heads, num_queries, num_keys, window),
        tiles | {"WIDTH": width, "W": padded, "POOL": pool, "ACCUMULATOR": accumulator},
    )
    return scores if pool == block else F.max_pool1d(scores, block, ceil_mode=True)


def score_tiles(width: int, dtype: torch.dtype, is_nvidia: bool = IS_NVIDIA) -> dict[str, int]:
    """Return tiles and options for the scores of a padded width, without spilled registers."""
    stages = 2 if is_nvidia else 1
    if INTERPRETED or dtype.itemsize > 2:
        return {"BLOCK_Q": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": stages}
    if width > 128:
        return {"BLOCK_Q": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": stages}
    return {"BLOCK_Q": 64, "BLOCK_K": 128, "num_warps": 8, "num_stages": stages}


def row_tiles(num_places: int) -> dict[str, int]:
    """Return the tile and options for rows of so many scores, without spilled registers."""
    block = max(16, triton.next_power_of_2(num_places))
    return {"BLOCK": block, "num_warps": min(8, max(1, block // 512)), "num_stages": 1}
