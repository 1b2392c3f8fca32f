"""Functions of all kernels on tiles: find rows and their intervals, load and store rows, round to 16 bits.

Orders and intervals are natural, a closed form of a few integers, or a vector (``packing.Form``). Kernels pass a closed
form as a tuple of its integers.

Tiles have the shape (BLOCK_R, W): BLOCK_R rows or columns of the plan, and W a padded head width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longstride.kernels.backends.triton.packing import FIELDS, SOURCE_FIELDS, Form

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # lowest finite fp32

NATURAL = tl.constexpr(int(Form.NATURAL))
FOLDED = tl.constexpr(int(Form.FOLDED))
SHIFTED = tl.constexpr(int(Form.SHIFTED))
LISTED = tl.constexpr(int(Form.LISTED))
STAIRS = tl.constexpr(int(Form.STAIRS))

NUM_FIELDS = tl.constexpr(len(FIELDS))
NUM_ROWS = tl.constexpr(FIELDS.index("num_rows"))
EDGE = tl.constexpr(FIELDS.index("edge"))
ROW_LIST = tl.constexpr(FIELDS.index("row_list"))
COLUMN_LIST = tl.constexpr(FIELDS.index("column_list"))
LOW_LIST = tl.constexpr(FIELDS.index("low_list"))
HIGH_LIST = tl.constexpr(FIELDS.index("high_list"))
EARLIER_LIST = tl.constexpr(FIELDS.index("earlier_list"))
ROW_FOLD = tl.constexpr(FIELDS.index("row_period"))
COLUMN_FOLD = tl.constexpr(FIELDS.index("column_period"))
BOUNDS = tl.constexpr(FIELDS.index("bounds_period"))
LOW = tl.constexpr(FIELDS.index("low_step"))
HIGH = tl.constexpr(FIELDS.index("high_step"))

# Parameters for ``do_not_specialize``: the compiled kernels are the same for all sizes of batches and contexts.
COUNTS = (
    "num_tiles", "num_blocks", "num_slices", "num_sources", "slice_rows", "workspace_base", "workspace_rows",
    "table_stride", "source_stride",
)  # fmt: skip

NUM_SOURCE_FIELDS = tl.constexpr(len(SOURCE_FIELDS))
SOURCE_BASE = tl.constexpr(SOURCE_FIELDS.index("base"))
SOURCE_LENGTH = tl.constexpr(SOURCE_FIELDS.index("length"))
SOURCE_LIST = tl.constexpr(SOURCE_FIELDS.index("list"))
SOURCE_WIDTH = tl.constexpr(SOURCE_FIELDS.index("width"))
SOURCE_FOLD = tl.constexpr(SOURCE_FIELDS.index("period"))


@triton.jit
def load_divisor(fields):
    """Load period, magic and bits from three fields."""
    return tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)


@triton.jit
def load_fold(fields, FORM: tl.constexpr):
    """Load a fold from six fields; for another form, load nothing."""
    if FORM == FOLDED or FORM == SHIFTED:  # noqa: SIM109  Triton has no "in"
        period, magic, bits = load_divisor(fields)
        fold = (period, magic, bits, tl.load(fields + 3), tl.load(fields + 4), tl.load(fields + 5))
    else:
        fold = (0, 0, 0, 0, 0, 0)
    return fold


@triton.jit
def divided(row, magic, bits):
    """Return row // period for 0 <= row < 2^31."""
    return (tl.umulhi((row * 2).to(tl.uint32), magic.to(tl.uint32)) >> bits.to(tl.uint32)).to(tl.int32)


@triton.jit
def folded(row, fold):
    """Return the positions of rows of a fold without a shift, or with a stride of 1, int32."""
    period, magic, bits, step, stride, shift = fold
    quotient = divided(row, magic, bits)
    return quotient * step + (row - quotient * period + shift) * stride


@triton.jit
def shifted(row, fold):
    """Return the positions of rows of any fold, int32."""
    period, magic, bits, step, stride, shift = fold
    quotient = divided(row, magic, bits)
    return quotient * step + (row - quotient * period) * stride + shift


