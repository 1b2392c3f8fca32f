"""The plans of all heads as a launch reads them: a small table of integers, and vectors where no closed form exists.

Letters: H heads, S segments.

A *pass* is one launch of a kernel. From every head it takes the parts whose rows are in the same order, its *segments*:
for example the block and the summary keys of a fixed pattern, whose queries are both in the natural order. Parts of
another row order are another pass. Heads with fewer passes take part in the last ones; a head without a part in a pass
has rows there, but no columns.

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
    "edge",  # rows a tile takes
    "row_list",  # where a vector begins in the data, likewise the others
    "column_list",
    "low_list",
    "high_list",
    "earlier_list",  # of selections alone: see ``selected.Lists``
    *(f"row_{name}" for name in FOLD),
    *(f"column_{name}" for name in FOLD),
    *(f"bounds_{name}" for name in FOLD[:3]),
    *(f"{end}_{name}" for end in ("low", "high") for name in (*Bound._fields, "magic", "bits")),  # of the grain
)
SOURCE_FIELDS = ("base", "length", "list", "width", *FOLD)
UNREACHED = 1 << 30  # a period, or a width, beyond every position


class Form(IntEnum):
    """How a kernel reads positions or intervals."""

    NATURAL = 0  # positions are row numbers
    FOLDED = 1  # closed form
    LISTED = 2  # vectors
    STAIRS = 3  # of intervals: closed form with a grain, a division more


# Which parts of a pattern: all, the one whose runs of rows are independent ("closed"), or all others ("open").
Parts = Literal["all", "closed", "open"]
Group = tuple[tuple[View, ...], ...]  # the segments of every head, (H, S): one pass


@dataclass(frozen=True, eq=False)
class Pass:
    """What one launch reads, on the device."""

    table: Tensor  # (H, S, FIELDS) int32; of a selection (B, H, S, FIELDS)
    data: Tensor  # int32
    num_row_tiles: int  # of the head that has most
    num_rows: int  # likewise
    rows: Form
    columns: tuple[Form, ...]  # of each segment
    bounds: tuple[Form, ...]
    earlier: tuple[int, ...] = ()  # for each segment, how many parts before its own may have the same pairs

    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(t.numel() * t.element_size() for t in (self.table, self.data))


@cached
def groups(patterns: tuple[Pattern, ...], context: int, rows: Side, parts: Parts) -> tuple[Group, ...]:
    """The passes of heads with these patterns; the last one has the views that cover the most rows."""
    by_pattern = {pattern: _groups_of(pattern, context, rows, parts) for pattern in dict.fromkeys(patterns)}
    count = max(map(len, by_pattern.values()))
    nothing = no_columns(context, rows)
    aligned = {pattern: ((nothing,),) * (count - len(views)) + views for pattern, views in by_pattern.items()}
    passes = []
    for number in range(count):
        segments = max(len(aligned[pattern][number]) for pattern in patterns)
        padded = {p: views[number] + (nothing,) * (segments - len(views[number])) for p, views in aligned.items()}
        passes.append(tuple(padded[pattern] for pattern in patterns))
    return tuple(passes)


def _groups_of(pattern: Pattern, context: int, rows: Side, parts: Parts) -> tuple[tuple[View, ...], ...]:
    """The views of one pattern, grouped by the order of their rows: few rows first, a closed part last."""
    closed = closed_part(pattern, context)
    wanted = {"all": pattern.parts(), "closed": (closed,), "open": (p for p in pattern.parts() if p != closed)}[parts]
    by_order: list[list[View]] = []
    for one in (view(part, context, rows) for part in wanted if part is not None):
        natural = rows == "queries" and one.row_order is None
        group = next((group for group in by_order if natural and group[0].row_order is None), None)
        if group is None:
            by_order.append([one])
        else:
            group.append(one)
    by_order.sort(key=lambda group: (group[0].num_rows, any(one.closed_period() is not None for one in group)))
    return tuple(map(tuple, by_order))


def closed_part(pattern: Pattern, context: int) -> PatternPart | None:
    """The first part of a pattern whose runs of rows are independent, if there is one."""
    return next((part for part in pattern.parts() if view(part, context, "keys").closed_period() is not None), None)


def no_columns(context: int, rows: Side) -> View:
    """A view that reads nothing: all queries without a key, or no keys at all."""
    num_rows = context if rows == "queries" else 0
    return View(None, None, num_rows, 0, Bounds(num_rows, whole(context), constant(0), constant(0)))


def row_edge(segments: tuple[View, ...], tile_rows: int, aligned: bool) -> int:
    """How many rows a tile takes that serves all segments: all, or fewer, so that tiles end where closed runs end."""
    closed = next((one for one in segments if one.closed_period() is not None), None)
    return edge_of(closed, tile_rows) if aligned and closed is not None else tile_rows


def packed(
    patterns: tuple[Pattern, ...],
    context: int,
    rows: Side,
    parts: Parts,
    number: int,
    tile_rows: int,
    aligned: bool,
    device: torch.device,
) -> Pass:
    """Pass ``number`` of these heads in tiles of ``tile_rows`` rows, ``aligned`` to closed runs or not."""
    group = groups(patterns, context, rows, parts)[number]
    rows_of_segments, columns, bounds = forms_of(group)
    row_form = max(rows_of_segments)
    data, table, num_row_tiles = Vectors(), [], 0
    for head in group:
        edge = row_edge(head, tile_rows, aligned)
        num_row_tiles = max(num_row_tiles, -(-head[0].num_rows // edge))
        for one, column_form, bound_form in zip(head, columns, bounds, strict=True):
            table.append(view_fields(one, edge, data, row_form, column_form, bound_form))
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


def view_fields(one: View, edge: int, data: Vectors, row_form: Form, column_form: Form, bound_form: Form) -> list[int]:
    """One row of the table."""
    lists = [0, 0, 0, 0, 0]
    if row_form == Form.LISTED:
        lists[0] = data.add(_positions(one.row_positions, one.num_rows))
    if column_form == Form.LISTED:
        lists[1] = data.add(_positions(one.column_positions, one.num_columns))
    if bound_form == Form.LISTED:
        lists[2:4] = (data.add(bound) for bound in one.intervals)
    bounds = one.bounds if isinstance(one.bounds, Bounds) else Bounds(0, 1, constant(0), constant(0))
    return [
        one.num_rows,
        edge,
        *lists,
        *fold_fields(one.row_order),
        *fold_fields(one.column_order),
        *divisor(bounds.period),
        *(field for bound in (bounds.low, bounds.high) for field in (*bound[:-1], *divisor(bound.grain))),
    ]


def sources(
    patterns: tuple[Pattern, ...], context: int, parts: Parts, slices: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Form]:
    """Where the sums of the first passes over keys lie in a workspace, for kernels that add them up by position.

    Args:
        patterns: one a head.
        context: N.
        parts: which parts of a pattern the passes serve.
        slices: for each of the first passes, into how many slices of queries it was split.
        device: of the result.

    Returns:
        A table (H, sources, SOURCE_FIELDS) int32, its data, and how rows are found: FOLDED or LISTED.
    """
    passes = groups(patterns, context, "keys", parts)[: len(slices)]
    form = max((form_of(head[0].row_order) for group in passes for head in group), default=Form.FOLDED)
    form = max(form, Form.FOLDED)
    data, table = Vectors(), []
    for head in range(len(patterns)):
        base = 0
        for group, count in zip(passes, slices, strict=True):
            one = group[head][0]
            start = 0
            if form == Form.LISTED:  # the row of every position, -1 where it has none: (N,)
                rows = torch.full((context,), -1, dtype=torch.int64)
                rows[_positions(one.row_positions, one.num_rows)] = torch.arange(one.num_rows)
                start = data.add(rows)
            inverse = one.row_order.inverse() if isinstance(one.row_order, Fold) else None
            width = UNREACHED if inverse is None or inverse.width is None else inverse.width
            for _ in range(count):
                table.append([base, one.num_rows, start, width, *fold_fields(inverse)])
                base += max(h[0].num_rows for h in group)
    shape = (len(patterns), sum(slices), len(SOURCE_FIELDS))
    return int32_table(table, device).view(shape), data.tensor(device), form


_natural = lru_cache(maxsize=8)(torch.arange)  # one tensor, which ``Vectors`` then stores once


def _positions(order: Tensor | None, count: int) -> Tensor:
    return _natural(count) if order is None else order


def form_of(order: Order) -> Form:
    """The cheapest way to read an order."""
    return Form.NATURAL if order is None else Form.FOLDED if isinstance(order, Fold) else Form.LISTED


def forms_of(heads: Sequence[Sequence[View]]) -> tuple[tuple[Form, ...], tuple[Form, ...], tuple[Form, ...]]:
    """The cheapest way to read the rows, the columns and the intervals of each segment, one for all heads."""
    segments = list(zip(*heads, strict=True))
    rows = tuple(max(form_of(one.row_order) for one in segment) for segment in segments)
    columns = tuple(max(form_of(one.column_order) for one in segment) for segment in segments)
    return rows, columns, tuple(map(_form_of_bounds, segments))


def _form_of_bounds(segment: Sequence[View]) -> Form:
    if any(not isinstance(one.bounds, Bounds) for one in segment):
        return Form.LISTED
    ends = (end for one in segment if isinstance(one.bounds, Bounds) for end in (one.bounds.low, one.bounds.high))
    return Form.STAIRS if any(end.grain > 1 for end in ends) else Form.FOLDED


def divisor(period: int) -> tuple[int, int, int]:
    """period, magic, bits."""
    bits = (period - 1).bit_length()
    return period, -(-(1 << (31 + bits)) // period), bits


def fold_fields(order: Order) -> list[int]:
    """The integers of a fold; for any other order those of the natural one."""
    if not isinstance(order, Fold):
        return [*divisor(UNREACHED), 0, 1, 0]
    return [*divisor(order.period), order.step, order.stride, order.shift]


def int32_table(rows: list[list[int]] | np.ndarray, device: torch.device) -> Tensor:
    """Rows of integers, some of them unsigned, as int32."""
    wide = np.array(rows, dtype=np.int64)
    assert ((wide >= -(2**31)) & (wide < 2**32)).all(), "a form reaches beyond 32 bits"
    return torch.from_numpy(wide.astype(np.uint32).view(np.int32)).to(device)


class Vectors:
    """Vectors laid end to end; a tensor that is added twice is stored once."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = [torch.zeros(1, dtype=torch.int32)]  # never empty
        self._sources: dict[int, tuple[Tensor, int]] = {}  # the tensor is kept, so that its id stays taken
        self._length = 1

    def add(self, vector: Tensor) -> int:
        """Add a vector, and return where it begins."""
        if id(vector) not in self._sources:
            self._sources[id(vector)] = (vector, self._length)
            self._tensors.append(vector.int())
            self._length += vector.numel()
        return self._sources[id(vector)][1]

    def tensor(self, device: torch.device) -> Tensor:
        """All vectors, int32."""
        return torch.cat(self._tensors).to(device)
