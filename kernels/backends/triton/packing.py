"""Pack the plans of all heads for a launch: a small table of integers, and vectors for forms that are not closed.

Letters: H heads, S segments.

A *pass* is one launch of a kernel. It takes the parts of every head with the same row order, its *segments*: for
example the block and the summary keys of a fixed pattern, both with queries in the natural order. Parts with another
row order are another pass. Heads with fewer passes take part in the last ones. A head without a part in a pass has rows
there, but no columns.

The table has one row for each head and segment, with the fields below. Divisions by a period are multiplications:
r // period is the upper half of 2r * magic, shifted right by ``bits``, for every r below 2^31.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from longstride.kernels.cache import cached
from longstride.kernels.forms import Bound, Bounds, Fold, Order, constant, whole
from longstride.kernels.patterns import Pattern, PatternPart
from longstride.kernels.plan import Side, View, edge_of, view

FOLD = ("period", "magic", "bits", "step", "stride", "shift")
FIELDS = (
    "num_rows",
    "edge",  # rows that a tile uses
    "row_list",  # where a vector starts in the data, as the following
    "column_list",
    "low_list",
    "high_list",
    "earlier_list",  # selections only: see ``selected.Lists``
    *(f"row_{name}" for name in FOLD),
    *(f"column_{name}" for name in FOLD),
    *(f"bounds_{name}" for name in FOLD[:3]),
    *(f"{end}_{name}" for end in ("low", "high") for name in (*Bound._fields, "magic", "bits")),  # of the grain
)
SOURCE_FIELDS = ("base", "length", "list", "width", *FOLD)
UNREACHED = 1 << 30  # a period or width beyond every position


class Form(IntEnum):
    """The ways in which a kernel reads positions or intervals."""

    NATURAL = 0  # positions are row numbers
    FOLDED = 1  # closed form
    SHIFTED = 2  # positions in closed form, also of columns with a shift
    LISTED = 3  # vectors
    STAIRS = 4  # intervals in closed form with a grain, which takes another division


# Parts of a pattern: all, the one with independent runs of rows ("closed"), or all others ("open").
Parts = Literal["all", "closed", "open"]
Group = tuple[tuple[View, ...], ...]  # the segments of every head, (H, S): one pass


@dataclass(frozen=True, eq=False)
class Pass:
    """The tables of one launch, on the device."""

    table: Tensor  # (H, S, FIELDS) int32; for a selection (B, H, S, FIELDS)
    data: Tensor  # int32
    num_row_tiles: int  # of the head with the most
    num_rows: int  # likewise
    rows: Form
    columns: tuple[Form, ...]  # of each segment
    bounds: tuple[Form, ...]
    earlier: tuple[int, ...] = ()  # for each segment, how many earlier parts may have the same pairs

    def num_bytes(self) -> int:
        """Return the memory of all tensors."""
        return sum(t.numel() * t.element_size() for t in (self.table, self.data))


@cached
def groups(patterns: tuple[Pattern, ...], context: int, rows: Side, parts: Parts) -> tuple[Group, ...]:
    """Return the passes of heads with these patterns. The last one has the views with the most rows."""
    by_pattern = {pattern: _groups_of(pattern, context, rows, parts) for pattern in dict.fromkeys(patterns)}
    count = max(map(len, by_pattern.values()))
    empty = no_columns(context, rows)
    aligned = {pattern: ((empty,),) * (count - len(views)) + views for pattern, views in by_pattern.items()}
    passes = []
    for number in range(count):
        segments = max(len(aligned[pattern][number]) for pattern in patterns)
        padded = {p: views[number] + (empty,) * (segments - len(views[number])) for p, views in aligned.items()}
        passes.append(tuple(padded[pattern] for pattern in patterns))
    return tuple(passes)


def _groups_of(pattern: Pattern, context: int, rows: Side, parts: Parts) -> tuple[tuple[View, ...], ...]:
    """Return the views of one pattern, grouped by row order: few rows first, a closed part last."""
    closed = closed_part(pattern, context)
    selected = {"all": pattern.parts(), "closed": (closed,), "open": (p for p in pattern.parts() if p != closed)}[parts]
    by_order: list[list[View]] = []
    for segment in (view(part, context, rows) for part in selected if part is not None):
        is_natural = rows == "queries" and segment.row_order is None
        group = next((group for group in by_order if is_natural and group[0].row_order is None), None)
        if group is None:
            by_order.append([segment])
        else:
            group.append(segment)
    by_order.sort(key=lambda group: (group[0].num_rows, any(view.closed_period() is not None for view in group)))
    return tuple(map(tuple, by_order))


def closed_part(pattern: Pattern, context: int) -> PatternPart | None:
    """Return the first part of a pattern with independent runs of rows, or None."""
    return next((part for part in pattern.parts() if view(part, context, "keys").closed_period() is not None), None)


def no_columns(context: int, rows: Side) -> View:
    """Return a view that reads nothing: all queries without keys, or no keys."""
    num_rows = context if rows == "queries" else 0
    return View(None, None, num_rows, 0, Bounds(num_rows, whole(context), constant(0), constant(0)))


def row_edge(segments: tuple[View, ...], tile_rows: int, aligned: bool) -> int:
    """Return how many rows a tile uses for all segments: fewer, if tiles then end where closed runs end."""
    closed = next((segment for segment in segments if segment.closed_period() is not None), None)
    return edge_of(closed, tile_rows) if aligned and closed is not None else tile_rows


def pack(group: Group, tile_rows: int, aligned: bool, device: torch.device) -> Pass:
    """Pack a pass in tiles of ``tile_rows`` rows, ``aligned`` to closed runs or not."""
    rows_of_segments, columns, bounds = forms_of(group)
    row_form = max(rows_of_segments)
    data, table, num_row_tiles = Vectors(), [], 0
    for head in group:
        edge = row_edge(head, tile_rows, aligned)
        num_row_tiles = max(num_row_tiles, -(-head[0].num_rows // edge))
        for segment, column_form, bound_form in zip(head, columns, bounds, strict=True):
            table.append(view_fields(segment, edge, data, row_form, column_form, bound_form))
    return Pass(
        table=int32_table(table, device).view(len(group), len(columns), len(FIELDS)),
        data=data.tensor(device),
        num_row_tiles=num_row_tiles,
        num_rows=max(head[0].num_rows for head in group),
        rows=row_form,
        columns=columns,
        bounds=bounds,
        earlier=(0,) * len(columns),
    )


def view_fields(
    segment: View, edge: int, data: Vectors, row_form: Form, column_form: Form, bound_form: Form
) -> list[int]:
    """Return one row of the table."""
    lists = [0, 0, 0, 0, 0]
    if row_form == Form.LISTED:
        lists[0] = data.add(_positions(segment.row_positions, segment.num_rows))
    if column_form == Form.LISTED:
        lists[1] = data.add(_positions(segment.column_positions, segment.num_columns))
    if bound_form == Form.LISTED:
        lists[2:4] = (data.add(bound) for bound in segment.intervals)
    bounds = segment.bounds if isinstance(segment.bounds, Bounds) else Bounds(0, 1, constant(0), constant(0))
    return [
        segment.num_rows,
        edge,
        *lists,
        *fold_fields(segment.row_order),
        *fold_fields(segment.column_order),
        *divisor(bounds.period),
        *(field for bound in (bounds.low, bounds.high) for field in (*bound[:-1], *divisor(bound.grain))),
    ]


def sources(
    passes: Sequence[Group], heads: int, context: int, slices: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Form]:
    """Return where the sums of some passes over keys are in a workspace, for kernels that add them by position.

    ``slices`` has the number of slices of queries for each pass.

    Returns:
        A table (H, sources, SOURCE_FIELDS) int32, its data, and the form of rows: FOLDED, SHIFTED or LISTED.
    """
    form = max((form_of(head[0].row_order) for group in passes for head in group), default=Form.FOLDED)
    form = max(form, Form.FOLDED)
    data, table = Vectors(), []
    for head in range(heads):
        base = 0
        for group, count in zip(passes, slices, strict=True):
            segment = group[head][0]
            start = 0
            if form == Form.LISTED:  # (N,) the row of every position, -1 for none
                rows = torch.full((context,), -1, dtype=torch.int64)
                rows[_positions(segment.row_positions, segment.num_rows)] = torch.arange(segment.num_rows)
                start = data.add(rows)
            inverse = segment.row_order.inverse() if isinstance(segment.row_order, Fold) else None
            width = UNREACHED if inverse is None or inverse.width is None else inverse.width
            for _ in range(count):
                table.append([base, segment.num_rows, start, width, *fold_fields(inverse)])
                base += max(h[0].num_rows for h in group)
    shape = (heads, sum(slices), len(SOURCE_FIELDS))
    return int32_table(table, device).view(shape), data.tensor(device), form


_natural = lru_cache(maxsize=8)(torch.arange)  # cached, so that ``Vectors`` stores it once


def _positions(order: Tensor | None, count: int) -> Tensor:
    return _natural(count) if order is None else order


def form_of(order: Order) -> Form:
    """Return the cheapest way to read an order."""
    if order is None:
        return Form.NATURAL
    if not isinstance(order, Fold):
        return Form.LISTED
    return Form.SHIFTED if order.stride > 1 and order.shift else Form.FOLDED


def forms_of(heads: Sequence[Sequence[View]]) -> tuple[tuple[Form, ...], tuple[Form, ...], tuple[Form, ...]]:
    """Return the cheapest way to read rows, columns and intervals of each segment, the same for all heads."""
    segments = list(zip(*heads, strict=True))
    rows = tuple(max(form_of(view.row_order) for view in segment) for segment in segments)
    columns = tuple(max(form_of(view.column_order) for view in segment) for segment in segments)
    return rows, columns, tuple(map(_form_of_bounds, segments))


def _form_of_bounds(segment: Sequence[View]) -> Form:
    bounds = [view.bounds for view in segment if isinstance(view.bounds, Bounds)]
    if len(bounds) < len(segment):
        return Form.LISTED
    return Form.STAIRS if any(end.grain > 1 for b in bounds for end in (b.low, b.high)) else Form.FOLDED


def divisor(period: int) -> tuple[int, int, int]:
    """Return period, magic and bits: see the module."""
    bits = (period - 1).bit_length()
    return period, -(-(1 << (31 + bits)) // period), bits


def fold_fields(order: Order) -> list[int]:
    """Return the integers of a fold, or those of the natural order for any other order."""
    if not isinstance(order, Fold):
        return [*divisor(UNREACHED), 0, 1, 0]
    return [*divisor(order.period), order.step, order.stride, order.shift or order.before]


def int32_table(rows: list[list[int]] | np.ndarray, device: torch.device) -> Tensor:
    """Return rows of integers, some of them unsigned, as int32."""
    wide = np.array(rows, dtype=np.int64)
    assert ((wide >= -(2**31)) & (wide < 2**32)).all(), "a form reaches beyond 32 bits"
    return torch.from_numpy(wide.astype(np.uint32).view(np.int32)).to(device)


class Vectors:
    """Concatenated vectors; a tensor that is added twice is stored once."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = [torch.zeros(1, dtype=torch.int32)]  # never empty
        self._sources: dict[int, tuple[Tensor, int]] = {}  # holds the tensor, so that its id is not reused
        self._length = 1

    def add(self, vector: Tensor) -> int:
        """Add a vector, and return where it starts."""
        if id(vector) not in self._sources:
            self._sources[id(vector)] = (vector, self._length)
            self._tensors.append(vector.int())
            self._length += vector.numel()
        return self._sources[id(vector)][1]

    def tensor(self, device: torch.device) -> Tensor:
        """Return all vectors, int32."""
        return torch.cat(self._tensors).to(device)