@triton.jit
def original_positions(row, inside, fold, vector, FORM: tl.constexpr, CHECKED: tl.constexpr):
    """Return original positions of reordered rows, (BLOCK_R,) int64; if CHECKED, arbitrary beyond the end."""
    if FORM == NATURAL:
        position = row
    elif FORM == FOLDED:
        position = folded(row, fold)
    elif FORM == SHIFTED:
        position = shifted(row, fold)
    elif CHECKED:
        position = tl.load(vector + row, mask=inside, other=0)
    else:
        position = tl.load(vector + row)
    return position.to(tl.int64)


@triton.jit
def tile_bounds(tile, fields):
    """Return the first and last row of a tile. Beyond the rows, the first is above the last."""
    num_rows, edge = tl.load(fields + NUM_ROWS), tl.load(fields + EDGE)
    first_row = tile * edge
    return first_row, tl.minimum(first_row + edge, num_rows) - 1


@triton.jit
def tile_rows(first_row, last_row, fields, data, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Return (BLOCK,) the rows of a tile, which of them exist, and their original positions."""
    row = first_row + tl.arange(0, BLOCK)
    inside = row <= last_row
    fold = load_fold(fields + ROW_FOLD, FORM)
    return row, inside, original_positions(row, inside, fold, data + tl.load(fields + ROW_LIST), FORM, True)


@triton.jit
def intervals(row, inside, fields, data, FORM: tl.constexpr):
    """Return the columns low <= column < high of each row, int32; ``row`` may be a number."""
    if FORM == LISTED:
        low = tl.load(data + tl.load(fields + LOW_LIST) + row, mask=inside, other=0)
        high = tl.load(data + tl.load(fields + HIGH_LIST) + row, mask=inside, other=0)
    else:
        period, magic, bits = load_divisor(fields + BOUNDS)
        quotient = divided(row, magic, bits)
        remainder = row - quotient * period
        low, high = _bound(quotient, remainder, fields + LOW, FORM), _bound(quotient, remainder, fields + HIGH, FORM)
    return low, high


@triton.jit
def _bound(quotient, remainder, fields, FORM: tl.constexpr):
    if FORM == STAIRS:
        grain, magic, bits = load_divisor(fields + 4)
        remainder = divided(remainder, magic, bits) * grain
    clipped = tl.minimum(tl.maximum(remainder + tl.load(fields + 1), tl.load(fields + 2)), tl.load(fields + 3))
    return quotient * tl.load(fields) + clipped


@triton.jit
def visited_tiles(first_row, last_row, fields, data, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Return the tiles of BLOCK columns of a row tile, counted from ``origin``: see ``plan.Tiles``."""
    origin, least_high = intervals(first_row, True, fields, data, FORM)
    most_low, end = intervals(last_row, True, fields, data, FORM)
    count = (tl.maximum(end - origin, 0) + BLOCK - 1) // BLOCK
    full_first = tl.minimum((most_low - origin + BLOCK - 1) // BLOCK, count)
    full_last = tl.maximum((least_high - origin) // BLOCK, full_first)
    return origin, end, count, full_first, full_last


@triton.jit
def allowed_columns(first, low, high, BLOCK: tl.constexpr):
    """Return (BLOCK_R, BLOCK), whether low <= first + i < high, for bounds of (BLOCK_R,).

    Columns below ``low`` wrap around, so one unsigned comparison suffices, with half the instructions of two.
    """
    beyond_low = tl.arange(0, BLOCK)[None, :] - (low - first)[:, None]
    return beyond_low.to(tl.uint32) < tl.maximum(high - low, 0).to(tl.uint32)[:, None]


@triton.jit
def without_earlier(allowed, query, query_inside, key, key_inside, lists, context, EARLIER: tl.constexpr):
    """Return the pairs of ``allowed`` that are in none of the ``EARLIER`` parts before this one.

    ``query`` and ``key`` are positions along one axis of ``allowed`` each. ``lists`` (EARLIER, 3, N) has the bounds of
    every query and the column of every key, -1 for none, for each of these parts.
    """
    for _ in tl.static_range(EARLIER):
        low = tl.load(lists + query, mask=query_inside, other=0)
        high = tl.load(lists + context + query, mask=query_inside, other=0)
        column = tl.load(lists + 2 * context + key, mask=key_inside, other=-1)
        lists += 3 * context
        allowed = allowed & ((column < low) | (column >= high))
    return allowed


@triton.jit
def load_rows(base, position, stride, inside, WIDTH: tl.constexpr, W: tl.constexpr, CHECKED: tl.constexpr):
    """Load (BLOCK_R, W) rows of a matrix with adjacent columns: 0 beyond its width, and beyond the end if CHECKED."""
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
def load_pairs(base, position, inside, BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr, CHECKED: tl.constexpr):
    """Load both numbers of each row of (N, 2), as two of (BLOCK,).

    The block is doubled ``DOUBLINGS`` times, but the copies are not loaded. If a block has fewer elements than threads,
    Triton 3.6 lets every thread load whatever its part of a product needs: 32 loads instead of one.
    """
    copy = tl.arange(0, 1 << DOUBLINGS)[:, None, None]
    address = base + (position * 2)[None, :, None] + tl.arange(0, 2)[None, None, :] + copy * 0
    if CHECKED:
        pairs = tl.load(address, mask=inside[None, :, None] & (copy == 0), other=0.0)
    elif DOUBLINGS > 0:
        pairs = tl.load(address, mask=copy == 0, other=0.0)
    else:
        pairs = tl.load(address)
    for doubling in tl.static_range(DOUBLINGS):
        pairs = pairs.reshape(2, 1 << (DOUBLINGS - 1 - doubling), BLOCK, 2)
        pairs, _copies = tl.split(tl.permute(pairs, 1, 2, 3, 0))
    return tl.split(pairs.reshape(BLOCK, 2))


@triton.jit
def store_rows(base, position, stride, inside, tile, WIDTH: tl.constexpr, W: tl.constexpr):
    """Store (BLOCK_R, W) rows within the width and before the end, in the matrix's dtype."""
    column = tl.arange(0, W)
    address = base + position[:, None] * stride + column[None, :]
    tl.store(address, tile.to(base.dtype.element_ty), mask=inside[:, None] & (column < WIDTH)[None, :])


@triton.jit
def source_rows(position, inside, fields, data, FORM: tl.constexpr):
    """Return the rows of a source with the sums of these positions, (BLOCK_R,) int64, and which of them exist."""
    if FORM == LISTED:
        row = tl.load(data + tl.load(fields + SOURCE_LIST) + position, mask=inside, other=-1)
        exists = row >= 0
    else:
        fold = load_fold(fields + SOURCE_FOLD, FOLDED)
        period, magic, bits, step, stride, shift = fold
        position = position.to(tl.int32)
        if FORM == SHIFTED:  # added first, as in an inverse (``forms.Fold``)
            position += shift
            inside = inside & (position >= 0)
            shift = 0
            fold = (period, magic, bits, step, stride, shift)
        row = folded(position, fold)
        offset = position - divided(position, magic, bits) * period + shift
        exists = (offset >= 0) & (offset < tl.load(fields + SOURCE_WIDTH)) & (row < tl.load(fields + SOURCE_LENGTH))
    return row.to(tl.int64) + tl.load(fields + SOURCE_BASE), exists & inside


@triton.jit
def narrow(tile, dtype: tl.constexpr, ROUND_BF16: tl.constexpr):
    """Cast an operand of a product; with ROUND_BF16 to the nearest bf16 as fp32, as numpy has no bf16."""
    if ROUND_BF16:
        bits = tile.to(tl.uint32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16  # ties to even
        tile = bits.to(tl.float32, bitcast=True)
    return tile.to(dtype)
