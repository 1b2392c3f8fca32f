"""The gated delta rule in chunks of positions (Yang et al. 2024, section 3; Yang et al. 2025), without atomics.

    S_t = e^g_t (I - beta_t k_t k_t^T) S_t-1 + beta_t k_t v_t^T        out_t = S_t^T q_t

Letters: B batch, H heads, Z = B * H, N positions, n chunks of L = CHUNK positions, D width of q and k, Dv width of v,
BLOCK_D and BLOCK_V columns of a tile.

Let S be the state before a chunk, c_ij the decay from position j to i, a_i that from S to i, and b_j that from j to the
chunk's end. They are 0 if a text begins between. The rows that a chunk adds to the state, outer products of k_i and
x_i, solve (I + A) x = beta (v - a (k S)) with A_ij = beta_i c_ij (k_i k_j) for j < i. With the inverse T of I + A:

    u = T (beta v)        w = T (beta a k)        x = u - w S
    out = a (q S) + R x, R_ij = c_ij (q_i k_j) for j <= i        S after the chunk = a_L S + (b k)^T x

Only the kernels that compute S, and in the backward pass its gradient, go through the chunks one after another. The
backward pass reads the states between chunks and computes the rest again. dX are the gradients of x:

    dX = R^T dOut + (b k) dS        dS before the chunk = a_L dS + (a q)^T dOut - w^T dX
    y = T^T dX, the gradient of beta (v - a (k S)), gives those of v, k, beta and, by -y x^T, of A

Without beta x = v. Logarithms of decays are summed in fp64 and kept as two numbers, as differences of sums matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longstride.kernels.backends import accumulator_dtype, empty_like_rows
from longstride.kernels.backends.triton.launch_plan import INTERPRETED, without_warnings

CHUNK = 64  # positions; states are kept between chunks
COUNTS = ("num_heads", "num_positions", "num_chunks")  # kernels are the same for all sizes of batches and contexts

# Tiles


@triton.jit
def load_tile(base, row, stride, inside, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """Load columns from ``first`` on of rows, (L, BLOCK): 0 where there are none."""
    column = first + tl.arange(0, BLOCK)
    address = base + row[:, None] * stride + column[None, :]
    if WIDTH % BLOCK == 0:
        tile = tl.load(address, mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(address, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)
    return tile.to(ACC)


@triton.jit
def store_tile(base, row, stride, inside, first, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store a tile as ``load_tile`` loads it, in the matrix's dtype."""
    column = first + tl.arange(0, BLOCK)
    address = base + row[:, None] * stride + column[None, :]
    tl.store(address, tile.to(base.dtype.element_ty), mask=inside[:, None] & (column < WIDTH)[None, :])


@triton.jit
def product(a, b, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """Return a b."""
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def place(number, num_heads, num_positions, num_chunks, CHUNK: tl.constexpr):
    """Return lead, batch, head and chunk of a program, and the positions of the chunk that exist."""
    lead = (number // num_chunks).to(tl.int64)
    chunk = number % num_chunks
    position = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    return lead, lead // num_heads, lead % num_heads, chunk, position, position < num_positions


@triton.jit
def square_of(matrices, number, CHUNK: tl.constexpr):
    """Return the addresses of a matrix (L, L)."""
    row = tl.arange(0, CHUNK)
    return matrices + number * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :]


# Decays


@triton.jit
def summed(
    log_decay,  # of this batch entry and head
    begins,  # of this batch entry
    position, inside,
    CHUNK: tl.constexpr, DECAY: tl.constexpr, BEGINS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return sums over the chunk up to each row, and up to its end: two numbers of log decays, and of texts begun."""
    if DECAY:
        decay = tl.load(log_decay + position, mask=inside, other=0.0).to(tl.float64)
        total, end = tl.cumsum(decay, 0), tl.sum(decay, 0)
        high, end_high = total.to(ACC), end.to(ACC)
        low, end_low = (total - high.to(tl.float64)).to(ACC), (end - end_high.to(tl.float64)).to(ACC)
    else:
        high, low = tl.zeros((CHUNK,), ACC), tl.zeros((CHUNK,), ACC)
        end_high, end_low = tl.sum(high, 0), tl.sum(low, 0)
    if BEGINS:
        begun = tl.load(begins + position, mask=inside, other=0).to(tl.int32)
        text, end_text = tl.cumsum(begun, 0), tl.sum(begun, 0)
    else:
        text = tl.zeros((CHUNK,), tl.int32)
        end_text = tl.sum(text, 0)
    return high, low, text, end_high, end_low, end_text


@triton.jit
def pair_decay(high, low, text, CHUNK: tl.constexpr):
    """Return c (L, L), 0 for later columns and other texts."""
    row = tl.arange(0, CHUNK)
    allowed = (row[:, None] >= row[None, :]) & (text[:, None] == text[None, :])
    exponent = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp(tl.where(allowed, exponent, float("-inf")))


@triton.jit
def edge_decay(high, low, text, end_high, end_low, end_text):
    """Return a (L,), b (L,) and the decay of the whole chunk."""
    enter = tl.exp(tl.where(text == 0, high, float("-inf")))
    leave = tl.exp(tl.where(text == end_text, (end_high - high) + (end_low - low), float("-inf")))
    return enter, leave, tl.exp(tl.where(end_text == 0, end_high, float("-inf")))


@triton.jit
def part_of(numbers, first, CHUNK: tl.constexpr, PART: tl.constexpr):
    """Return the numbers (PART,) of rows from ``first`` on."""
    row = first + tl.arange(0, PART)
    return tl.sum(tl.where(row[:, None] == tl.arange(0, CHUNK)[None, :], numbers[None, :], 0.0), 1)


@triton.jit
def inverse_of(system, CHUNK: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr):
    """Return the inverse of I + system (L, L), which is 0 on and above the diagonal.

    The inverse is known for diagonal blocks of 1, and each step doubles them. Like a substitution, this is stable for
    equal keys, where powers of the system are as large as binomial coefficients.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -system, 0.0)).to(ACC)
    size = 2
    while size < CHUNK:
        between = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        corner = product(inverse, tl.where(between, system, 0.0), EXACT, ACC)
        inverse -= product(corner, inverse, EXACT, ACC)
        size *= 2
    return inverse


