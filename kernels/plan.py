"""Plans of a pattern at a context: orders, intervals, the tiles that follow from them, and the keys of one query.

Letters: N positions, M keys of a part or of one query, T row tiles.
Nothing here takes N^2 steps: a part gives each query one interval of keys (``patterns.base``). The intervals of its
first and last row tell which tiles a tile of rows visits, and which of them need no mask. The keys of one query are a
few regular runs of positions, found in a time that does not depend on N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from longstride.kernels.cache import cached
from longstride.kernels.errors import ConfigError
from longstride.kernels.forms import Bounds, Fold, Intervals, Order, intervals_of, positions_of
from longstride.kernels.patterns import Pattern, PatternPart, declares_causal

SHORT_CONTEXT = 64  # positions; here mask and plan are compared in up to MOST_CHECKED rows, at longer contexts in 3
MOST_CHECKED = 16
Side = Literal["queries", "keys"]  # the rows of tiles: queries for the forward pass and dQ, keys for dK and dV


@dataclass(frozen=True, eq=False)
class View:
    """A part at one context, seen from its queries or from its keys: rows, and the columns of each row."""

    row_order: Order
    column_order: Order
    num_rows: int
    num_columns: int
    bounds: Bounds | Intervals  # the columns of each row

    @property
    @cached
    def intervals(self) -> Intervals:
        """Columns of each row as vectors, (num_rows,) int64."""
        return intervals_of(self.bounds)

    @property
    @cached
    def row_positions(self) -> Tensor | None:
        """Original position of each row, (num_rows,) int64; None is natural."""
        return positions_of(self.row_order)

    @property
    @cached
    def column_positions(self) -> Tensor | None:
        """Original position of each column, (num_columns,) int64; None is natural."""
        same = self.column_order is self.row_order
        return self.row_positions if same else positions_of(self.column_order)

    def closed_period(self) -> int | None:
        """Return P if each run of P rows reads exactly its own P positions, so that runs are independent; else None."""
        same = self.column_order is self.row_order
        return self.bounds.closed_period() if same and isinstance(self.bounds, Bounds) else None

    @property
    @cached
    def row_of_position(self) -> Tensor:
        """Row of each original position, (N,) int64. Every position must have one."""
        assert self.row_positions is not None
        inverse = torch.empty_like(self.row_positions)
        inverse[self.row_positions] = torch.arange(self.num_rows)
        return inverse

    def interval_at(self, position: int) -> tuple[int, int]:
        """Return the columns ``low <= column < high`` that a position reads, at a cost that does not depend on N."""
        row = position
        if isinstance(self.row_order, Fold):
            row = self.row_order.inverse()(position)
        elif self.row_order is not None:
            row = int(self.row_of_position[position])
        if isinstance(self.bounds, Bounds):
            return self.bounds.low(row, self.bounds.period), self.bounds.high(row, self.bounds.period)
        return int(self.bounds.low[row]), int(self.bounds.high[row])


@cached
def view(part: PatternPart, context: int, rows: Side) -> View:
    """Return a part at N = ``context`` positions, seen from its queries or its keys; cached.

    Raises:
        ConfigError: its orders and intervals disagree with its mask, in the rows that are compared.
    """
    if rows == "keys":
        by_query = view(part, context, "queries")
        bounds = part.by_key(context) or transposed(by_query.intervals, by_query.num_columns)
        result = View(by_query.column_order, by_query.row_order, by_query.num_columns, by_query.num_rows, bounds)
        _require_mask(result, part, context, rows)
        return result
    query_order, key_order = part.query_order(context), part.key_order(context)
    if isinstance(query_order, Tensor) and isinstance(key_order, Tensor):
        equal = torch.equal(query_order, key_order)
    else:
        equal = type(query_order) is type(key_order) and query_order == key_order
    if equal:
        key_order = query_order  # one object, as equality is tested by ``is``
    num_keys = context
    if key_order is not None:
        num_keys = key_order.length if isinstance(key_order, Fold) else key_order.numel()
    result = View(query_order, key_order, context, num_keys, part.by_query(context))
    _require_mask(result, part, context, rows)
    return result


def _require_mask(part_view: View, part: PatternPart, context: int, rows: Side) -> None:
    """Raise ConfigError unless the first row, the last and some between read what the part's mask says."""
    positions = torch.arange(context)
    for row in _checked_rows(part_view.num_rows, context):
        position, bounds = positions_at(part_view.row_order, row), part_view.bounds
        low, high = map(int, bounds(row) if isinstance(bounds, Bounds) else (end[row] for end in bounds))
        mask = part.mask(position, positions) if rows == "queries" else part.mask(positions, position)
        is_equal = 0 <= low <= high <= part_view.num_columns
        if is_equal:
            columns = positions_at(part_view.column_order, torch.arange(low, high))
            is_equal = torch.equal(columns.sort()[0], positions[mask])
        if not is_equal:
            name = "by_query" if rows == "queries" else "by_key"
            rule = f"{name} and the orders disagree with mask at position {int(position)} of {context}"
            raise ConfigError.at("pattern", str(part), f"{rule}; correct one of them")


