"""Pack selections for a launch: orders and bounds are vectors, for each context and head.

Letters: B batch, H heads, N positions, M keys of a part, P parts, S segments.

All vectors are concatenated on the device, without the host waiting. A table (``packing``) says where the vectors of
each context and head start. It depends only on sizes, so it is cached.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longstride.kernels.backends.triton.configurations import Choice, Kernel, choose_by_span, num_slices, pipelined
from longstride.kernels.backends.triton.launch_plan import Inputs, Planner, num_processors
from longstride.kernels.backends.triton.packing import (
    FIELDS,
    SOURCE_FIELDS,
    UNREACHED,
    Form,
    Parts,
    Pass,
    fold_fields,
    int32_table,
)
from longstride.kernels.cache import cached
from longstride.kernels.plan import Side
from longstride.kernels.selections import Selection, inverse_order


class Place(NamedTuple):
    """The start of the vectors of an order or a bound: for the first context and head, and the steps to others."""

    first: int
    by_batch: int  # 0 if all contexts have the same
    by_head: int


class Segment(NamedTuple):
    """The places of one part in a pass; None is a natural order, or nothing."""

    rows: Place | None
    columns: Place | None
    low: Place | None
    high: Place | None
    earlier: Place | None


SelectedPass = tuple[tuple[int, ...], tuple[Segment, ...]]  # numbers of some parts, and their places
PLACES = tuple(FIELDS.index(f"{name}_list") for name in ("row", "column", "low", "high", "earlier"))


class Lists:
    """Concatenated vectors of all contexts and heads; the same memory is stored once."""

    def __init__(self) -> None:
        self._vectors: list[Tensor] = []  # also keeps their memory from being reused
        self._places: dict[Hashable, Place] = {}
        self._length = 0

    def add(self, vectors: Tensor | None) -> Place | None:
        """Add (B, H, …) int32; axes of stride 0 are stored once."""
        if vectors is None:
            return None
        key = (vectors.data_ptr(), vectors.shape, vectors.stride())
        if key not in self._places:
            stored = distinct(vectors)
            (batch, heads), length = stored.shape[:2], stored.shape[2:].numel()
            self._places[key] = Place(self._length, heads * length * (batch > 1), length * (heads > 1))
            self._vectors.append(stored)
            self._length += stored.numel()
        return self._places[key]

    def tensor(self) -> Tensor:
        """Return all vectors, int32."""
        assert self._length < 2**31, "lists of 8 GiB exceed 32-bit places"
        return torch.cat([vectors.reshape(-1) for vectors in self._vectors])


def distinct(vectors: Tensor) -> Tensor:
    """Return (B or 1, H or 1, …), without the repeats of axes with stride 0."""
    for axis in (0, 1):
        if vectors.stride(axis) == 0:
            vectors = vectors.narrow(axis, 0, min(1, vectors.shape[axis]))
    return vectors


def rows_of_columns(low: Tensor, high: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return the rows of each column, an interval too, from the columns of each row: ``plan.transposed`` per head.

    Args:
        low, high: (B, H, N) int32, never decreasing.
        num_columns: M.

    Returns:
        Two of (B or 1, H or 1, M) int32.
    """

    def rows_up_to(bound: Tensor) -> Tensor:  # number of rows with a bound up to the column
        column = torch.arange(num_columns, dtype=torch.int32, device=bound.device)
        column = column.expand(*bound.shape[:2], num_columns).contiguous()
        return torch.searchsorted(bound.contiguous(), column, right=True, out_int32=True)

    first = rows_up_to(distinct(high))
    return first, torch.maximum(first, rows_up_to(distinct(low)))


