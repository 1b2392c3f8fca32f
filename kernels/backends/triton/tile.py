"""What all kernels do to a tile: load rows through an order, expand a bitset, round to 16 bits.

The field F of a layout is ``tl.load(layout + F)``; of a vector it is where the vector begins in ``data``.

Tiles carry their shape as (BLOCK_R, W): BLOCK_R rows or columns of the plan, W a padded head width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.backends.triton.packing import FIELDS

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

NUM_FIELDS = tl.constexpr(len(FIELDS))
NUM_ROWS = tl.constexpr(FIELDS.index("num_rows"))
NUM_COLUMNS = tl.constexpr(FIELDS.index("num_columns"))
NUM_ROW_TILES = tl.constexpr(FIELDS.index("num_row_tiles"))
ROW_ORDER = tl.constexpr(FIELDS.index("row_order"))
COLUMN_ORDER = tl.constexpr(FIELDS.index("column_order"))
FULL = tl.constexpr(FIELDS.index("full"))
PARTIAL_START = tl.constexpr(FIELDS.index("partial_start"))
PARTIAL_TILE = tl.constexpr(FIELDS.index("partial_tile"))
PARTIAL_BITSET = tl.constexpr(FIELDS.index("partial_bitset"))
BITSETS = tl.constexpr(FIELDS.index("bitsets"))


@triton.jit
def original_positions(order, index, inside, ORDERED: tl.constexpr, CHECKED: tl.constexpr):
    """(BLOCK_R,) int64 original positions of reordered rows; 0 beyond the end where that is checked."""
    position = index
    if ORDERED:
        position = tl.load(order + index, mask=inside, other=0) if CHECKED else tl.load(order + index)
    return position.to(tl.int64)


@triton.jit
def load_rows(base, position, stride, inside, WIDTH: tl.constexpr, W: tl.constexpr, CHECKED: tl.constexpr):
    """(BLOCK_R, W) rows of a matrix whose columns are adjacent; 0 beyond its width, and beyond the end if checked."""
    column = tl.arange(0, W)
    address = base + position[:, None] * stride + column[None, :]
    if CHECKED and WIDTH == W:
        tile = tl.load(address, mask=inside[:, None], other=0.0)
    elif CHECKED:
        tile = tl.load(address, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)
    elif WIDTH == W:
        tile = tl.load(address)
    else:
        tile = tl.load(address, mask=(column < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def store_rows(base, position, stride, inside, tile, WIDTH: tl.constexpr, W: tl.constexpr):
    """Store (BLOCK_R, W) rows within the width and before the end, in the matrix's dtype."""
    column = tl.arange(0, W)
    address = base + position[:, None] * stride + column[None, :]
    tl.store(address, tile.to(base.dtype.element_ty), mask=inside[:, None] & (column < WIDTH)[None, :])


@triton.jit
def allowed_pairs(bitsets, number, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """(BLOCK_ROWS, BLOCK_COLUMNS) bool from a bitset of 32-bit words; a row reads each of its words once."""
    WORDS: tl.constexpr = (BLOCK_COLUMNS + 31) // 32
    row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
    words = bitsets + number.to(tl.int64) * (BLOCK_ROWS * WORDS) + row * WORDS  # (BLOCK_ROWS,)
    shift = (column % 32)[None, :]
    bits = tl.load(words)[:, None] >> shift  # (BLOCK_ROWS, BLOCK_COLUMNS)
    for word in tl.static_range(1, WORDS):
        bits = tl.where((column // 32 == word)[None, :], tl.load(words + word)[:, None] >> shift, bits)
    return (bits & 1) != 0


@triton.jit
def narrow(tile, dtype: tl.constexpr, ROUND_BF16: tl.constexpr):
    """Cast an operand of a product; with ROUND_BF16 to the nearest bf16 held in fp32, for want of bf16 in numpy."""
    if ROUND_BF16:
        bits = tile.to(tl.uint32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16  # ties to even
        tile = bits.to(tl.float32, bitcast=True)
    return tile.to(dtype)
