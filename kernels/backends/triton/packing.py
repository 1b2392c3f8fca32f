"""The layouts of all heads of one pass, packed so that a single launch serves them.

Letters: H heads, L distinct layouts, T row tiles of a layout, P its partial tiles.

A *pass* takes one part of every head's pattern; a pattern of two parts is two passes, merged by logsumexp. Within a
head the parts with the fewest keys come first, and heads of fewer parts join in at the end: so the last pass tends to
touch every key, and its results are final. A head that has no part in a pass has rows but no tiles there.

Everything a kernel reads of a layout lies in one int32 vector, ``data``; ``table`` says where, one row a layout, in
the fields below. All indices inside are absolute within their section of the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.patterns.base import Intervals, Part, Pattern
from kernels.plan import Plan, Side, ordered, plan, tiles

FIELDS = (
    "num_rows",
    "num_columns",
    "num_row_tiles",  # T
    "row_order",  # original position of each row
    "column_order",  # original position of each column
    "full",  # T first full tiles, then T ends of the runs
    "partial_start",  # T + 1
    "partial_tile",  # P
    "partial_bitset",  # P
    "bitsets",  # (U, tile_rows, words)
)


@dataclass(frozen=True)
class Pass:
    """What one launch reads, on the device."""

    layout_of: Tensor  # (H,) int64, row of the table
    table: Tensor  # (L, FIELDS) int64
    data: Tensor  # int32
    num_row_tiles: int  # the largest T
    rows_ordered: bool  # False: every layout's rows are in the natural order, and there is no order to read
    columns_ordered: bool
    covers: bool  # every position is a row of every head

    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(t.numel() * t.element_size() for t in (self.layout_of, self.table, self.data))


@lru_cache(maxsize=64)
def passes(
    patterns: tuple[Pattern, ...], context: int, tile_q: int, tile_k: int, rows: Side, device: torch.device
) -> tuple[Pass, ...]:
    """The passes of heads with these patterns, whose row tiles are tiles of queries or of keys; cached."""
    parts = {pattern: _sorted_parts(pattern, context) for pattern in set(patterns)}
    count = max(len(p) for p in parts.values())
    aligned = {pattern: (None,) * (count - len(p)) + p for pattern, p in parts.items()}
    return tuple(
        _pack([aligned[pattern][number] for pattern in patterns], context, tile_q, tile_k, rows, device)
        for number in range(count)
    )


def _sorted_parts(pattern: Pattern, context: int) -> tuple[Part | None, ...]:
    return tuple(sorted(pattern.parts(), key=lambda part: ordered(part, context).num_keys))


def _layout(part: Part | None, context: int, tile_q: int, tile_k: int, rows: Side) -> Plan:
    """The part's plan, or rows without tiles where a head has no part."""
    if part is not None:
        return plan(part, context, tile_q, tile_k, rows)
    num_rows, tile_rows, tile_columns = (context, tile_q, tile_k) if rows == "queries" else (0, tile_k, tile_q)
    nothing = torch.zeros(num_rows, dtype=torch.int64)
    return Plan(tiles(Intervals(nothing, nothing), tile_rows, tile_columns), num_rows, 0, None, None)


def _pack(parts: list[Part | None], context: int, tile_q: int, tile_k: int, rows: Side, device: torch.device) -> Pass:
    distinct = list(dict.fromkeys(parts))
    layouts = [_layout(part, context, tile_q, tile_k, rows) for part in distinct]
    rows_ordered = any(layout.row_order is not None for layout in layouts)
    columns_ordered = any(layout.column_order is not None for layout in layouts)
    sections = _Sections()
    natural = torch.arange(context, dtype=torch.int32) if rows_ordered or columns_ordered else torch.empty(0)
    table = []
    for layout in layouts:
        t = layout.tiles
        table.append(
            [
                layout.num_rows,
                layout.num_columns,
                t.num_row_tiles(),
                sections.add(natural if layout.row_order is None else layout.row_order) if rows_ordered else 0,
                sections.add(natural if layout.column_order is None else layout.column_order) if columns_ordered else 0,
                sections.add(torch.cat([t.full_first, t.full_last])),
                sections.add(t.partial_start),
                sections.add(t.partial_tile),
                sections.add(t.partial_bitset),
                sections.add(t.bitsets.flatten()),
            ]
        )
    return Pass(
        layout_of=torch.tensor([distinct.index(part) for part in parts], dtype=torch.int64, device=device),
        table=torch.tensor(table, dtype=torch.int64, device=device),
        data=torch.cat([*sections.tensors, torch.zeros(1, dtype=torch.int32)]).to(device),  # never empty
        num_row_tiles=max(layout.tiles.num_row_tiles() for layout in layouts),
        rows_ordered=rows_ordered,
        columns_ordered=columns_ordered,
        covers=all(layout.num_rows == context for layout in layouts),
    )


class _Sections:
    """Vectors laid end to end; the same tensor twice is stored once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._sources: dict[int, tuple[Tensor, int]] = {}  # the tensor is kept, so that its id stays taken
        self._length = 0

    def add(self, vector: Tensor) -> int:
        """Where the vector begins."""
        if id(vector) not in self._sources:
            self._sources[id(vector)] = (vector, self._length)
            self.tensors.append(vector.int())
            self._length += vector.numel()
        return self._sources[id(vector)][1]