class SelectedPlanner(Planner):
    """Builds the launch plan of a call with a selection, without reading its values on the host."""

    def __init__(self, inputs: Inputs, selection: Selection) -> None:
        super().__init__(inputs, ())
        self.parts, self.span, self.disjoint = selection.parts, selection.span, selection.disjoint
        # Each part is a pass over keys. If a part has every key, it is the last pass, which adds the sums.
        self.by_keys = sorted(range(len(self.parts)), key=self.num_keys)

    def num_keys(self, number: int) -> int:
        """Return M of a part."""
        order = self.parts[number].key_order
        return self.context if order is None else order.shape[-1]

    def choices(self, kernel: Kernel, parts: Parts) -> tuple[Choice, ...]:
        """Choose by the span. Passes with overlapping parts after the first have other candidates."""
        rows: Side = "keys" if kernel == "dkdv" else "queries"
        choices = []
        for numbers, segments in self._passes(rows)[0]:
            candidates = self.candidates(kernel, overlapping=not self.disjoint and max(numbers) > 0)
            choice = choose_by_span(candidates, self.span, self.context, rows)
            if any(segment.columns for segment in segments):
                choice = choice._replace(configuration=pipelined(choice.configuration))
            choices.append(choice)
        return tuple(choices)

    def closed_choice(self) -> None:
        """Return None, as runs of a selection are not known on the host."""

    def pack(self, rows: Side, parts: Parts, number: int, choice: Choice) -> Pass:
        """Return a pass on this device."""
        passes, data = self._passes(rows)
        numbers, segments = passes[number]
        num_rows = self.num_queries if rows == "queries" else self.num_keys(numbers[0])
        edge, _ = choice.configuration.tile_sizes(rows)
        return Pass(
            table=table_of(self.batch, self.heads, num_rows, edge, segments, self.device),
            data=data,
            num_row_tiles=-(-num_rows // edge),
            num_rows=num_rows,
            rows=Form.LISTED if segments[0].rows else Form.NATURAL,
            columns=tuple(Form.LISTED if segment.columns else Form.NATURAL for segment in segments),
            bounds=(Form.LISTED,) * len(segments),
            earlier=(0,) * len(segments) if self.disjoint else numbers,
        )

    def ends_with_every_key(self, parts: Parts) -> bool:
        """Whether the last pass over keys has all keys."""
        return self.num_keys(self.by_keys[-1]) == self.context

    def num_slices(self, parts: Parts, number: int, choice: Choice) -> int:
        """Return the slices by the longest program, as the host does not know the visits of the others."""
        tile_rows, _ = choice.configuration.tile_sizes("keys")
        programs = -(-self.num_keys(self.by_keys[number]) // tile_rows) * self.batch * self.heads
        return num_slices(programs, choice.longest, num_processors(self.device))

    def sources(self, parts: Parts, slices: tuple[int, ...]) -> tuple[Tensor, Tensor, Form]:
        """Return the result of ``packing.sources``, with a table (B, H, sources, SOURCE_FIELDS)."""
        numbers = self.by_keys[: len(slices)]
        listed = any(self.parts[number].key_order is not None for number in numbers)
        lists, fields, base = Lists(), [], 0
        for number, count in zip(numbers, slices, strict=True):
            place = lists.add(self._columns[number]) if listed else None
            for _ in range(count):
                fields.append((base, self.num_keys(number), place))
                base += self.num_keys(number)
        table = source_table_of(self.batch, self.heads, tuple(fields), self.device)
        # If nothing is listed, the data are not read.
        return (table, lists.tensor(), Form.LISTED) if listed else (table, self.parts[0].low, Form.FOLDED)

    def _passes(self, rows: Side) -> tuple[list[SelectedPass], Tensor]:
        return self._by_query if rows == "queries" else self._by_key

    @cached_property
    def _by_query(self) -> tuple[list[SelectedPass], Tensor]:
        """Passes over queries, each with the numbers of its parts. Parts with the same row order share a pass."""
        lists = Lists()
        groups: dict[Place | None, list[tuple[int, Segment]]] = {}
        for number, (query_order, key_order, low, high) in enumerate(self.parts):
            vectors = (query_order, key_order, low, high, self._earlier)
            segment = Segment(*map(lists.add, vectors))
            groups.setdefault(segment.rows, []).append((number, segment))
        return [tuple(zip(*group, strict=True)) for group in groups.values()], lists.tensor()  # type: ignore[misc]

    @cached_property
    def _by_key(self) -> tuple[list[SelectedPass], Tensor]:
        """Passes over keys: one per part, as each orders its keys differently."""
        lists = Lists()
        passes: list[SelectedPass] = []
        for number in self.by_keys:
            query_order, key_order, low, high = self.parts[number]
            bounds = rows_of_columns(low, high, self.num_keys(number))
            segment = Segment(*map(lists.add, (key_order, query_order, *bounds, self._earlier)))
            passes.append(((number,), (segment,)))
        return passes, lists.tensor()

    @cached_property
    def _columns(self) -> list[Tensor]:
        """Column of every key for each part, -1 for none: (B or 1, H or 1, N) int32."""
        natural = torch.arange(self.context, dtype=torch.int32, device=self.device)[None, None]
        orders = (part.key_order for part in self.parts)
        return [natural if order is None else inverse_order(distinct(order), self.context) for order in orders]

    @cached_property
    def _earlier(self) -> Tensor | None:
        """Input of ``without_earlier``, (B, H, P - 1, 3, N) int32; None if parts are disjoint."""
        if self.disjoint or len(self.parts) == 1:
            return None
        size = (self.batch, self.heads, self.context)
        lists = torch.empty(*size[:2], len(self.parts) - 1, 3, size[2], dtype=torch.int32, device=self.device)
        for number, (query_order, _, low, high) in enumerate(self.parts[:-1]):
            for kind, bound in enumerate((low, high)):
                if query_order is None:
                    lists[:, :, number, kind] = bound
                else:
                    lists[:, :, number, kind].scatter_(-1, query_order.long(), bound)
            lists[:, :, number, 2] = self._columns[number]
        return lists


@cached
def table_of(
    batch: int, heads: int, num_rows: int, edge: int, segments: tuple[Segment, ...], device: torch.device
) -> Tensor:
    """Return a pass's table, (B, H, S, FIELDS) int32; cached, as it depends only on sizes."""
    table = np.zeros((batch, heads, len(segments), len(FIELDS)), dtype=np.int64)
    table[..., FIELDS.index("num_rows")], table[..., FIELDS.index("edge")] = num_rows, edge
    for number, segment in enumerate(segments):
        for field, place in zip(PLACES, segment, strict=True):
            table[:, :, number, field] = _starts(place, batch, heads)
    return int32_table(table, device)


@cached
def source_table_of(
    batch: int, heads: int, fields: tuple[tuple[int, int, Place | None], ...], device: torch.device
) -> Tensor:
    """Return (B, H, sources, SOURCE_FIELDS) int32, from base, length and list of each source; cached likewise."""
    table = np.zeros((batch, heads, len(fields), len(SOURCE_FIELDS)), dtype=np.int64)
    for number, (base, length, place) in enumerate(fields):
        table[:, :, number] = [base, length, 0, UNREACHED, *fold_fields(None)]
        table[:, :, number, SOURCE_FIELDS.index("list")] = _starts(place, batch, heads)
    return int32_table(table, device)


def _starts(place: Place | None, batch: int, heads: int) -> np.ndarray:
    """Return (B, H), the start of the vector of each context and head."""
    first, by_batch, by_head = place or (0, 0, 0)
    return first + by_batch * np.arange(batch)[:, None] + by_head * np.arange(heads)