# Forward


@triton.jit(do_not_specialize=COUNTS)
def systems_kernel(
    k, log_decay, beta, begins,
    systems,  # (Z, n, L, L), as all below in the accumulator's dtype
    stride_kb, stride_kh, stride_kn,
    num_heads, num_positions, num_chunks,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, BEGINS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute A of a chunk."""
    lead, batch, head, chunk, position, inside = place(
        tl.program_id(0), num_heads, num_positions, num_chunks, CHUNK
    )  # fmt: skip
    first = lead * num_positions
    high, low, text, _end_high, _end_low, _end_text = summed(
        log_decay + first, begins + batch * num_positions, position, inside, CHUNK, DECAY, BEGINS, ACC
    )
    rate = tl.load(beta + first + position, mask=inside, other=0.0).to(ACC)
    k += batch * stride_kb + head * stride_kh
    products = tl.zeros((CHUNK, CHUNK), ACC)
    for d in range(0, WIDTH, BLOCK_D):
        tile = load_tile(k, position, stride_kn, inside, d, WIDTH, BLOCK_D, ACC)
        products += product(tile, tl.trans(tile), PRECISION, ACC)
    products *= pair_decay(high, low, text, CHUNK) * rate[:, None]
    row = tl.arange(0, CHUNK)
    products = tl.where(row[:, None] > row[None, :], products, 0.0)
    tl.store(square_of(systems, lead * num_chunks + chunk, CHUNK), products)


@triton.jit(do_not_specialize=COUNTS)
def inverses_kernel(
    systems,  # (Z, n, L, L): A; becomes T
    num_heads, num_positions, num_chunks,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, BEGINS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Invert I + A of a chunk by its halves, of which the upper right one is 0."""
    HALF: tl.constexpr = CHUNK // 2
    row = tl.arange(0, HALF)
    upper = systems + tl.program_id(0).to(tl.int64) * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :]
    lower = upper + HALF * CHUNK
    from_upper = inverse_of(tl.load(upper), HALF, EXACT, ACC)
    corner = product(tl.load(lower), from_upper, EXACT, ACC)
    tl.store(upper, from_upper)
    from_lower = inverse_of(tl.load(lower + HALF), HALF, EXACT, ACC)
    tl.store(lower + HALF, from_lower)
    tl.store(lower, -product(from_lower, corner, EXACT, ACC))


