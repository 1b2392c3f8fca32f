"""Selections as a launch reads them: every order and bound a vector of its own for each context and head.

Letters: B batch, H heads, N positions, M keys of a part, P parts, S segments.

All vectors are laid end to end in one tensor, on the device, by operations that the host does not wait for. A table
(``packing``) says where those of each context and head begin. It follows from sizes alone, so it is cached.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longstride.kernels.backends.triton.configurations import (
    Choice,
    Kernel,
    chosen_by_span,
    num_slices,
    pipelined,
)
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
    """Where the vectors of an order or a bound begin: that of the first context and head, and the steps to others."""

    first: int
    by_batch: int  # 0 where all contexts have the same
    by_head: int


class Segment(NamedTuple):
    """Where a pass finds one part; None is a natural order, or nothing."""

    rows: Place | None
    columns: Place | None
    low: Place | None
    high: Place | None
    earlier: Place | None


SelectedPass = tuple[tuple[int, ...], tuple[Segment, ...]]  # of some parts: their numbers, and where they are
PLACES = tuple(FIELDS.index(f"{name}_list") for name in ("row", "column", "low", "high", "earlier"))


class Lists:
    """Vectors of all contexts and heads laid end to end; what stands in the same memory is laid down once."""

    def __init__(self) -> None:
        self._vectors: list[Tensor] = []  # kept, so that their memory stays taken
        self._places: dict[Hashable, Place] = {}
        self._length = 0

    def add(self, vectors: Tensor | None) -> Place | None:
        """Add (B, H, …) int32; axes of stride 0 take no room."""
        if vectors is None:
            return None
        key = (vectors.data_ptr(), vectors.shape, vectors.stride())
        if key not in self._places:
            kept = distinct(vectors)
            (batch, heads), length = kept.shape[:2], kept.shape[2:].numel()
            self._places[key] = Place(self._length, heads * length * (batch > 1), length * (heads > 1))
            self._vectors.append(kept)
            self._length += kept.numel()
        return self._places[key]

    def tensor(self) -> Tensor:
        """All vectors, int32."""
        assert self._length < 2**31, "lists of 8 GiB have begun to overflow their places"
        return torch.cat([vectors.reshape(-1) for vectors in self._vectors])


def distinct(vectors: Tensor) -> Tensor:
    """(B or 1, H or 1, …): without what axes of stride 0 repeat."""
    for axis in (0, 1):
        if vectors.stride(axis) == 0:
            vectors = vectors.narrow(axis, 0, min(1, vectors.shape[axis]))
    return vectors


def rows_of_columns(low: Tensor, high: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """The rows of each column, an interval too, from the columns of each row: as ``plan.transposed``, a head at a time.

    Args:
        low, high: (B, H, N) int32, neither ever decreasing.
        num_columns: M.

    Returns:
        Two of (B or 1, H or 1, M) int32.
    """

    def rows_up_to(bound: Tensor) -> Tensor:  # the number of rows whose bound is no more than the column
        column = torch.arange(num_columns, dtype=torch.int32, device=bound.device)
        column = column.expand(*bound.shape[:2], num_columns).contiguous()
        return torch.searchsorted(bound.contiguous(), column, right=True, out_int32=True)

    first = rows_up_to(distinct(high))
    return first, torch.maximum(first, rows_up_to(distinct(low)))


class SelectedPlanner(Planner):
    """Makes the launch plan of one call with a selection; the host reads no value of it."""

    def __init__(self, inputs: Inputs, selection: Selection) -> None:
        super().__init__(inputs, ())
        self.parts, self.span, self.disjoint = selection.parts, selection.span, selection.disjoint
        # Each part is a pass over keys. One that holds every key is the last, if there is one: it adds up.
        self.by_keys = sorted(range(len(self.parts)), key=self.num_keys)

    def num_keys(self, number: int) -> int:
        """M of a part."""
        order = self.parts[number].key_order
        return self.context if order is None else order.shape[-1]

    def choices(self, kernel: Kernel, parts: Parts) -> tuple[Choice, ...]:
        """By the span; of the candidates for overlapping parts where a pass has one after the first."""
        rows: Side = "keys" if kernel == "dkdv" else "queries"
        choices = []
        for numbers, segments in self._passes(rows)[0]:
            candidates = self.candidates(kernel, overlapping=not self.disjoint and max(numbers) > 0)
            choice = chosen_by_span(candidates, self.span, self.context, rows)
            if any(segment.columns for segment in segments):
                choice = choice._replace(configuration=pipelined(choice.configuration))
            choices.append(choice)
        return tuple(choices)

    def packed(self, rows: Side, parts: Parts, number: int, choice: Choice) -> Pass:
        """A pass on this device."""
        passes, data = self._passes(rows)
        numbers, segments = passes[number]
        num_rows = self.num_queries if rows == "queries" else self.num_keys(numbers[0])
        edge, _ = choice.configuration.tile_sizes(rows)
        return Pass(
            table=table_of(self.batch, self.heads, num_rows, edge, segments, self.device),
            data=data,
            num_row_tiles=-(-num_rows // edge),
            num_rows=num_rows,
            rows=_form_at(segments[0].rows),
            columns=tuple(_form_at(segment.columns) for segment in segments),
            bounds=(Form.LISTED,) * len(segments),
            earlier=(0,) * len(segments) if self.disjoint else numbers,
        )

    def ends_with_every_key(self, parts: Parts) -> bool:
        """Whether the last pass over keys holds all of them."""
        return self.num_keys(self.by_keys[-1]) == self.context

    def num_slices(self, parts: Parts, number: int, choice: Choice) -> int:
        """As far as the longest of the programs tells: the host does not know how many visits each has."""
        tile_rows, _ = choice.configuration.tile_sizes("keys")
        programs = -(-self.num_keys(self.by_keys[number]) // tile_rows) * self.batch * self.heads
        return num_slices(programs, choice.longest, num_processors(self.device))

    def sources(self, parts: Parts, slices: tuple[int, ...]) -> tuple[Tensor, Tensor, Form]:
        """As ``packing.sources``, but the table is (B, H, sources, SOURCE_FIELDS)."""
        numbers = self.by_keys[: len(slices)]
        listed = any(self.parts[number].key_order is not None for number in numbers)
        lists, fields, base = Lists(), [], 0
        for number, count in zip(numbers, slices, strict=True):
            place = lists.add(self._columns[number]) if listed else None
            for _ in range(count):
                fields.append((base, self.num_keys(number), place))
                base += self.num_keys(number)
        table = source_table_of(self.batch, self.heads, tuple(fields), self.device)
        # Where nothing is listed, any integers will do.
        return (table, lists.tensor(), Form.LISTED) if listed else (table, self.parts[0].low, Form.FOLDED)

    def _passes(self, rows: Side) -> tuple[list[SelectedPass], Tensor]:
        return self._by_query if rows == "queries" else self._by_key

    @cached_property
    def _by_query(self) -> tuple[list[SelectedPass], Tensor]:
        """Passes over queries, each with the numbers of its parts: those whose rows are in the same order share one."""
        lists = Lists()
        groups: dict[Place | None, list[tuple[int, Segment]]] = {}
        for number, (query_order, key_order, low, high) in enumerate(self.parts):
            vectors = (query_order, key_order, low, high, self._earlier)
            segment = Segment(*map(lists.add, vectors))
            groups.setdefault(segment.rows, []).append((number, segment))
        return [tuple(zip(*group, strict=True)) for group in groups.values()], lists.tensor()  # type: ignore[misc]

    @cached_property
    def _by_key(self) -> tuple[list[SelectedPass], Tensor]:
        """Passes over keys: one a part, as each has its keys in an order of its own."""
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
        """For each part the column of every key, -1 for those that it has not: (B or 1, H or 1, N) int32."""
        natural = torch.arange(self.context, dtype=torch.int32, device=self.device)[None, None]
        orders = (part.key_order for part in self.parts)
        return [natural if order is None else inverse_order(distinct(order), self.context) for order in orders]

    @cached_property
    def _earlier(self) -> Tensor | None:
        """What ``without_earlier`` reads, (B, H, P - 1, 3, N) int32; None where parts are disjoint."""
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


def _form_at(place: Place | None) -> Form:
    return Form.NATURAL if place is None else Form.LISTED


@cached
def table_of(
    batch: int, heads: int, num_rows: int, edge: int, segments: tuple[Segment, ...], device: torch.device
) -> Tensor:
    """A pass's table, (B, H, S, FIELDS) int32; cached, as it follows from sizes."""
    table = np.zeros((batch, heads, len(segments), len(FIELDS)), dtype=np.int64)
    table[..., FIELDS.index("num_rows")], table[..., FIELDS.index("edge")] = num_rows, edge
    for number, segment in enumerate(segments):
        for field, place in zip(PLACES, segment, strict=True):
            table[:, :, number, field] = _begins(place, batch, heads)
    return int32_table(table, device)


@cached
def source_table_of(
    batch: int, heads: int, fields: tuple[tuple[int, int, Place | None], ...], device: torch.device
) -> Tensor:
    """(B, H, sources, SOURCE_FIELDS) int32 from the base, the length and the list of each source; cached likewise."""
    table = np.zeros((batch, heads, len(fields), len(SOURCE_FIELDS)), dtype=np.int64)
    for number, (base, length, place) in enumerate(fields):
        table[:, :, number] = [base, length, 0, UNREACHED, *fold_fields(None)]
        table[:, :, number, SOURCE_FIELDS.index("list")] = _begins(place, batch, heads)
    return int32_table(table, device)


def _begins(place: Place | None, batch: int, heads: int) -> np.ndarray:
    """(B, H): where the vector of each context and head begins."""
    first, by_batch, by_head = place or (0, 0, 0)
    return first + by_batch * np.arange(batch)[:, None] + by_head * np.arange(heads)
