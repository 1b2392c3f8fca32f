"""Delta of each query, which dK, dV and dQ share: sum(out * dOut) less the gradient of its logsumexp.

Letters: BLOCK queries, WV padded width of v, N positions, H heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longstride.kernels.backends.triton.tile import load_rows


@triton.jit
def delta_kernel(
    out,
    grad_out,
    lse,  # (B, H, N)
    grad_lse,  # (B, H, N), where GRAD_LSE
    delta,  # (B, H, N)
    stride_ob,
    stride_oh,
    stride_on,
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
    out += batch * stride_ob + head * stride_oh
    grad_out += batch * stride_gb + head * stride_gh
    out_tile = load_rows(out, position, stride_on, inside, VALUE_WIDTH, WV, True)
    grad_tile = load_rows(grad_out, position, stride_gn, inside, VALUE_WIDTH, WV, True)
    result = tl.sum(out_tile.to(ACCUMULATOR) * grad_tile.to(ACCUMULATOR), 1)  # (BLOCK,)
    if GRAD_LSE:
        result -= tl.load(grad_lse + first_row + position, mask=inside, other=0.0).to(ACCUMULATOR)
    # A query without keys has no gradient, whatever a caller that merged by lse hands back for its -inf.
    blind = tl.load(lse + first_row + position, mask=inside, other=0.0) == float("-inf")
    tl.store(delta + first_row + position, tl.where(blind, 0.0, result), mask=inside)
