"""Tiles of keys (or queries) that the card's tensor memory accelerator can copy by itself, order and all.

Letters: B batch, H heads, N positions, D width.
A descriptor sees (B, H, N, D) as (B, H, outer, inner, D): position = outer index * inner + inner index. A tile of the
natural order is a run of the outer index (inner 1); of a column, a run of the outer index at one inner index; of the
summary keys, the same few inner indices of a run of blocks. Nothing is moved or gathered, and a kernel is spared the
addresses. What does not fit this form, or a card without the unit, is read by addresses.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longstride.kernels.backends.triton.packing import Parts, groups, row_edge
from longstride.kernels.backends.triton.tile import divided, load_rows
from longstride.kernels.patterns.base import Pattern
from longstride.kernels.patterns.forms import Bounds, Fold
from longstride.kernels.plan import Side, View

ALIGNMENT = 16  # bytes, of addresses and strides
SEGMENTS = 2  # that a kernel has parameters for


class Shape(IntEnum):
    """How a tile lies in (outer, inner)."""

    ADDRESSES = 0  # no descriptor
    NATURAL = 1
    COLUMN = 2
    BLOCKS = 3


class Box(NamedTuple):
    """The outer and inner size of the positions, and the inner size of a tile."""

    shape: Shape
    outer: int
    inner: int
    tile_inner: int


ADDRESSES = Box(Shape.ADDRESSES, 0, 0, 0)


def box_of(view: View, context: int, edge: int, block: int) -> Box:
    """How tiles of ``block`` columns can be described, where tiles of rows take ``edge`` rows."""
    order, bounds = view.column_order, view.bounds
    if view.num_columns == 0 or isinstance(order, Tensor):
        return ADDRESSES
    if order is None:
        return Box(Shape.NATURAL, context, 1, 1)
    if not isinstance(bounds, Bounds):
        return ADDRESSES
    if order.step == 1 and order.stride > 1:
        period = view.closed_period()  # the tiles of one tile of rows must not reach into another column
        if period is None or period != order.period or period % edge:
            return ADDRESSES
        return Box(Shape.COLUMN, order.period, order.stride, 1)
    return _blocks(order, bounds, context, block)


def _blocks(order: Fold, bounds: Bounds, context: int, block: int) -> Box:
    """A few positions of every block, read from the first block on."""
    from_the_first = bounds.low.step == 0 and bounds.low.least == bounds.low.most == 0
    power_of_two = order.period & (order.period - 1) == 0
    if not from_the_first or not power_of_two or block % order.period or context % order.step:
        return ADDRESSES
    return Box(Shape.BLOCKS, context // order.step, order.step, order.period)


@lru_cache(maxsize=256)
def boxes(
    patterns: tuple[Pattern, ...],
    context: int,
    rows: Side,
    parts: Parts,
    number: int,
    tile_rows: int,
    tile_columns: int,
    apart: bool,
) -> tuple[Box, ...]:
    """Of each segment of a pass, how the columns of all its heads can be described."""
    group = groups(patterns, context, rows, parts)[number]
    found = []
    for segment in range(len(group[0])):
        distinct = {box_of(head[segment], context, row_edge(head, tile_rows, apart), tile_columns) for head in group}
        found.append(distinct.pop() if len(distinct) == 1 else ADDRESSES)
    return tuple(found) if len(found) <= SEGMENTS else (ADDRESSES,) * len(found)


def describable(*tensors: Tensor) -> bool:
    """Whether addresses and strides are aligned as the unit demands."""
    return all(
        t.data_ptr() % ALIGNMENT == 0
        and t.stride(-1) == 1
        and all(stride * t.itemsize % ALIGNMENT == 0 for stride in t.stride()[:3])
        for t in tensors
    )


def described(tensor: Tensor, box: Box, block: int, width: int) -> TensorDescriptor:
    """The descriptor of (B, H, N, D) for tiles of ``block`` positions and ``width`` padded columns."""
    batch, heads, _, columns = tensor.shape
    stride_b, stride_h, stride_n, _ = tensor.stride()
    shape = [batch, heads, box.outer, box.inner, columns]
    strides = [stride_b, stride_h, box.inner * stride_n, stride_n, 1]
    return TensorDescriptor(tensor, shape, strides, [1, 1, block // box.tile_inner, box.tile_inner, width])


NATURAL = tl.constexpr(int(Shape.NATURAL))
COLUMN = tl.constexpr(int(Shape.COLUMN))


@triton.jit
def place(first, fold, SHAPE: tl.constexpr):
    """(outer, inner) of a tile's first column."""
    period, magic, bits, _step, _stride, shift = fold
    if SHAPE == NATURAL:
        outer, inner = first, 0
    elif SHAPE == COLUMN:
        inner = divided(first, magic, bits)
        outer = first - inner * period
    else:
        outer, inner = divided(first, magic, bits), shift
    return outer, inner


@triton.jit
def load_tile(
    base,  # a pointer, or a descriptor
    batch,
    head,
    first,
    position,
    stride,
    inside,
    fold,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    SHAPE: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """(BLOCK, W) rows of a tile that begins at column ``first``; those behind the end are 0 or any other positions'."""
    if SHAPE == 0:
        tile = load_rows(base, position, stride, inside, WIDTH, W, CHECKED)
    else:
        outer, inner = place(first, fold, SHAPE)
        tile = base.load([batch, head, outer, inner, 0]).reshape(BLOCK, W)
    return tile