@triton.jit(do_not_specialize=COUNTS)
def solved_kernel(
    rows,  # k or v
    log_decay, beta, begins,
    inverse,  # (Z, n, L, L): T
    solved,  # (Z, N, D or Dv): w or u
    stride_rb, stride_rh, stride_rn,
    num_heads, num_positions, num_chunks,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, BEGINS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute some columns of w, if KEYS, or of u of a chunk."""
    ROW_WIDTH: tl.constexpr = WIDTH if KEYS else VALUE_WIDTH
    BLOCK: tl.constexpr = BLOCK_D if KEYS else BLOCK_V
    tiles: tl.constexpr = (ROW_WIDTH + BLOCK - 1) // BLOCK
    column = tl.program_id(0) % tiles * BLOCK
    lead, batch, head, chunk, position, inside = place(
        tl.program_id(0) // tiles, num_heads, num_positions, num_chunks, CHUNK
    )  # fmt: skip
    first = lead * num_positions
    factor = tl.load(beta + first + position, mask=inside, other=0.0).to(ACC)
    if KEYS:
        high, low, text, end_high, end_low, end_text = summed(
            log_decay + first, begins + batch * num_positions, position, inside, CHUNK, DECAY, BEGINS, ACC
        )
        enter, _leave, _whole = edge_decay(high, low, text, end_high, end_low, end_text)
        factor *= enter
    rows += batch * stride_rb + head * stride_rh
    tile = load_tile(rows, position, stride_rn, inside, column, ROW_WIDTH, BLOCK, ACC) * factor[:, None]
    tile = product(tl.load(square_of(inverse, lead * num_chunks + chunk, CHUNK)), tile, PRECISION, ACC)
    store_tile(solved + first * ROW_WIDTH, position, ROW_WIDTH, inside, column, tile, ROW_WIDTH, BLOCK)


@triton.jit(do_not_specialize=COUNTS)
def states_kernel(
    k, v, log_decay, begins,
    w,  # (Z, N, D), if CORRECT
    u,  # (Z, N, Dv), likewise; becomes x
    initial,  # (Z, D, Dv), if INITIAL
    states,  # (n, Z, D, Dv)
    final,  # (Z, D, Dv)
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    num_heads, num_positions, num_chunks,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, BEGINS: tl.constexpr, CORRECT: tl.constexpr, INITIAL: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute x and the state before each chunk, and the state after the last, for some columns of v."""
    tiles: tl.constexpr = (VALUE_WIDTH + BLOCK_V - 1) // BLOCK_V
    lead, column = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BLOCK_V
    batch, head, first = lead // num_heads, lead % num_heads, lead * num_positions
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    depth = tl.arange(0, BLOCK_D)
    size: tl.constexpr = WIDTH * VALUE_WIDTH
    PART: tl.constexpr = CHUNK // 2
    if INITIAL:
        state = load_tile(
            initial + lead * size, depth, VALUE_WIDTH, depth < WIDTH, column, VALUE_WIDTH, BLOCK_V, ACC
        )  # fmt: skip
    else:
        state = tl.zeros((BLOCK_D, BLOCK_V), ACC)
    num_leads = tl.num_programs(0) // tiles
    for chunk in range(num_chunks):
        address = states + (chunk * num_leads + lead) * size
        store_tile(address, depth, VALUE_WIDTH, depth < WIDTH, column, state, VALUE_WIDTH, BLOCK_V)
        position = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
        inside = position < num_positions
        high, low, text, end_high, end_low, end_text = summed(
            log_decay + first, begins + batch * num_positions, position, inside, CHUNK, DECAY, BEGINS, ACC
        )
        _enter, leave, whole = edge_decay(high, low, text, end_high, end_low, end_text)
        after = state * whole
        for part in range(0, CHUNK, PART):  # as products of all rows need more registers
            row = (chunk * CHUNK + part + tl.arange(0, PART)).to(tl.int64)
            exists = row < num_positions
            if CORRECT:
                values = u + first * VALUE_WIDTH
                x = load_tile(values, row, VALUE_WIDTH, exists, column, VALUE_WIDTH, BLOCK_V, ACC)
                tile = load_tile(w + first * WIDTH, row, WIDTH, exists, 0, WIDTH, BLOCK_D, ACC)
                x -= product(tile, state, PRECISION, ACC)
                store_tile(values, row, VALUE_WIDTH, exists, column, x, VALUE_WIDTH, BLOCK_V)
            else:
                x = load_tile(v, row, stride_vn, exists, column, VALUE_WIDTH, BLOCK_V, ACC)
            tile = load_tile(k, row, stride_kn, exists, 0, WIDTH, BLOCK_D, ACC)
            x *= part_of(leave, part, CHUNK, PART)[:, None]
            after += product(tl.trans(tile), x, PRECISION, ACC)
        state = after
    store_tile(final + lead * size, depth, VALUE_WIDTH, depth < WIDTH, column, state, VALUE_WIDTH, BLOCK_V)


@triton.jit(do_not_specialize=COUNTS)
def outputs_kernel(
    q, k,
    x,  # (B, H, N, Dv)
    out, log_decay, begins, states,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_xb, stride_xh, stride_xn,
    stride_ob, stride_oh, stride_on,
    num_heads, num_positions, num_chunks,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, BEGINS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute the output of a chunk for some columns of v."""
    tiles: tl.constexpr = (VALUE_WIDTH + BLOCK_V - 1) // BLOCK_V
    column = tl.program_id(0) % tiles * BLOCK_V
    lead, batch, head, chunk, position, inside = place(
        tl.program_id(0) // tiles, num_heads, num_positions, num_chunks, CHUNK
    )  # fmt: skip
    high, low, text, end_high, end_low, end_text = summed(
        log_decay + lead * num_positions, begins + batch * num_positions, position, inside, CHUNK, DECAY, BEGINS, ACC
    )
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head * stride_kh
    num_leads = tl.num_programs(0) // tiles // num_chunks
    states += (chunk * num_leads + lead) * WIDTH * VALUE_WIDTH
    reads = tl.zeros((CHUNK, CHUNK), ACC)
    rows = tl.zeros((CHUNK, BLOCK_V), ACC)
    for d in range(0, WIDTH, BLOCK_D):
        q_tile = load_tile(q, position, stride_qn, inside, d, WIDTH, BLOCK_D, ACC)
        k_tile = load_tile(k, position, stride_kn, inside, d, WIDTH, BLOCK_D, ACC)
        depth = d + tl.arange(0, BLOCK_D)
        state = load_tile(states, depth, VALUE_WIDTH, depth < WIDTH, column, VALUE_WIDTH, BLOCK_V, ACC)
        reads += product(q_tile, tl.trans(k_tile), PRECISION, ACC)
        rows += product(q_tile, state, PRECISION, ACC)
    enter, _leave, _whole = edge_decay(high, low, text, end_high, end_low, end_text)
    x += batch * stride_xb + head * stride_xh
    x_tile = load_tile(x, position, stride_xn, inside, column, VALUE_WIDTH, BLOCK_V, ACC)
    reads *= pair_decay(high, low, text, CHUNK)
    rows = rows * enter[:, None] + product(reads, x_tile, PRECISION, ACC)
    out += batch * stride_ob + head * stride_oh
    store_tile(out, position, stride_on, inside, column, rows, VALUE_WIDTH, BLOCK_V)


# Backward


@triton.jit(do_not_specialize=COUNTS)
def written_kernel(
    q, k, grad_out, log_decay, begins,
    w,  # (Z, N, D), if CORRECT
    u,  # (Z, N, Dv), likewise; becomes x
    states,
    grad_x,  # (Z, N, Dv)
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_gb, stride_gh, stride_gn,
    num_heads, num_positions, num_chunks,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, BEGINS: tl.constexpr, CORRECT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute x again, and R^T dOut, for some columns of v."""
    tiles: tl.constexpr = (VALUE_WIDTH + BLOCK_V - 1) // BLOCK_V
    column = tl.program_id(0) % tiles * BLOCK_V
    lead, batch, head, chunk, position, inside = place(
        tl.program_id(0) // tiles, num_heads, num_positions, num_chunks, CHUNK
    )  # fmt: skip
    first = lead * num_positions
    high, low, text, _end_high, _end_low, _end_text = summed(
        log_decay + first, begins + batch * num_positions, position, inside, CHUNK, DECAY, BEGINS, ACC
    )
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head * stride_kh
    grad_out += batch * stride_gb + head * stride_gh
    num_leads = tl.num_programs(0) // tiles // num_chunks
    states += (chunk * num_leads + lead) * WIDTH * VALUE_WIDTH
    reads = tl.zeros((CHUNK, CHUNK), ACC)
    rows = tl.zeros((CHUNK, BLOCK_V), ACC)
    for d in range(0, WIDTH, BLOCK_D):
        q_tile = load_tile(q, position, stride_qn, inside, d, WIDTH, BLOCK_D, ACC)
        k_tile = load_tile(k, position, stride_kn, inside, d, WIDTH, BLOCK_D, ACC)
        reads += product(q_tile, tl.trans(k_tile), PRECISION, ACC)
        if CORRECT:
            depth = d + tl.arange(0, BLOCK_D)
            state = load_tile(states, depth, VALUE_WIDTH, depth < WIDTH, column, VALUE_WIDTH, BLOCK_V, ACC)
            w_tile = load_tile(w + first * WIDTH, position, WIDTH, inside, d, WIDTH, BLOCK_D, ACC)
            rows += product(w_tile, state, PRECISION, ACC)
    if CORRECT:
        values = u + first * VALUE_WIDTH
        rows = load_tile(values, position, VALUE_WIDTH, inside, column, VALUE_WIDTH, BLOCK_V, ACC) - rows
        store_tile(values, position, VALUE_WIDTH, inside, column, rows, VALUE_WIDTH, BLOCK_V)
    reads *= pair_decay(high, low, text, CHUNK)
    grad_tile = load_tile(grad_out, position, stride_gn, inside, column, VALUE_WIDTH, BLOCK_V, ACC)
    grads = product(tl.trans(reads), grad_tile, PRECISION, ACC)
    store_tile(
        grad_x + first * VALUE_WIDTH, position, VALUE_WIDTH, inside, column, grads, VALUE_WIDTH, BLOCK_V
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def grad_states_kernel(
    q, k, grad_out, log_decay, begins,
    w,  # (Z, N, D), if CORRECT
    grad_x,  # (Z, N, Dv), without the part that the state has
    grad_final,  # (Z, D, Dv), if FINAL
    grad_states,  # (n, Z, D, Dv)
    grad_initial,  # (Z, D, Dv)
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_gb, stride_gh, stride_gn,
    num_heads, num_positions, num_chunks,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, BEGINS: tl.constexpr, CORRECT: tl.constexpr, FINAL: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of x, of the state after each chunk and of the first state, for some columns of v."""
    tiles: tl.constexpr = (VALUE_WIDTH + BLOCK_V - 1) // BLOCK_V
    lead, column = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BLOCK_V
    batch, head, first = lead // num_heads, lead % num_heads, lead * num_positions
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head * stride_kh
    grad_out += batch * stride_gb + head * stride_gh
    grad_x += first * VALUE_WIDTH
    depth = tl.arange(0, BLOCK_D)
    size: tl.constexpr = WIDTH * VALUE_WIDTH
    PART: tl.constexpr = CHUNK // 2
    if FINAL:
        grad = load_tile(
            grad_final + lead * size, depth, VALUE_WIDTH, depth < WIDTH, column, VALUE_WIDTH, BLOCK_V, ACC
        )  # fmt: skip
    else:
        grad = tl.zeros((BLOCK_D, BLOCK_V), ACC)
    num_leads = tl.num_programs(0) // tiles
    for step in range(num_chunks):
        chunk = num_chunks - 1 - step
        address = grad_states + (chunk * num_leads + lead) * size
        store_tile(address, depth, VALUE_WIDTH, depth < WIDTH, column, grad, VALUE_WIDTH, BLOCK_V)
        position = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
        inside = position < num_positions
        high, low, text, end_high, end_low, end_text = summed(
            log_decay + first, begins + batch * num_positions, position, inside, CHUNK, DECAY, BEGINS, ACC
        )
        enter, leave, whole = edge_decay(high, low, text, end_high, end_low, end_text)
        before = grad * whole
        for part in range(0, CHUNK, PART):  # as in ``states_kernel``
            row = (chunk * CHUNK + part + tl.arange(0, PART)).to(tl.int64)
            exists = row < num_positions
            rows = load_tile(grad_x, row, VALUE_WIDTH, exists, column, VALUE_WIDTH, BLOCK_V, ACC)
            tile = load_tile(k, row, stride_kn, exists, 0, WIDTH, BLOCK_D, ACC)
            rows += product(tile, grad, PRECISION, ACC) * part_of(leave, part, CHUNK, PART)[:, None]
            store_tile(grad_x, row, VALUE_WIDTH, exists, column, rows, VALUE_WIDTH, BLOCK_V)
            grad_tile = load_tile(grad_out, row, stride_gn, exists, column, VALUE_WIDTH, BLOCK_V, ACC)
            grad_tile *= part_of(enter, part, CHUNK, PART)[:, None]
            tile = load_tile(q, row, stride_qn, exists, 0, WIDTH, BLOCK_D, ACC)
            before += product(tl.trans(tile), grad_tile, PRECISION, ACC)
            if CORRECT:
                tile = load_tile(w + first * WIDTH, row, WIDTH, exists, 0, WIDTH, BLOCK_D, ACC)
                before -= product(tl.trans(tile), rows, PRECISION, ACC)
        grad = before
    address = grad_initial + lead * size
    store_tile(address, depth, VALUE_WIDTH, depth < WIDTH, column, grad, VALUE_WIDTH, BLOCK_V)


@triton.jit(do_not_specialize=COUNTS)
def corrected_kernel(
    dv, beta,
    inverse,  # (Z, n, L, L)
    grad_x,  # (Z, N, Dv); becomes y
    stride_dvb, stride_dvh, stride_dvn,
    num_heads, num_positions, num_chunks,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, BEGINS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """Compute some columns of y and dV of a chunk."""
    tiles: tl.constexpr = (VALUE_WIDTH + BLOCK_V - 1) // BLOCK_V
    column = tl.program_id(0) % tiles * BLOCK_V
    lead, batch, head, chunk, position, inside = place(
        tl.program_id(0) // tiles, num_heads, num_positions, num_chunks, CHUNK
    )  # fmt: skip
    first = lead * num_positions
    grad_x += first * VALUE_WIDTH
    tile = load_tile(grad_x, position, VALUE_WIDTH, inside, column, VALUE_WIDTH, BLOCK_V, ACC)
    if CORRECT:
        solver = tl.load(square_of(inverse, lead * num_chunks + chunk, CHUNK))
        tile = product(tl.trans(solver), tile, PRECISION, ACC)
        store_tile(grad_x, position, VALUE_WIDTH, inside, column, tile, VALUE_WIDTH, BLOCK_V)
        tile *= tl.load(beta + first + position, mask=inside, other=0.0).to(ACC)[:, None]
    dv += batch * stride_dvb + head * stride_dvh
    store_tile(dv, position, stride_dvn, inside, column, tile, VALUE_WIDTH, BLOCK_V)


@triton.jit(do_not_specialize=COUNTS)
def pairs_kernel(
    rows,  # q; k if SYSTEM
    k,
    grads,  # (B, H, N, Dv): dOut; y if SYSTEM
    x,  # (B, H, N, Dv)
    v, log_decay, beta, begins,
    pairs,  # (Z, n, L, L): gradients of rows k^T; those of A have their sign changed
    grad_beta,  # (Z, N), if SYSTEM: what pairs and v give
    grad_total,  # (Z, N): gradients of the summed log decays; to which a SYSTEM adds its own
    stride_rb, stride_rh, stride_rn,
    stride_kb, stride_kh, stride_kn,
    stride_gb, stride_gh, stride_gn,
    stride_xb, stride_xh, stride_xn,
    stride_vb, stride_vh, stride_vn,
    num_heads, num_positions, num_chunks,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, BEGINS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, SYSTEM: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of products of a chunk's rows: of R, or of A."""
    lead, batch, head, chunk, position, inside = place(
        tl.program_id(0), num_heads, num_positions, num_chunks, CHUNK
    )  # fmt: skip
    first = lead * num_positions
    grads += batch * stride_gb + head * stride_gh
    x += batch * stride_xb + head * stride_xh
    v += batch * stride_vb + head * stride_vh
    matrix = tl.zeros((CHUNK, CHUNK), ACC)
    by_rate = tl.zeros((CHUNK,), ACC)
    for d in range(0, VALUE_WIDTH, BLOCK_V):
        x_tile = load_tile(x, position, stride_xn, inside, d, VALUE_WIDTH, BLOCK_V, ACC)
        grad_tile = load_tile(grads, position, stride_gn, inside, d, VALUE_WIDTH, BLOCK_V, ACC)
        matrix += product(grad_tile, tl.trans(x_tile), PRECISION, ACC)
        if SYSTEM:
            v_tile = load_tile(v, position, stride_vn, inside, d, VALUE_WIDTH, BLOCK_V, ACC)
            by_rate += tl.sum(grad_tile * v_tile, 1)
    high, low, text, _end_high, _end_low, _end_text = summed(
        log_decay + first, begins + batch * num_positions, position, inside, CHUNK, DECAY, BEGINS, ACC
    )
    matrix *= pair_decay(high, low, text, CHUNK)
    row = tl.arange(0, CHUNK)
    before = row[:, None] > row[None, :]
    address = square_of(pairs, lead * num_chunks + chunk, CHUNK)
    if SYSTEM:
        rate = tl.load(beta + first + position, mask=inside, other=0.0).to(ACC)
        matrix = tl.where(before, matrix, 0.0)
        tl.store(address, matrix * rate[:, None])
    else:
        tl.store(address, matrix)
    if DECAY or SYSTEM:
        rows += batch * stride_rb + head * stride_rh
        k += batch * stride_kb + head * stride_kh
        products = tl.zeros((CHUNK, CHUNK), ACC)
        for d in range(0, WIDTH, BLOCK_D):
            row_tile = load_tile(rows, position, stride_rn, inside, d, WIDTH, BLOCK_D, ACC)
            k_tile = load_tile(k, position, stride_kn, inside, d, WIDTH, BLOCK_D, ACC)
            products += product(row_tile, tl.trans(k_tile), PRECISION, ACC)
        matrix *= products
        if SYSTEM:
            tl.store(grad_beta + first + position, by_rate - tl.sum(matrix, 1), mask=inside)
            matrix *= -rate[:, None]
    if DECAY:
        matrix = tl.where(before, matrix, 0.0)
        total = tl.sum(matrix, 1) - tl.sum(matrix, 0)
        if SYSTEM:
            total += tl.load(grad_total + first + position, mask=inside, other=0.0)
        tl.store(grad_total + first + position, total, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def rows_kernel(
    q, k, grad_out,
    x,  # (B, H, N, Dv)
    dq, dk, log_decay, beta, begins,
    y,  # (Z, N, Dv), if CORRECT
    grad_reads, grad_system, states, grad_states,
    grad_beta,  # (Z, N), without what the state gives
    grad_total,  # (Z, N), likewise; becomes the gradient of log_decay
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_gb, stride_gh, stride_gn,
    stride_xb, stride_xh, stride_xn,
    stride_dqb, stride_dqh, stride_dqn,
    stride_dkb, stride_dkh, stride_dkn,
    num_heads, num_positions, num_chunks,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, BEGINS: tl.constexpr, CORRECT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute dQ and dK of a chunk, and finish the gradients of beta and log_decay."""
    lead, batch, head, chunk, position, inside = place(
        tl.program_id(0), num_heads, num_positions, num_chunks, CHUNK
    )  # fmt: skip
    first = lead * num_positions
    high, low, text, end_high, end_low, end_text = summed(
        log_decay + first, begins + batch * num_positions, position, inside, CHUNK, DECAY, BEGINS, ACC
    )
    enter, leave, whole = edge_decay(high, low, text, end_high, end_low, end_text)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + head * stride_kh
    grad_out += batch * stride_gb + head * stride_gh
    x += batch * stride_xb + head * stride_xh
    dq += batch * stride_dqb + head * stride_dqh
    dk += batch * stride_dkb + head * stride_dkh
    num_leads = tl.num_programs(0) // num_chunks
    state_base = (chunk * num_leads + lead) * WIDTH * VALUE_WIDTH
    PART: tl.constexpr = CHUNK // 2
    row = tl.arange(0, CHUNK)
    square = (lead * num_chunks + chunk) * CHUNK * CHUNK
    if CORRECT:
        rate = tl.load(beta + first + position, mask=inside, other=0.0).to(ACC)
        by_rate = tl.zeros((CHUNK,), ACC)
    entering, leaving = tl.zeros((CHUNK,), ACC), tl.zeros((CHUNK,), ACC)
    by_whole = tl.zeros((BLOCK_D,), ACC)
    for d in range(0, WIDTH, BLOCK_D):
        depth = d + tl.arange(0, BLOCK_D)
        dq_tile = tl.zeros((CHUNK, BLOCK_D), ACC)
        dk_tile = tl.zeros((CHUNK, BLOCK_D), ACC)
        from_y = tl.zeros((CHUNK, BLOCK_D), ACC)
        for column in range(0, VALUE_WIDTH, BLOCK_V):
            state = load_tile(
                states + state_base, depth, VALUE_WIDTH, depth < WIDTH, column, VALUE_WIDTH, BLOCK_V, ACC
            )  # fmt: skip
            grad_tile = load_tile(grad_out, position, stride_gn, inside, column, VALUE_WIDTH, BLOCK_V, ACC)
            dq_tile += product(grad_tile, tl.trans(state), PRECISION, ACC)
            if CORRECT:
                y_tile = load_tile(
                    y + first * VALUE_WIDTH, position, VALUE_WIDTH, inside, column, VALUE_WIDTH, BLOCK_V, ACC
                )  # fmt: skip
                from_y += product(y_tile, tl.trans(state), PRECISION, ACC)
            grad_state = load_tile(
                grad_states + state_base, depth, VALUE_WIDTH, depth < WIDTH, column, VALUE_WIDTH, BLOCK_V, ACC
            )  # fmt: skip
            x_tile = load_tile(x, position, stride_xn, inside, column, VALUE_WIDTH, BLOCK_V, ACC)
            dk_tile += product(x_tile, tl.trans(grad_state), PRECISION, ACC)
            if DECAY:
                by_whole += tl.sum(state * grad_state, 1)
        q_tile = load_tile(q, position, stride_qn, inside, d, WIDTH, BLOCK_D, ACC)
        k_tile = load_tile(k, position, stride_kn, inside, d, WIDTH, BLOCK_D, ACC)
        dq_tile *= enter[:, None]
        dk_tile *= leave[:, None]
        entering += tl.sum(q_tile * dq_tile, 1)
        leaving += tl.sum(k_tile * dk_tile, 1)
        if CORRECT:
            from_y *= enter[:, None]
            by_rate += tl.sum(k_tile * from_y, 1)
            dk_tile -= from_y * rate[:, None]
        for part in range(0, CHUNK, PART):  # as products of all rows need more registers
            local = part + tl.arange(0, PART)
            across = square + row[:, None] * CHUNK + local[None, :]
            down = square + local[None, :] * CHUNK + row[:, None]
            source = (chunk * CHUNK + local).to(tl.int64)
            exists = source < num_positions
            k_part = load_tile(k, source, stride_kn, exists, d, WIDTH, BLOCK_D, ACC)
            dq_tile += product(tl.load(grad_reads + across), k_part, PRECISION, ACC)
            if CORRECT:
                pairs = tl.load(grad_system + across) + tl.load(grad_system + down)
                dk_tile -= product(pairs, k_part, PRECISION, ACC)
            q_part = load_tile(q, source, stride_qn, exists, d, WIDTH, BLOCK_D, ACC)
            dk_tile += product(tl.load(grad_reads + down), q_part, PRECISION, ACC)
        store_tile(dq, position, stride_dqn, inside, d, dq_tile, WIDTH, BLOCK_D)
        store_tile(dk, position, stride_dkn, inside, d, dk_tile, WIDTH, BLOCK_D)
    if CORRECT:
        rates = tl.load(grad_beta + first + position, mask=inside, other=0.0)
        tl.store(grad_beta + first + position, rates - by_rate, mask=inside)
        entering -= by_rate * rate
    if DECAY:
        total = tl.load(grad_total + first + position, mask=inside, other=0.0) + entering - leaving
        end = tl.sum(leaving, 0) + tl.sum(by_whole, 0) * whole
        total = tl.sum(total, 0) + end - (tl.cumsum(total, 0) - total)  # from each position on
        tl.store(grad_total + first + position, total, mask=inside)


# Launches


By = Literal["chunks", "keys", "values", "states"]  # chunks; with columns of q or v; columns of v, for all chunks
WARPS = 4


class Tiles(NamedTuple):
    """The columns (BLOCK_D, BLOCK_V) of tiles."""

    chunks: tuple[int, int]  # of kernels for which chunks stand alone
    states: tuple[int, int]  # of those that go through the chunks, with all of D


def tiles_for(width: int, dtype: torch.dtype) -> Tiles:
    """Return tiles that compile without spilled registers for sm_80, sm_90 and gfx942."""
    depth = max(16, triton.next_power_of_2(width))
    columns = 32 if dtype.itemsize == 2 else 16
    return Tiles((min(depth, columns), 16), (depth, columns if depth <= 128 else 16))


def precisions(dtype: torch.dtype, is_nvidia: bool) -> tuple[str, str]:
    """Return how operands of products are rounded for rows of this dtype, and in the triangular inverse.

    Rows of 16 bits are exact in tf32. Three products of tf32 are about as exact as one of fp32.
    """
    if not is_nvidia:
        return "ieee", "ieee"
    return ("tf32" if dtype.itemsize == 2 else "tf32x3"), "tf32x3"


class _Call:
    """The inputs of a call as kernels read them, and what all its launches share."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        begins: Tensor | None,
    ) -> None:
        self.batch, self.heads, self.num_positions, self.width = q.shape
        self.value_width = v.shape[3]
        self.leads, self.num_chunks = self.batch * self.heads, -(-self.num_positions // CHUNK)
        self.q, self.k, self.v = map(_adjacent, (q, k, v))
        self.dtype = accumulator_dtype(q.dtype)
        # The kernels do not read those that are absent.
        self.log_decay = q if log_decay is None else log_decay.contiguous()
        self.beta = q if beta is None else beta.contiguous()
        self.begins = q if begins is None else begins.contiguous().view(torch.uint8)
        self.tiles = tiles_for(self.width, q.dtype)
        is_nvidia = not (INTERPRETED or torch.version.hip)
        precision, self.exact = precisions(q.dtype, is_nvidia)
        self.constants = {
            "WIDTH": self.width,
            "VALUE_WIDTH": self.value_width,
            "CHUNK": CHUNK,
            "DECAY": log_decay is not None,
            "BEGINS": begins is not None,
            "PRECISION": precision,
            "ACC": tl.float64 if self.dtype == torch.float64 else tl.float32,
        }

    def empty(self, *shape: int) -> Tensor:
        """Allocate in the accumulator's dtype."""
        return self.q.new_empty(shape, dtype=self.dtype)

    def empty_state(self) -> Tensor:
        """Allocate (B, H, D, Dv)."""
        return self.empty(self.batch, self.heads, self.width, self.value_width)

    def empty_states(self) -> Tensor:
        """Allocate (n, Z, D, Dv)."""
        return self.empty(self.num_chunks, self.leads, self.width, self.value_width)

    def launch(
        self,
        kernel: Any,
        by: By,
        rows: Sequence[Tensor],
        tensors: Sequence[Tensor],
        **constants: Any,
    ) -> None:
        """Launch a kernel.

        Args:
            kernel: its parameters are ``rows``, ``tensors``, strides, sizes and constants.
            by: what there is a program for.
            rows: (B, H, N, ·) of any strides with adjacent columns.
            tensors: contiguous.
            **constants: of this kernel alone.
        """
        block_d, block_v = self.tiles.states if by == "states" else self.tiles.chunks
        programs = {
            "chunks": self.num_chunks,
            "keys": self.num_chunks * -(-self.width // block_d),
            "values": self.num_chunks * -(-self.value_width // block_v),
            "states": -(-self.value_width // block_v),
        }
        strides = [stride for tensor in rows for stride in tensor.stride()[:3]]
        sizes = (self.heads, self.num_positions, self.num_chunks)
        options = {"num_warps": 2 if kernel is inverses_kernel else WARPS, "num_stages": 1}
        with without_warnings() if INTERPRETED else torch.cuda.device(self.q.device):
            kernel[(self.leads * programs[by],)](
                *rows, *tensors, *strides, *sizes, **self.constants, **constants, **options,
                BLOCK_D=block_d, BLOCK_V=block_v,
            )  # fmt: skip

    def solve(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return w (B, H, N, D), u (B, H, N, Dv) and T (Z, n, L, L)."""
        inverse = self.empty(self.leads, self.num_chunks, CHUNK, CHUNK)
        factors = (self.log_decay, self.beta, self.begins)
        self.launch(systems_kernel, "chunks", (self.k,), (*factors, inverse))
        self.launch(inverses_kernel, "chunks", (), (inverse,), EXACT=self.exact)
        w, u = (self.empty(*self.q.shape[:3], width) for width in (self.width, self.value_width))
        self.launch(solved_kernel, "keys", (self.k,), (*factors, inverse, w), KEYS=True)
        self.launch(solved_kernel, "values", (self.v,), (*factors, inverse, u), KEYS=False)
        return w, u, inverse


def delta_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial: Tensor | None,
    begins: Tensor | None,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gated delta rule.

    Args:
        q, k, v: (B, H, N, ·).
        log_decay: g (B, H, N), at most 0; None: no decay.
        beta: (B, H, N); None: S_t = e^g_t S_t-1 + k_t v_t^T.
        initial: (B, H, D, Dv); None: 0.
        begins: (B, N) bool, True where the state before a position is 0.
        keep: whether to return the states between chunks, for the backward pass.

    Returns:
        out (B, H, N, Dv) in q's dtype, the state after the last position (B, H, D, Dv), and the states before all
        chunks (n, Z, D, Dv), without ``keep`` (0, Z, D, Dv).
    """
    call = _Call(q, k, v, log_decay, beta, begins)
    out, final, states = _result_like(v, q.dtype), call.empty_state(), call.empty_states()
    w, x, _ = (call.v, call.v, None) if beta is None else call.solve()
    call.launch(
        states_kernel,
        "states",
        (call.k, call.v),
        (call.log_decay, call.begins, w, x, final if initial is None else initial.contiguous(), states, final),
        CORRECT=beta is not None,
        INITIAL=initial is not None,
    )
    call.launch(outputs_kernel, "values", (call.q, call.k, x, out), (call.log_decay, call.begins, states))
    return out.to(q.dtype), final, states if keep else states.new_empty(0, *states.shape[1:])


def delta_backward(
    grad_out: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    begins: Tensor | None,
    final: Tensor,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v, log_decay, beta and initial, with the same bits on every run.

    The gradient of an absent input has arbitrary values. ``final`` and ``states`` are results of ``delta_forward``.
    """
    call = _Call(q, k, v, log_decay, beta, begins)
    grad_out, corrects = _adjacent(grad_out), beta is not None
    grad_x, grad_states, grad_initial = call.empty(*v.shape), call.empty_states(), call.empty_state()
    grad_total, grad_rate = call.empty(*q.shape[:3]), call.empty(*q.shape[:3])
    w, x, inverse = call.solve() if corrects else (call.v, call.v, grad_x)
    rows, decays = (call.q, call.k, grad_out), (call.log_decay, call.begins)
    factors = (call.log_decay, call.beta, call.begins)
    call.launch(written_kernel, "values", rows, (*decays, w, x, states, grad_x), CORRECT=corrects)
    from_final = grad_initial if grad_final is None else grad_final.contiguous()
    call.launch(
        grad_states_kernel,
        "states",
        rows,
        (*decays, w, grad_x, from_final, grad_states, grad_initial),
        CORRECT=corrects,
        FINAL=grad_final is not None,
    )
    dq, dk, dv = (_result_like(x, x.dtype) for x in (q, k, v))
    call.launch(corrected_kernel, "values", (dv,), (call.beta, inverse, grad_x), CORRECT=corrects)
    grad_reads, grad_system = (call.empty(call.leads, call.num_chunks, CHUNK, CHUNK) for _ in range(2))
    sums = (grad_rate, grad_total)
    call.launch(
        pairs_kernel, "chunks", (call.q, call.k, grad_out, x, call.v), (*factors, grad_reads, *sums), SYSTEM=False
    )
    if corrects:
        call.launch(
            pairs_kernel, "chunks", (call.k, call.k, grad_x, x, call.v), (*factors, grad_system, *sums), SYSTEM=True
        )
    call.launch(
        rows_kernel,
        "chunks",
        (*rows, x, dq, dk),
        (*factors, grad_x, grad_reads, grad_system, states, grad_states, *sums),
        CORRECT=corrects,
    )
    grad_total = grad_total.to(q.dtype if log_decay is None else log_decay.dtype)
    grad_rate = grad_rate.to(q.dtype if beta is None else beta.dtype)
    dq, dk, dv = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    return dq, dk, dv, grad_total, grad_rate, grad_initial


def _adjacent(rows: Tensor) -> Tensor:
    """Return rows (B, H, N, ·) whose columns are adjacent."""
    return rows if rows.stride(3) == 1 else rows.contiguous()


def _result_like(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate (B, H, N, ·) in the layout of ``rows``; fp32 for bf16 in the interpreter, which would truncate."""
    return empty_like_rows(rows, torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype)