def _require_declared(pattern: Pattern, context: int) -> None:
    """Raise ConfigError if a pattern declares to be causal and a position that is compared reads a later one."""
    positions = torch.arange(context)
    for query in _checked_rows(context, context) if declares_causal(pattern) else ():
        later = positions[pattern.mask(query, positions) & (positions > query)]
        if len(later):
            rule = f"position {int(query)} of {context} reads the later position {int(later[0])}"
            raise ConfigError.at("pattern", str(pattern), f"{rule}; declare causal = False, or correct its mask")


def _checked_rows(num_rows: int, context: int) -> Iterator[Tensor]:
    """Yield the numbers (1,) of the rows that are compared with a mask: the first, the last, and some between."""
    count = min(num_rows, MOST_CHECKED if context <= SHORT_CONTEXT else 3)
    for number in range(count):
        yield torch.tensor([number * (num_rows - 1) // max(count - 1, 1)])


def positions_at(order: Order, rows: Tensor) -> Tensor:
    """Return the original positions of some rows or columns."""
    return rows if order is None else order(rows) if isinstance(order, Fold) else order[rows]


def num_pairs(pattern: Pattern, context: int) -> int:
    """Return the exact number of query-key pairs that a pattern allows: (N + 1) N / 2 if it is dense and causal.

    ``pattern`` belongs to one head (``for_head``). The cost does not depend on N if its bounds have a closed form.
    """
    bounds = [part.bounds for part in query_views(pattern, context)]
    return sum(b.num_pairs() if isinstance(b, Bounds) else int((b.high - b.low).sum()) for b in bounds)


def transposed(intervals: Intervals, num_columns: int) -> Intervals:
    """Return the rows of each column: an interval too, as neither bound of the rows decreases."""
    column = torch.arange(num_columns)
    low = torch.searchsorted(intervals.high, column, right=True)
    high = torch.searchsorted(intervals.low, column, right=True)
    return Intervals(low, torch.maximum(low, high))


def edge_of(view: View, tile_rows: int) -> int:
    """Return how many of its ``tile_rows`` rows a tile uses: fewer, if tiles then end where closed runs end."""
    period = view.closed_period()
    if period is None:
        return tile_rows
    if period <= tile_rows:
        return tile_rows // period * period
    divisor = next(size for size in range(tile_rows, 0, -1) if period % size == 0)
    return divisor if 2 * divisor >= tile_rows else tile_rows


@dataclass(frozen=True, eq=False)
class Tiles:
    """The column tiles of each row tile, as kernels derive them.

    Row tile t has the rows ``t * edge …``; its column tile j has the columns ``origin[t] + j * tile_columns …`` for
    ``0 <= j < count[t]``. Those in ``full_first[t] <= j < full_last[t]`` need no mask.
    """

    edge: int
    tile_rows: int
    tile_columns: int
    origin: np.ndarray  # (T,) int64, as are the following
    count: np.ndarray
    full_first: np.ndarray
    full_last: np.ndarray

    def num_visited(self) -> int:
        """Return the number of tiles visited, full and partial."""
        return int(self.count.sum())

    def num_pairs(self) -> int:
        """Return the number of computed pairs of a row and a column, masked ones included."""
        return self.num_visited() * self.tile_rows * self.tile_columns


def tiles(view: View, tile_rows: int, tile_columns: int, edge: int | None = None) -> Tiles:
    """Cut a view into tiles of (tile_rows, tile_columns) that use ``edge`` rows each (default: ``edge_of``)."""
    edge = edge or edge_of(view, tile_rows)
    first = torch.arange(0, view.num_rows, edge)
    last = (first + edge).clamp_max(view.num_rows) - 1
    if isinstance(view.bounds, Bounds):
        at_first, at_last = view.bounds(first), view.bounds(last)
    else:
        at_first, at_last = (Intervals(view.bounds.low[row], view.bounds.high[row]) for row in (first, last))
    origin = at_first.low
    count = -(-(at_last.high - origin).clamp_min(0) // tile_columns)
    full_first = torch.minimum(-(-(at_last.low - origin) // tile_columns), count)
    full_last = torch.maximum((at_first.high - origin) // tile_columns, full_first)
    return Tiles(edge, tile_rows, tile_columns, *(x.numpy() for x in (origin, count, full_first, full_last)))


@dataclass(frozen=True, slots=True)
class RegularPositions:
    """Positions ``first + block * step + i`` for ``0 <= block < blocks`` and ``0 <= i < width``, ascending.

    One block is a slice; blocks of width 1 are every ``step``-th position.
    """

    first: int
    width: int
    blocks: int = 1
    step: int = 1

    def __len__(self) -> int:
        return self.blocks * self.width

    def positions(self) -> Tensor:
        """Return the positions, (M,) int64."""
        start = self.first + torch.arange(self.blocks, device="cpu")[:, None] * self.step
        return (start + torch.arange(self.width, device="cpu")).reshape(-1)

    def rows_of(self, x: Tensor) -> Tensor:
        """Return these rows of (N, …), as (M, …): a view, or a copy for several wide blocks."""
        last = self.first + (self.blocks - 1) * self.step + self.width
        if self.blocks == 1:
            return x[self.first : last]
        if self.width == 1:
            return x[self.first : last : self.step]
        return x[self.first : last].unfold(0, self.width, self.step).movedim(-1, 1).flatten(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class ListedPositions:
    """Positions in a vector, for orders that have no closed form."""

    vector: Tensor  # (M,) int64, a slice of a vector shared by all queries

    def __len__(self) -> int:
        return len(self.vector)

    def positions(self) -> Tensor:
        """Return the positions, (M,) int64."""
        return self.vector

    def rows_of(self, x: Tensor) -> Tensor:
        """Return a copy of these rows of (N, …), as (M, …)."""
        return x.index_select(0, self.vector.to(x.device))


Read = RegularPositions | ListedPositions


@cached
def query_views(pattern: Pattern, context: int) -> tuple[View, ...]:
    """Return the parts of a resolved pattern, seen from their queries; cached.

    Raises:
        ConfigError: a part disagrees with its mask, or the pattern with what it declares, in the rows compared.
    """
    _require_declared(pattern, context)
    return tuple(view(part, context, "queries") for part in pattern.parts())


def reads(pattern: Pattern, position: int, context: int) -> tuple[Read, ...]:
    """Return the keys of one query, part by part, each key once. No read is empty.

    Args:
        pattern: a pattern resolved for a head.
        position: position of the query, 0 … N-1.
        context: N.
    """
    result: list[Read] = []
    for part in query_views(pattern, context):
        low, high = part.interval_at(position)
        if low < high:
            result += _runs(part, low, high)
    return tuple(result)


def positions_of_reads(query_reads: tuple[Read, ...]) -> Tensor:
    """Return the positions of several reads in their order, (M,) int64. Meant for few positions, as it caches."""
    runs = tuple(read for read in query_reads if isinstance(read, RegularPositions))
    if len(runs) < len(query_reads):
        return torch.cat([read.positions() for read in query_reads])
    first = runs[0].first
    return _joined_positions(tuple(replace(run, first=run.first - first) for run in runs)) + first


@cached
def _joined_positions(runs: tuple[RegularPositions, ...]) -> Tensor:
    """Return the positions of runs relative to the first: often the same for the next query, hence the cache."""
    return torch.cat([run.positions() for run in runs])


@lru_cache(maxsize=4096)
def most_reads(pattern: Pattern, context: int) -> int:
    """Return an upper limit of the keys that a query reads: the sum of the parts' maxima; cached."""
    # View.intervals would cache vectors that other calls do not need.
    intervals = (intervals_of(part.bounds) for part in query_views(pattern, context))
    return sum(int((high - low).max()) for low, high in intervals)


def _runs(part: View, low: int, high: int) -> Iterator[Read]:
    """Yield the columns low … high-1 of a view, at least one."""
    order = part.column_order
    if order is None:
        yield RegularPositions(low, high - low)
    elif not isinstance(order, Fold):
        yield ListedPositions(order[low:high])
    elif order.stride > 1:  # column after column: one run per column (built-in patterns read a single column)
        while low < high:
            last = min(high, (low // order.period + 1) * order.period)
            yield RegularPositions(order(low), 1, last - low, order.stride)
            low = last
    else:  # some positions per block: the end of a block, full blocks, and the start of a block
        period = order.period
        full_first, full_last = -(-low // period), high // period
        if full_first > full_last or period == order.step:  # within one block, or blocks that touch
            yield RegularPositions(order(low), high - low)
            return
        if low % period:
            yield RegularPositions(order(low), -low % period)
        if full_first < full_last:
            yield RegularPositions(order(full_first * period), period, full_last - full_first, order.step)
        if high % period:
            yield RegularPositions(order(full_last * period), high % period)
