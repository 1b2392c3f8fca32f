"""Attention to the keys that a learned indexer chooses (DeepSeek-V3.2, arXiv 2512.02556), without atomics.

``numbers`` (B, N, T) int32 has the positions that each query reads, for all heads: each once, none later than the
query, and -1 for no position.

Letters: B batch, H heads of q, K heads of k and v, N positions, T numbers of a query, D width of q and k, Dv width of
v; in kernels GROUP = H / K, BLOCK_R heads of a group, BLOCK_K keys, W padded width of q and k, WV padded width of v.
Scores of attention are in units of log2, as in ``forward_kernel``; gradients are those of ``backward_kernel``.

A program has a query, and a group's heads as the rows of its products. It gathers keys and values by their numbers.
For dK and dV, pairs of a query and a key are sorted by key. A program sums over a piece of a key's readers, as some
keys have N of them. A last kernel adds the pieces in order. The host knows only how many pieces there are at most.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longstride.kernels.backends import Saved, accumulator_dtype, empty_like_rows
from longstride.kernels.backends.triton.launch_plan import INTERPRETED, without_warnings
from longstride.kernels.backends.triton.tile import LN2, LOG2E, LOWEST, load_rows, narrow, store_rows

IS_NVIDIA = not (INTERPRETED or torch.version.hip)
PIECE = 512  # readers of a key per program
# Kernels are the same for all sizes.
COUNTS = ("num_heads", "num_positions", "num_numbers", "num_pieces")


@triton.jit
def place(num_heads, num_positions, GROUP: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return batch, head of k and v, query, heads of q (BLOCK_R,) of a program, and which of these exist."""
    BLOCKS: tl.constexpr = (GROUP + BLOCK_R - 1) // BLOCK_R
    lead = (tl.program_id(0) // BLOCKS // num_positions).to(tl.int64)  # batch * K + head of k and v
    query = num_positions - 1 - tl.program_id(0) // BLOCKS % num_positions  # late ones read most
    row = tl.program_id(0) % BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    batch, shared = lead // (num_heads // GROUP), lead % (num_heads // GROUP)
    return batch, shared, query.to(tl.int64), shared * GROUP + row, row < GROUP


@triton.jit
def load_keys(numbers, first, num_numbers, BLOCK_K: tl.constexpr):
    """Return keys (BLOCK_K,) int64 of a query from ``first`` on, and which of them exist."""
    index = first + tl.arange(0, BLOCK_K)
    key = tl.load(numbers + index, mask=index < num_numbers, other=-1).to(tl.int64)
    return key, key >= 0


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q, k, v, out,
    lse,  # (B, H, N)
    numbers,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on,
    num_heads, num_positions, num_numbers,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, ROUND_BF16: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """Compute attention of a query, with an online softmax."""
    batch, shared, query, head, exists = place(num_heads, num_positions, GROUP, BLOCK_R)
    k += batch * stride_kb + shared * stride_kh
    v += batch * stride_vb + shared * stride_vh
    numbers += (batch * num_positions + query) * num_numbers
    q_tile = load_rows(q + batch * stride_qb + query * stride_qn, head, stride_qh, exists, WIDTH, W, True)
    acc = tl.zeros((BLOCK_R, WV), ACCUMULATOR)
    m = tl.full((BLOCK_R,), LOWEST, ACCUMULATOR)
    total = tl.zeros((BLOCK_R,), ACCUMULATOR)
    reads = 0
    for first in range(0, num_numbers, BLOCK_K):
        key, inside = load_keys(numbers, first, num_numbers, BLOCK_K)
        reads |= tl.max(inside.to(tl.int32), 0)
        k_tile = load_rows(k, key, stride_kn, inside, WIDTH, W, True)  # (BLOCK_K, W)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee", out_dtype=ACCUMULATOR) * (SCALE * LOG2E)
        s = tl.where(inside[None, :], s, float("-inf"))  # (BLOCK_R, BLOCK_K)
        new_m = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new_m[:, None])
        fade = tl.exp2(m - new_m)
        total = total * fade + tl.sum(p, 1)
        v_tile = load_rows(v, key, stride_vn, inside, VALUE_WIDTH, WV, True)  # (BLOCK_K, WV)
        p = narrow(p, v_tile.dtype, ROUND_BF16)
        acc = tl.dot(p, v_tile, acc * fade[:, None], input_precision="ieee", out_dtype=ACCUMULATOR)
        m = new_m
    empty = total == 0.0  # without keys: output 0, logsumexp -inf; if all scores of a row are -inf, both are NaN
    m = tl.where(empty, float("-inf"), m)
    total = tl.where(empty, tl.where(reads > 0, float("nan"), 1.0), total)
    out += batch * stride_ob + query * stride_on
    store_rows(out, head, stride_oh, exists, acc / total[:, None], VALUE_WIDTH, WV)
    tl.store(lse + (batch * num_heads + head) * num_positions + query, (m + tl.log2(total)) * LN2, mask=exists)


