"""Backward pass: store the sums of dK and dV of passes over keys, and add them in a fixed order.

Letters: BLOCK keys, W padded width of q and k, WV padded width of v, N positions, H heads, R rows of the workspace.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longstride.kernels.backends.triton.tile import (
    COUNTS,
    NUM_SOURCE_FIELDS,
    load_rows,
    source_rows,
    store_rows,
)


@triton.jit
def store_sums(
    dk_tile,  # (BLOCK, W)
    dv_tile,  # (BLOCK, WV)
    row,  # (BLOCK,)
    inside, position,
    dk,  # of this batch entry and head, as are dv and workspace
    dv, workspace,
    first_row,  # first row of this slice in the workspace
    sources,  # arguments of ``add_sources``
    strides,  # between positions, of dk and dv
    WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr, FINAL: tl.constexpr,
    SOURCES: tl.constexpr, SOURCE_FORM: tl.constexpr,
):  # fmt: skip
    """Store sums in the workspace; if this is the last pass, add those of earlier passes and store the result."""
    if FINAL:
        stride_dkn, stride_dvn = strides
        if SOURCES:
            fields, data, number = sources
            dk_tile, dv_tile = add_sources(
                dk_tile, dv_tile, position, inside, workspace, fields, data, number,
                WIDTH, W, VALUE_WIDTH, WV, SOURCE_FORM,
            )  # fmt: skip
        store_rows(dk, position, stride_dkn, inside, dk_tile, WIDTH, W)
        store_rows(dv, position, stride_dvn, inside, dv_tile, VALUE_WIDTH, WV)
    else:
        row = (first_row + row).to(tl.int64)
        store_rows(workspace, row, WIDTH + VALUE_WIDTH, inside, dk_tile, WIDTH, W)
        store_rows(workspace + WIDTH, row, WIDTH + VALUE_WIDTH, inside, dv_tile, VALUE_WIDTH, WV)


@triton.jit
def add_sources(
    dk,  # (BLOCK, W)
    dv,  # (BLOCK, WV)
    position,  # (BLOCK,)
    inside, workspace, fields, data, num_sources,
    WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Add the sums of earlier passes for these keys, in the order of passes and slices."""
    for number in range(num_sources):
        row, exists = source_rows(position, inside, fields + number * NUM_SOURCE_FIELDS, data, FORM)
        dk += load_rows(workspace, row, WIDTH + VALUE_WIDTH, exists, WIDTH, W, True)
        dv += load_rows(workspace + WIDTH, row, WIDTH + VALUE_WIDTH, exists, VALUE_WIDTH, WV, True)
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def gather_kernel(
    workspace,  # (B, H, R, D + Dv) accumulator dtype
    dk, dv, source_table, source_data,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dvb, stride_dvh, stride_dvn,
    num_heads, context, num_blocks, workspace_rows, num_sources, source_stride,
    WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr, BLOCK: tl.constexpr,
    SOURCE_FORM: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of every position from the workspace, 0 if no source has it."""
    lead = (tl.program_id(0) // num_blocks).to(tl.int64)  # batch * H + head
    batch, head = lead // num_heads, lead % num_heads
    position = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = position < context
    dk_tile, dv_tile = add_sources(
        tl.zeros((BLOCK, W), ACCUMULATOR), tl.zeros((BLOCK, WV), ACCUMULATOR), position, inside,
        workspace + lead * workspace_rows * (WIDTH + VALUE_WIDTH),
        source_table + batch * source_stride + head * (num_sources * NUM_SOURCE_FIELDS), source_data, num_sources,
        WIDTH, W, VALUE_WIDTH, WV, SOURCE_FORM,
    )  # fmt: skip
    position = position.to(tl.int64)
    store_rows(dk + batch * stride_dkb + head * stride_dkh, position, stride_dkn, inside, dk_tile, WIDTH, W)
    store_rows(dv + batch * stride_dvb + head * stride_dvh, position, stride_dvn, inside, dv_tile, VALUE_WIDTH, WV)


@triton.jit(do_not_specialize=COUNTS)
def groups_kernel(
    dk_by_head,  # (B, H, N, D) contiguous, accumulator dtype: dK by head of q
    dv_by_head,  # (B, H, N, Dv) likewise
    dk,  # (B, K, N, D), with H = K * GROUP
    dv,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dvb, stride_dvh, stride_dvn,
    num_heads, context,
    num_blocks,  # per head of q
    WIDTH: tl.constexpr, W: tl.constexpr, VALUE_WIDTH: tl.constexpr, WV: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """Sum dK and dV over the heads of q that share a head of k and v, in the order of these heads."""
    lead = (tl.program_id(0) // num_blocks).to(tl.int64)  # batch * H + head
    batch, head = lead // num_heads, lead % num_heads
    shared = head // GROUP
    block = tl.program_id(0) % num_blocks * GROUP + head % GROUP
    position = block * BLOCK + tl.arange(0, BLOCK)
    inside = position < context
    first = (lead - head % GROUP) * context
    dk_tile = tl.zeros((BLOCK, W), ACCUMULATOR)
    dv_tile = tl.zeros((BLOCK, WV), ACCUMULATOR)
    for _ in range(GROUP):
        dk_tile += load_rows(dk_by_head + first * WIDTH, position, WIDTH, inside, WIDTH, W, True)
        dv_tile += load_rows(dv_by_head + first * VALUE_WIDTH, position, VALUE_WIDTH, inside, VALUE_WIDTH, WV, True)
        first += context
    store_rows(dk + batch * stride_dkb + shared * stride_dkh, position, stride_dkn, inside, dk_tile, WIDTH, W)
    store_rows(dv + batch * stride_dvb + shared * stride_dvh, position, stride_dvn, inside, dv_tile, VALUE_WIDTH, WV)
