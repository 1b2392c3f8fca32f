"""Plans against the masks they are made from, and what they cost."""

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longstride.kernels.backends.triton.packing import groups, pack, sources
from longstride.kernels.forms import Bounds, Intervals, constant, intervals_of
from longstride.kernels.patterns import BigBird, Column, Dense, Fixed, Pattern, Strided
from longstride.kernels.patterns.column import Entries
from longstride.kernels.plan import Side, Tiles, View, num_pairs, tiles, view
from tests.harness.oracles import all_patterns, example_patterns

CPU = torch.device("cpu")
SIDES: tuple[Side, Side] = ("queries", "keys")
LONG = {"window": 1024, "stride": 1024, "summary": 8, "segments": (1024, 4096)}
# Context, and edges of tiles of queries and keys.
TILES = [(1, 16, 16), (64, 64, 32), (72, 32, 64), (100, 16, 16), (100, 128, 64), (129, 16, 16), (129, 32, 64)]


def unpacked(v: View, t: Tiles) -> Tensor:
    """The pairs that the tiles visit, (rows, columns) bool; a partial tile is masked as a kernel does it."""
    mask = torch.zeros(v.num_rows, v.num_columns, dtype=torch.bool)
    for r in range(len(t.origin)):
        rows = slice(r * t.edge, min((r + 1) * t.edge, v.num_rows))
        low, high = v.intervals.low[rows, None], v.intervals.high[rows, None]
        for j in range(int(t.count[r])):
            first = int(t.origin[r]) + j * t.tile_columns
            column = torch.arange(first, min(first + t.tile_columns, v.num_columns))
            here = mask[rows, first : first + t.tile_columns]
            assert not here.any(), "a tile is visited twice"
            if t.full_first[r] <= j < t.full_last[r]:
                assert len(column) == t.tile_columns, "a full tile has columns beyond the end"
                here[:] = True
            else:
                here[:] = (column >= low) & (column < high)
    return mask


@pytest.mark.parametrize("context, tile_q, tile_k", TILES)
@pytest.mark.parametrize("pattern", [*all_patterns(), Strided(90), Column(200), Fixed(60, 3)], ids=str)
def test_tiles_visit_exactly_the_mask(pattern: Pattern, context: int, tile_q: int, tile_k: int) -> None:
    for part in pattern.for_head(1).parts():
        by_query, by_key = (view(part, context, side) for side in SIDES)
        low, high = by_query.intervals
        column = torch.arange(by_query.num_columns)
        wanted = (column >= low[:, None]) & (column < high[:, None])
        assert torch.equal(unpacked(by_query, tiles(by_query, tile_q, tile_k)), wanted)
        assert torch.equal(unpacked(by_key, tiles(by_key, tile_k, tile_q)), wanted.T)
        assert (by_query.num_rows, by_query.num_columns) == (by_key.num_columns, by_key.num_rows)
        assert by_query.row_order is by_key.column_order and by_query.column_order is by_key.row_order


def test_tiles_of_a_column_fall_with_the_stride() -> None:
    """Natural order would touch every second tile; grouped by residue, a 64th."""
    context, stride = 64 * 128, 64
    (part,) = Column(stride).parts()
    found = tiles(view(part, context, "queries"), 64, 64).num_visited()
    dense = tiles(view(Dense(), context, "queries"), 64, 64).num_visited()
    assert dense == 128 * 129 // 2
    assert found == 64 * 3  # 64 columns of two tiles: two on the diagonal, one below


@pytest.mark.parametrize("rows, tile, edge", [(24, 64, 48), (24, 16, 12), (96, 64, 48), (96, 128, 96), (97, 64, 64)])
def test_short_columns_do_not_share_a_tile_of_rows_with_parts_of_others(rows: int, tile: int, edge: int) -> None:
    found = tiles(view(*Column(128).parts(), 128 * rows, "queries"), tile, 64)
    assert found.edge == edge
    if rows == 24 and tile == 64:
        assert found.num_visited() == 128 * 24 // 48  # one tile of keys for every two columns


def test_pairs_of_a_million_positions_are_exact() -> None:
    """Where a float32 sum, or an int32 one, would not be: written out by the paper's sets."""
    context, stride = 1 << 20, 1 << 10
    rows = context // stride
    assert num_pairs(Dense(), context) == context * (context + 1) // 2
    window = stride * context - stride * (stride - 1) // 2
    column = stride * rows * (rows + 1) // 2
    # The query itself is the only entry of its column within the window.
    assert num_pairs(Strided(stride), context) == window + column - context


class WrongQueries(Entries):
    """Right where the stride divides the context; else the last query reads one key less."""

    def by_query(self, context: int) -> Intervals:
        """As above."""
        low, high = intervals_of(super().by_query(context))
        low[-1] += context % self.stride > 0
        return Intervals(low, high)


class WrongKeys(Entries):
    """Likewise, of keys."""

    def by_key(self, context: int) -> Bounds | None:
        """As above."""
        return Bounds(context, context, constant(0), constant(1)) if context % self.stride else super().by_key(context)


@pytest.mark.parametrize("part, name", [(WrongQueries(4), "by_query"), (WrongKeys(4), "by_key")])
def test_a_plan_that_disagrees_with_its_mask_is_refused(part: Entries, name: str) -> None:
    for context in (8, 12, 96):
        view(part, context, "keys")
    for context in (5, 13, 97):
        with pytest.raises(
            ValueError, match=rf"^pattern=\"{type(part).__name__}.*: {name} and the orders disagree with mask"
        ):
            view(part, context, "keys")


def _in_a_million(pattern: Pattern) -> Pattern:
    """The same variant of the pattern, with sizes that suit a million positions."""
    sizes = {name: size for name, size in LONG.items() if hasattr(pattern, name)}
    if getattr(pattern, "num_factors", 2) > 2:
        sizes["stride"] = 64
    return replace(pattern, **sizes).for_head(1)  # type: ignore[type-var]


CLOSED = [
    pattern
    for pattern in map(_in_a_million, example_patterns())
    if all(part.by_key(1 << 20) is not None for part in pattern.parts())
]


@pytest.mark.parametrize("pattern", [*CLOSED, BigBird(64, 3, 2, 0)], ids=str)
def test_a_plan_for_a_million_positions_is_small_and_quick(pattern: Pattern) -> None:
    """Both sides as the kernels read them: what forward and backward pass cost together."""
    for cached in (view, groups):
        cached.cache_clear()
    start = time.process_time()
    found = [pack(group, 128, True, CPU) for side in SIDES for group in groups((pattern,), 1 << 20, side, "all")]
    passes = groups((pattern,), 1 << 20, "keys", "all")[:-1]
    sources(passes, 1, 1 << 20, (1,) * len(passes), CPU)
    seconds = time.process_time() - start
    num_bytes = sum(one.num_bytes() for one in found)
    assert num_bytes < 2_000, "a closed form has become a vector"
    assert seconds < 1.0