@triton.jit(do_not_specialize=COUNTS)
def summed_weights_kernel(
    q, k,
    lse,  # (B, H, N)
    numbers,
    weights,  # (B, N, T) accumulator dtype
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    num_heads, num_positions, num_numbers,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """Compute the mean over heads of the weights of BLOCK_K keys of a query."""
    num_blocks = tl.cdiv(num_numbers, BLOCK_K)
    list_number = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch, query = list_number // num_positions, list_number % num_positions
    first = tl.program_id(0) % num_blocks * BLOCK_K
    key, inside = load_keys(numbers + list_number * num_numbers, first, num_numbers, BLOCK_K)
    q += batch * stride_qb + query * stride_qn
    k += batch * stride_kb
    lse += batch * num_heads * num_positions + query
    total = tl.zeros((BLOCK_K,), ACCUMULATOR)
    for shared in range(num_heads // GROUP):
        k_tile = load_rows(k, key, stride_kn, inside, WIDTH, W, True)  # (BLOCK_K, W)
        for block in range(0, GROUP, BLOCK_R):
            row = block + tl.arange(0, BLOCK_R)
            head, exists = (shared * GROUP + row).to(tl.int64), row < GROUP
            q_tile = load_rows(q, head, stride_qh, exists, WIDTH, W, True)
            row_lse = tl.load(lse + head * num_positions, mask=exists, other=0.0) * LOG2E
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee", out_dtype=ACCUMULATOR) * (SCALE * LOG2E)
            total += tl.sum(tl.where(exists[:, None], tl.exp2(s - row_lse[:, None]), 0.0), 0)
        k += stride_kh
    index = first + tl.arange(0, BLOCK_K)
    total = tl.where(inside, total / num_heads, 0.0)
    tl.store(weights + list_number * num_numbers + index, total, mask=index < num_numbers)


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    q, k, v, out, grad_out, dq,
    lse,  # (B, H, N)
    grad_lse,  # (B, H, N), if GRAD_LSE
    delta,  # (B, H, N)
    numbers,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on,
    stride_gb, stride_gh, stride_gn,
    stride_dqb, stride_dqh, stride_dqn,
    num_heads, num_positions, num_numbers,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, GRAD_LSE: tl.constexpr,
    ROUND_BF16: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """Compute delta and dQ of a query."""
    batch, shared, query, head, exists = place(num_heads, num_positions, GROUP, BLOCK_R)
    k += batch * stride_kb + shared * stride_kh
    v += batch * stride_vb + shared * stride_vh
    numbers += (batch * num_positions + query) * num_numbers
    row = (batch * num_heads + head) * num_positions + query
    grad_tile = load_rows(
        grad_out + batch * stride_gb + query * stride_gn, head, stride_gh, exists, VALUE_WIDTH, WV, True
    )  # fmt: skip
    out_tile = load_rows(out + batch * stride_ob + query * stride_on, head, stride_oh, exists, VALUE_WIDTH, WV, True)
    row_delta = tl.sum(out_tile.to(ACCUMULATOR) * grad_tile.to(ACCUMULATOR), 1)
    if GRAD_LSE:
        row_delta -= tl.load(grad_lse + row, mask=exists, other=0.0).to(ACCUMULATOR)
    row_lse = tl.load(lse + row, mask=exists, other=0.0) * LOG2E
    # A query without keys has no gradient, even if a caller that merges by lse passes one for its -inf.
    row_delta = tl.where(row_lse == float("-inf"), 0.0, row_delta)
    tl.store(delta + row, row_delta, mask=exists)
    q_tile = load_rows(q + batch * stride_qb + query * stride_qn, head, stride_qh, exists, WIDTH, W, True)
    dq_tile = tl.zeros((BLOCK_R, W), ACCUMULATOR)
    for first in range(0, num_numbers, BLOCK_K):
        key, inside = load_keys(numbers, first, num_numbers, BLOCK_K)
        k_tile = load_rows(k, key, stride_kn, inside, WIDTH, W, True)  # (BLOCK_K, W)
        v_tile = load_rows(v, key, stride_vn, inside, VALUE_WIDTH, WV, True)  # (BLOCK_K, WV)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee", out_dtype=ACCUMULATOR) * (SCALE * LOG2E)
        p = tl.where(inside[None, :], tl.exp2(s - row_lse[:, None]), 0.0)  # (BLOCK_R, BLOCK_K)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee", out_dtype=ACCUMULATOR)
        ds = narrow(p * (dp - row_delta[:, None]) * SCALE, k_tile.dtype, ROUND_BF16)
        dq_tile = tl.dot(ds, k_tile, dq_tile, input_precision="ieee", out_dtype=ACCUMULATOR)
    store_rows(dq + batch * stride_dqb + query * stride_dqn, head, stride_dqh, exists, dq_tile, WIDTH, W)


@triton.jit(do_not_specialize=COUNTS)
def pieces_kernel(
    q, k, v, grad_out,
    lse, delta,  # (B, H, N)
    readers,  # (B, N * T) int32: queries, sorted by the key that they read
    starts,  # (B, N + 1): the first reader of each key
    ends,  # (B, N): after the last piece of each key
    owners,  # (B, P): the key of each piece; N for none
    sums,  # (B, K, P, D + Dv) accumulator dtype
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    num_heads, num_positions, num_numbers, num_pieces,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """Sum dK and dV over a piece of a key's readers; each row of a tile is a reader and a head of q."""
    num_shared = num_heads // GROUP
    piece = tl.program_id(0) // num_shared % num_pieces
    shared = (tl.program_id(0) % num_shared).to(tl.int64)
    batch = (tl.program_id(0) // num_shared // num_pieces).to(tl.int64)
    key = tl.load(owners + batch * num_pieces + piece)
    if key >= num_positions:
        return
    starts += batch * (num_positions + 1) + key
    first, end = tl.load(starts), tl.load(starts + 1)
    later = tl.load(ends + batch * num_positions + key) - piece  # pieces of this key from this one on
    first += (tl.cdiv(end - first, PIECE) - later) * PIECE
    num_rows = (tl.minimum(first + PIECE, end) - first).to(tl.int32) * GROUP
    readers += batch * num_positions * num_numbers + first
    q += batch * stride_qb + shared * GROUP * stride_qh
    grad_out += batch * stride_gb + shared * GROUP * stride_gh
    lead = (batch * num_heads + shared * GROUP) * num_positions
    column, value_column = tl.arange(0, W), tl.arange(0, WV)
    k += batch * stride_kb + shared * stride_kh + key * stride_kn
    v += batch * stride_vb + shared * stride_vh + key * stride_vn
    k_row = tl.load(k + column, mask=column < WIDTH, other=0.0).to(ACCUMULATOR)
    v_row = tl.load(v + value_column, mask=value_column < VALUE_WIDTH, other=0.0).to(ACCUMULATOR)
    dk_tile = tl.zeros((BLOCK, W), ACCUMULATOR)  # summed over its rows at the end
    dv_tile = tl.zeros((BLOCK, WV), ACCUMULATOR)
    for first_row in range(0, num_rows, BLOCK):
        row = first_row + tl.arange(0, BLOCK)
        inside = row < num_rows
        query = tl.load(readers + row // GROUP, mask=inside, other=0).to(tl.int64)
        head = (row % GROUP).to(tl.int64)
        q_tile = load_rows(q, head * stride_qh + query * stride_qn, 1, inside, WIDTH, W, True).to(ACCUMULATOR)
        grad_tile = load_rows(
            grad_out, head * stride_gh + query * stride_gn, 1, inside, VALUE_WIDTH, WV, True
        ).to(ACCUMULATOR)  # fmt: skip
        place = lead + head * num_positions + query
        row_lse = tl.load(lse + place, mask=inside, other=0.0) * LOG2E
        row_delta = tl.load(delta + place, mask=inside, other=0.0)
        s = tl.sum(q_tile * k_row[None, :], 1) * (SCALE * LOG2E)
        p = tl.where(inside, tl.exp2(s - row_lse), 0.0)  # (BLOCK,)
        ds = p * (tl.sum(grad_tile * v_row[None, :], 1) - row_delta) * SCALE
        dk_tile += ds[:, None] * q_tile
        dv_tile += p[:, None] * grad_tile
    sums += ((batch * num_shared + shared) * num_pieces + piece) * (WIDTH + VALUE_WIDTH)
    tl.store(sums + column, tl.sum(dk_tile, 0), mask=column < WIDTH)
    tl.store(sums + WIDTH + value_column, tl.sum(dv_tile, 0), mask=value_column < VALUE_WIDTH)


@triton.jit(do_not_specialize=COUNTS)
def keys_kernel(
    dk, dv, starts, ends, sums,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    num_heads, num_positions, num_numbers, num_pieces,
    WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr, GROUP: tl.constexpr,
    PIECE: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """Add the pieces of a key."""
    key = (tl.program_id(0) % num_positions).to(tl.int64)
    lead = (tl.program_id(0) // num_positions).to(tl.int64)  # batch * K + head of k and v
    batch, shared = lead // (num_heads // GROUP), lead % (num_heads // GROUP)
    starts += batch * (num_positions + 1) + key
    end = tl.load(ends + batch * num_positions + key)
    num_own = tl.cdiv(tl.load(starts + 1) - tl.load(starts), PIECE)
    sums += (lead * num_pieces + end - num_own) * (WIDTH + VALUE_WIDTH)
    column, value_column = tl.arange(0, W), tl.arange(0, WV)
    dk_row, dv_row = tl.zeros((W,), ACCUMULATOR), tl.zeros((WV,), ACCUMULATOR)
    for _ in range(num_own):
        dk_row += tl.load(sums + column, mask=column < WIDTH, other=0.0)
        dv_row += tl.load(sums + WIDTH + value_column, mask=value_column < VALUE_WIDTH, other=0.0)
        sums += WIDTH + VALUE_WIDTH
    dk += batch * stride_kb + shared * stride_kh + key * stride_kn
    dv += batch * stride_vb + shared * stride_vh + key * stride_vn
    tl.store(dk + column, dk_row.to(dk.dtype.element_ty), mask=column < WIDTH)
    tl.store(dv + value_column, dv_row.to(dv.dtype.element_ty), mask=value_column < VALUE_WIDTH)


# Launches


def indexed_forward(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention of each query to the keys in ``numbers``.

    Args:
        q: (B, H, N, D).
        k, v: (B, K, N, ·); K divides H.
        numbers: (B, N, T) int32.
        scale: factor of the scores.

    Returns:
        out (B, H, N, Dv) in v's dtype and the logsumexp (B, H, N); 0 and -inf of a query without keys.
    """
    call = _Call(q, k, v, numbers, scale)
    out = empty_like_rows(call.v, heads=q.shape[1])
    lse = q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))
    call.launch(forward_kernel, call.num_queries, (call.q, call.k, call.v, out), (lse, call.numbers))
    return out.to(v.dtype), lse


def summed_weights(q: Tensor, k: Tensor, lse: Tensor, numbers: Tensor, scale: float) -> Tensor:
    """Return the attention weights (B, N, T) of the keys in ``numbers``, averaged over heads; 0 for -1.

    Args:
        q, k, numbers, scale: of ``indexed_forward``.
        lse: its result.
    """
    call = _Call(q, k, k, numbers, scale)
    weights = q.new_empty(numbers.shape, dtype=accumulator_dtype(q.dtype))
    batch, num_positions, num_numbers = numbers.shape
    programs = batch * num_positions * triton.cdiv(num_numbers, call.constants["BLOCK_K"])
    call.launch(summed_weights_kernel, programs, (call.q, call.k), (lse.contiguous(), call.numbers, weights))
    return weights


def indexed_backward(saved: Saved, numbers: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v, with the same bits on every run. The host does not wait for the device."""
    call = _Call(saved.q, saved.k, saved.v, numbers, scale)
    out, grad_out = readable(saved.out), readable(saved.grad_out)
    lse = saved.lse.contiguous()
    grad_lse, delta = lse if saved.grad_lse is None else saved.grad_lse.contiguous(), torch.empty_like(lse)
    dq, dk, dv = (empty_like_rows(x) for x in (call.q, call.k, call.v))
    call.constants["GRAD_LSE"] = saved.grad_lse is not None
    call.launch(
        dq_kernel,
        call.num_queries,
        (call.q, call.k, call.v, out, grad_out, dq),
        (lse, grad_lse, delta, call.numbers),
    )

    batch, shared, num_positions, _ = saved.k.shape
    keys, order = call.numbers.flatten(1).sort(dim=-1, stable=True)
    readers = (order // max(1, numbers.shape[2])).int()
    position = torch.arange(num_positions + 1, dtype=torch.int32, device=numbers.device)
    starts = torch.searchsorted(keys, position.expand(batch, -1).contiguous())
    ends = ((starts.diff(dim=-1) + PIECE - 1) // PIECE).cumsum(-1)
    num_pieces = keys.shape[1] // PIECE + num_positions  # at most
    piece = torch.arange(num_pieces, device=numbers.device)
    owners = torch.searchsorted(ends, piece.expand(batch, -1).contiguous(), right=True)
    sums = delta.new_empty(batch, shared, num_pieces, saved.k.shape[3] + saved.v.shape[3])
    rows = (call.q, call.k, call.v, grad_out)
    tensors = (lse, delta, readers, starts, ends, owners, sums)
    call.launch(pieces_kernel, batch * shared * num_pieces, rows, tensors, num_pieces)
    call.launch(keys_kernel, batch * shared * num_positions, (dk, dv), (starts, ends, sums), num_pieces)
    return dq.to(saved.q.dtype), dk.to(saved.k.dtype), dv.to(saved.v.dtype)


def tiles_for(group: int, width: int, dtype: torch.dtype, is_nvidia: bool = IS_NVIDIA) -> dict[str, int]:
    """Return tiles and options for groups of so many heads of a padded width, without spilled registers."""
    is_small = dtype.itemsize == 2 and width <= 128
    return {
        "BLOCK_R": min(32 if is_small else 16, max(16, triton.next_power_of_2(group))),
        "BLOCK_K": 16 if INTERPRETED or dtype.itemsize > 2 else 64 if is_small else 32,
        "BLOCK": max(16, 2048 // width),
        "num_warps": 4,
        "num_stages": 3 if is_nvidia else 1,  # numbers are loaded before keys, both in advance
    }


class _Call:
    """The inputs of a call as kernels read them, and what all its launches share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, scale: float) -> None:
        self.q, self.k, self.v = map(readable, (q, k, v))
        self.numbers = numbers.contiguous()
        group = q.shape[1] // k.shape[1]
        widths = [max(16, triton.next_power_of_2(rows.shape[3])) for rows in (q, v)]
        self.constants: dict[str, Any] = {
            "SCALE": scale,
            "WIDTH": q.shape[3],
            "W": widths[0],
            "VALUE_WIDTH": v.shape[3],
            "WV": widths[1],
            "GROUP": group,
            "PIECE": PIECE,
            "ROUND_BF16": INTERPRETED and q.dtype == torch.bfloat16,
            "ACCUMULATOR": tl.float64 if q.dtype == torch.float64 else tl.float32,
            **tiles_for(group, max(widths), q.dtype),
        }
        row_blocks = triton.cdiv(group, self.constants["BLOCK_R"])
        self.num_queries = q.shape[0] * k.shape[1] * q.shape[2] * row_blocks  # programs

    def launch(
        self, kernel: Any, programs: int, rows: tuple[Tensor, ...], tensors: tuple[Tensor, ...], *sizes: int
    ) -> None:
        """Launch a kernel, whose parameters are ``rows``, ``tensors``, strides, sizes and constants.

        Args:
            kernel: a Triton kernel.
            programs: how many to start.
            rows: (B, ·, N, ·) of any strides with adjacent columns.
            tensors: contiguous.
            *sizes: after the numbers of heads, positions and numbers.
        """
        strides = [stride for tensor in rows for stride in tensor.stride()[:3]]
        counts = (self.q.shape[1], *self.numbers.shape[1:], *sizes)
        launch_kernel(kernel, programs, (*rows, *tensors, *strides, *counts), self.constants)


def launch_kernel(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launch a kernel on the first argument's device, with those of the constants that it has."""
    if programs == 0:
        return
    known = (*kernel.arg_names, "num_warps", "num_stages")
    with without_warnings() if INTERPRETED else torch.cuda.device(arguments[0].device):
        kernel[(programs,)](*arguments, **{name: value for name, value in constants.items() if name in known})


def readable(rows: Tensor) -> Tensor:
    """Return rows with adjacent columns; fp32 for bf16 in the interpreter, as numpy has no bf16."""
    if INTERPRETED and rows.dtype == torch.bfloat16:
        return rows.float()
    return rows if rows.stride(-1) == 1 else rows.contiguous()
