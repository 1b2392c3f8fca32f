"""Plans against the masks they are made from, and what they cost."""

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.backends.triton.packing import passes
from kernels.patterns import Column, Dense, Fixed, Pattern, Strided
from kernels.plan import Side, Tiles, ordered, plan, tiles
from tests.kernels.oracles import example_patterns

CPU = torch.device("cpu")
SIDES: tuple[Side, Side] = ("queries", "keys")
LONG = {"window": 1024, "stride": 1024, "summary": 8}
TILES = [(16, 16), (32, 64), (64, 32), (128, 64)]


def unpacked(t: Tiles, rows: int, columns: int) -> Tensor:
    """The pairs that the tiles visit, (rows, columns) bool; fails where one is set beyond the end."""
    num_columns = -(-columns // t.tile_columns) * t.tile_columns
    mask = torch.zeros(t.num_row_tiles() * t.tile_rows, num_columns, dtype=torch.bool)
    bits = ((t.bitsets[..., None] >> torch.arange(32)) & 1).bool().flatten(2)[..., : t.tile_columns]
    for r in range(t.num_row_tiles()):
        here = slice(r * t.tile_rows, (r + 1) * t.tile_rows)
        mask[here, int(t.full_first[r]) * t.tile_columns : int(t.full_last[r]) * t.tile_columns] = True
        for e in range(int(t.partial_start[r]), int(t.partial_start[r + 1])):
            c = int(t.partial_tile[e]) * t.tile_columns
            assert not mask[here, c : c + t.tile_columns].any(), "a tile is visited twice"
            mask[here, c : c + t.tile_columns] = bits[t.partial_bitset[e]]
            assert mask[here, c : c + t.tile_columns].any(), "a tile is visited for nothing"
    assert not mask[rows:].any() and not mask[:, columns:].any()
    return mask[:rows, :columns]


@pytest.mark.parametrize("tile_q, tile_k", TILES)
@pytest.mark.parametrize("context", [1, 64, 100, 129])
@pytest.mark.parametrize("pattern", [*example_patterns(), Strided(90), Column(200), Fixed(60, 3)], ids=str)
def test_tiles_visit_exactly_the_mask(pattern: Pattern, context: int, tile_q: int, tile_k: int) -> None:
    for part in pattern.for_head(1).parts():
        low, high = ordered(part, context).by_query
        num_keys = ordered(part, context).num_keys
        column = torch.arange(num_keys)
        wanted = (column >= low[:, None]) & (column < high[:, None])
        by_query, by_key = (plan(part, context, tile_q, tile_k, side) for side in SIDES)
        assert torch.equal(unpacked(by_query.tiles, context, num_keys), wanted)
        assert torch.equal(unpacked(by_key.tiles, num_keys, context), wanted.T)
        assert (by_query.num_rows, by_query.num_columns) == (by_key.num_columns, by_key.num_rows) == (context, num_keys)
        assert by_query.row_order is by_key.column_order and by_query.column_order is by_key.row_order


def test_equal_partial_tiles_share_a_bitset() -> None:
    diagonal = tiles(ordered(Dense(), 64 * 64).by_query, 64, 64)
    assert diagonal.partial_tile.numel() == 64
    assert diagonal.bitsets.shape == (1, 64, 2)


def test_tiles_of_a_column_fall_with_the_stride() -> None:
    """Natural order would touch every second tile; grouped by residue, a 64th."""
    context, stride = 64 * 128, 64
    (part,) = Column(stride).parts()
    found = plan(part, context, 64, 64, "queries").tiles.num_visited()
    dense = plan(Dense(), context, 64, 64, "queries").tiles.num_visited()
    assert dense == 128 * 129 // 2
    assert found == 64 * 3  # 64 columns of two tiles: two on the diagonal, one below


def _in_a_million(pattern: Pattern) -> Pattern:
    """The same variant of the pattern, with sizes that suit a million positions."""
    sizes = {name: size for name, size in LONG.items() if hasattr(pattern, name)}
    return replace(pattern, **sizes).for_head(1)  # type: ignore[type-var]


@pytest.mark.parametrize("pattern", [_in_a_million(p) for p in example_patterns()], ids=str)
def test_a_plan_for_a_million_positions_is_small_and_quick(pattern: Pattern) -> None:
    """Both sides as the kernels read them: what forward and backward pass cost together."""
    for cached in (ordered, plan, passes):
        cached.cache_clear()
    start = time.process_time()
    packed = [one for side in SIDES for one in passes((pattern,), 1 << 20, 128, 64, side, CPU)]
    seconds = time.process_time() - start
    assert sum(one.num_bytes() for one in packed) <= 16 * 2**20
    assert seconds < 1.0
