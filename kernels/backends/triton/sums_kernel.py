"""Backward: where passes over keys leave their sums of dK and dV, and how they are added up, in an order that is fixed.

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
    inside,
    position,
    dk,  # of this batch entry and head, likewise dv and workspace
    dv,
    workspace,
    first_row,  # of the workspace, where this slice begins
    sources,  # what ``add_sources`` reads
    strides,  # from a position to the next, of dk and dv
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    FINAL: tl.constexpr,
    SOURCES: tl.constexpr,
    SOURCE_FORM: tl.constexpr,
):
    """To where the last pass finds them; with what it finds, where this is the last."""
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
    inside,
    workspace,
    fields,
    data,
    num_sources,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    FORM: tl.constexpr,
):
    """Add what earlier passes found for these keys, in the order of the passes and slices."""
    for number in range(num_sources):
        row, found = source_rows(position, inside, fields + number * NUM_SOURCE_FIELDS, data, FORM)
        dk += load_rows(workspace, row, WIDTH + VALUE_WIDTH, found, WIDTH, W, True)
        dv += load_rows(workspace + WIDTH, row, WIDTH + VALUE_WIDTH, found, VALUE_WIDTH, WV, True)
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def gather_kernel(
    workspace,  # (B, H, R, D + Dv) accumulator dtype
    dk,
    dv,
    source_table,
    source_data,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    num_heads,
    context,
    num_blocks,
    workspace_rows,
    num_sources,
    source_stride,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK: tl.constexpr,
    SOURCE_FORM: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """dK and dV of every position from the workspace, 0 where no source has it."""
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


@triton.jit
def groups_kernel(
    dk_by_head,  # (B, H, N, D) contiguous, accumulator dtype: what each head of q gives
    dv_by_head,  # (B, H, N, Dv) likewise
    dk,  # (B, K, N, D), K heads for H = K * GROUP
    dv,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    num_heads,
    context,
    num_blocks,  # of a head of q
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WV: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """dK and dV of heads that several heads of q share: their sums, in the order of those heads."""
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
