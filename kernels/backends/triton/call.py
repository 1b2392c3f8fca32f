"""The host side of a launch: sizes, dtypes and device of one call, and what surrounds a kernel.

Letters: B batch, H heads of q, N positions, D width of q and k, Dv width of v.

The tensor memory accelerator of some cards copies tiles of keys (or queries) by itself, given a descriptor. A
descriptor sees (B, H, N, D) as (B, H, outer, inner, D): position = outer index * inner + inner index. A tile of the
natural order is a run of the outer index (inner 1); of a column, a run of the outer index at one inner index; of the
summary keys, the same few inner indices of a run of blocks. Nothing is moved or gathered, and a kernel is spared the
addresses. What does not fit this form is read by addresses, as on all other cards.

``specialized_kernel`` takes descriptors of two axes alone (``Flat``): all rows of all batch entries and heads that lie
apart by the same stride, and the columns of all heads that lie side by side.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longstride.kernels.backends import accumulator_dtype, empty_like_rows
from longstride.kernels.backends.triton.configurations import (
    Choice,
    Configuration,
    Kernel,
    candidates,
    chosen,
    slices_of,
)
from longstride.kernels.backends.triton.forward_kernel import forward_kernel
from longstride.kernels.backends.triton.packing import Form, Parts, Pass, Shape, groups, packed, row_edge, sources
from longstride.kernels.backends.triton.recording import ALIGNMENT, Inputs, Recorder, Recording
from longstride.kernels.forms import Bounds
from longstride.kernels.patterns import Pattern
from longstride.kernels.plan import Side, View

# The triton that makes warps specialise, found by compiling: 3.7 slices a tile, not its descriptor, and gives up.
SPECIALIZES = tuple(map(int, triton.__version__.split(".")[:2])) == (3, 6)
INTERPRETED = not isinstance(forward_kernel, triton.runtime.JITFunction)  # settled when triton was imported
SEGMENTS = 2  # segments with descriptors: a kernel has parameters for no more


class Box(NamedTuple):
    """How a descriptor sees positions: their outer and inner size, and the inner size of a tile."""

    shape: Shape
    outer: int
    inner: int
    tile_inner: int


ADDRESSES = Box(Shape.ADDRESSES, 0, 0, 0)


class Flat(NamedTuple):
    """A tensor (B, H, N, D) as one of two axes, and where there a batch entry and a head begin."""

    rows: int
    columns: int
    row_of_batch: int
    row_of_head: int
    column_of_head: int


def interpreter_trouble() -> str | None:
    """Why this triton cannot interpret kernels with this numpy, or None."""
    of_triton, of_numpy = (tuple(map(int, v.split(".")[:2])) for v in (triton.__version__, np.__version__))
    if of_triton < (3, 7) and of_numpy >= (2, 4):
        return f"the interpreter of triton {triton.__version__} needs numpy below 2.4, not {np.__version__}"
    return None


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q and scale with the same scores and a positive scale: the kernels take the maximum before scaling."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


class Call:
    """The sizes, dtypes, patterns and device of one call; ``selected`` has those that follow a selection.

    A ``recorder`` notes what the call allocates, reads of plans and launches.
    """

    def __init__(self, q: Tensor, v: Tensor, patterns: tuple[Pattern, ...], recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self.batch, self.heads, self.context, width = q.shape
        self.group = self.heads // v.shape[1]  # heads of q that read the same head of k and v
        self.patterns = patterns
        self.dtype = q.dtype
        self.device = q.device
        self.wide = accumulator_dtype(q.dtype)
        # numpy has no bf16: the interpreter computes in fp32 and rounds where a card would round.
        self.round_bf16 = INTERPRETED and q.dtype == torch.bfloat16
        self.readable_dtype = torch.float32 if self.round_bf16 else q.dtype  # what the kernels read and write
        self.widths = {
            "WIDTH": width,
            "W": max(16, triton.next_power_of_2(width)),
            "VALUE_WIDTH": v.shape[-1],
            "WV": max(16, triton.next_power_of_2(v.shape[-1])),
        }

    def readable(self, tensor: Tensor) -> Tensor:
        """The tensor with adjacent columns, in a dtype that the kernels can read."""
        tensor = tensor.to(self.readable_dtype)
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def empty(self, *shape: int) -> Tensor:
        """New memory for what is accumulated, contiguous."""
        return self._new(torch.empty(shape, dtype=self.wide, device=self.device))

    def empty_like_rows(self, like: Tensor, heads: int | None = None) -> Tensor:
        """New memory for a result that lies as a tensor does, in a dtype that the kernels write."""
        return self._new(empty_like_rows(like, self.readable_dtype, heads=heads))

    def _new(self, tensor: Tensor) -> Tensor:
        return tensor if self.recorder is None else self.recorder.allocated(tensor)

    def candidates(self, kernel: Kernel, overlapping: bool = False) -> tuple[Configuration, ...]:
        """The configurations of a kernel on this device."""
        widest = max(self.widths["W"], self.widths["WV"])
        return candidates(kernel, architecture(self.device), self.dtype.itemsize, widest, overlapping)

    def choices(self, kernel: Kernel, parts: Parts) -> tuple[Choice, ...]:
        """The configuration of each pass of a kernel on this device."""
        rows: Side = "keys" if kernel == "dkdv" else "queries"
        return chosen(self.candidates(kernel), self.patterns, self.context, rows, parts)

    def packed(self, rows: Side, parts: Parts, number: int, choice: Choice) -> Pass:
        """A pass on this device."""
        tile_rows, _ = choice.configuration.tile_sizes(rows)
        one = packed(self.patterns, self.context, rows, parts, number, tile_rows, choice.aligned, self.device)
        if self.recorder is not None:
            self.recorder.constant(one.table, one.data)
        return one

    def forms(self, one: Pass) -> dict[str, object]:
        """The constants by which kernels over tiles of queries read a pass."""
        columns, bounds = (tuple(int(form) for form in forms) for forms in (one.columns, one.bounds))
        return {
            "SEGMENTS": len(columns),
            "ROWS": int(one.rows),
            "COLUMNS": columns,
            "BOUNDS": bounds,
            "EARLIER": one.earlier,
            "GROUP": self.group,
        }

    def ends_with_every_key(self, parts: Parts) -> bool:
        """Whether the last pass over keys holds all keys of every head."""
        last = groups(self.patterns, self.context, "keys", parts)[-1]
        return all(head[0].num_rows == self.context for head in last)

    def sources(self, parts: Parts, slices: tuple[int, ...]) -> tuple[Tensor, Tensor, Form]:
        """Where the sums of the first passes over keys lie: see ``packing.sources``."""
        table, data, form = sources(self.patterns, self.context, parts, slices, self.device)
        if self.recorder is not None:
            self.recorder.constant(table, data)
        return table, data, form

    def descriptors(
        self, choice: Choice, rows: Side, parts: Parts, number: int, one: Tensor, other: Tensor
    ) -> tuple[list[Any], tuple[int, ...]]:
        """Descriptors of two tensors for each segment that a kernel has parameters for, and the shapes of the tiles.

        Where there is no descriptor, the tensors themselves fill the parameter; the kernel does not read it.
        """
        sizes = choice.configuration.tile_sizes(rows)
        by_segment = boxes(self.patterns, self.context, rows, parts, number, *sizes, choice.aligned)
        if not choice.configuration.described or not describable(one, other):
            by_segment = (ADDRESSES,) * len(by_segment)
        arguments: list[Any] = []
        for box in (*by_segment, ADDRESSES)[:SEGMENTS]:
            for tensor, width in ((one, self.widths["W"]), (other, self.widths["WV"])):
                plain = box.shape == Shape.ADDRESSES
                arguments.append(tensor if plain else descriptor_of(tensor, box, sizes[1], width))
        return arguments, tuple(int(box.shape) for box in by_segment)

    def flat_descriptors(self, one: Configuration, *tensors: Tensor) -> tuple[list[Any], list[int]] | None:
        """Descriptors of q, k, v for ``specialized_kernel``, and where their heads begin; None where it cannot serve.

        Widths must not be padded: what lies beyond a head's columns may be those of the next one.
        """
        flat = [flat_of(tensor) for tensor in tensors]
        padded = self.widths["WIDTH"] < self.widths["W"] or self.widths["VALUE_WIDTH"] < self.widths["WV"]
        if padded or None in flat or not describable(*tensors):
            return None
        descriptors: list[Any] = []
        begins: list[int] = []
        for tensor, view, rows in zip(tensors, flat, (one.block_q, one.block_k, one.block_k), strict=True):
            assert view is not None
            strides = [tensor.stride(2), 1]
            descriptors.append(TensorDescriptor(tensor, [view.rows, view.columns], strides, [rows, tensor.shape[-1]]))
            begins += view[2:]
        return descriptors, begins

    def num_slices(self, parts: Parts, number: int, choice: Choice) -> int:
        """Into how many slices of queries to split a pass over keys."""
        return slices_of(choice, self.patterns, self.context, parts, number, self.batch, self.processors())

    def processors(self) -> int:
        """Multiprocessors of the device."""
        return num_processors(self.device)

    def launch(
        self,
        kernel: Any,
        programs: int,
        tensors: tuple[Any, ...],
        strided: tuple[Tensor, ...],
        sizes: tuple[int, ...],
        tiles: Configuration | None,
        **constants: object,
    ) -> None:
        """Launch a kernel over all heads, with ``programs`` programs a head."""
        grid = programs * self.batch * self.heads
        if grid == 0:
            return
        strides = [stride for tensor in strided for stride in tensor.stride()[:3]]
        if tiles is not None:
            constants |= {"BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k, "ROUND_BF16": self.round_bf16}
            constants |= tiles.options()
        constants["ACCUMULATOR"] = tl.float64 if self.wide == torch.float64 else tl.float32
        arguments = [*tensors, *strides, self.heads, self.context, *sizes]
        with _quiet() if INTERPRETED else torch.cuda.device(self.device):
            compiled = kernel[(grid,)](*arguments, **constants)
        if self.recorder is not None:
            further = [constants[name] for name in kernel.arg_names[len(arguments) :]]
            self.recorder.launched(kernel if INTERPRETED else compiled, grid, arguments + further)


def again(recording: Recording, inputs: Inputs, device: torch.device) -> tuple[Tensor, ...]:
    """A recorded call with other inputs, on their device."""
    if INTERPRETED:
        with _quiet():
            return recording.again(inputs, device, None)
    driver = triton.runtime.driver.active
    current = driver.get_current_device()
    if device.index == current or device.index is None:
        return recording.again(inputs, device, driver.get_current_stream(current))
    with torch.cuda.device(device):
        return recording.again(inputs, device, driver.get_current_stream(device.index))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The interpreter without warnings about inf and nan."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, by the interpreter
        yield


def batch_stride(table: Tensor) -> int:
    """Integers from a batch entry's rows of a table to the next one's; 0 where all have the same."""
    return table.stride(0) if table.dim() == 4 else 0


def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device."""
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def architecture(device: torch.device) -> str:
    """The name of a table of configurations: interpreter, sm_90, gfx942, …"""
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def box_of(view: View, context: int, edge: int, block: int) -> Box:
    """How a descriptor sees tiles of ``block`` columns, where tiles of rows take ``edge`` rows."""
    order, bounds = view.column_order, view.bounds
    if view.num_columns == 0 or isinstance(order, Tensor):
        return ADDRESSES
    if order is None:
        return Box(Shape.NATURAL, context, 1, 1)
    if not isinstance(bounds, Bounds):
        return ADDRESSES
    if order.step == 1 and order.stride > 1:
        period = view.closed_period()  # the columns that a tile of rows visits must not cross into another column
        if period is None or period != order.period or period % edge:
            return ADDRESSES
        return Box(Shape.COLUMN, order.period, order.stride, 1)
    # A few positions of every block, read from the first block on.
    from_the_first = bounds.low.step == 0 and bounds.low.least == bounds.low.most == 0
    power_of_two = order.period & (order.period - 1) == 0
    if not from_the_first or not power_of_two or block % order.period or context % order.step:
        return ADDRESSES
    return Box(Shape.BLOCKS, context // order.step, order.step, order.period)


@lru_cache(maxsize=4096)
def boxes(
    patterns: tuple[Pattern, ...],
    context: int,
    rows: Side,
    parts: Parts,
    number: int,
    tile_rows: int,
    tile_columns: int,
    aligned: bool,
) -> tuple[Box, ...]:
    """How a descriptor sees the columns of each segment of a pass; by addresses where heads differ."""
    group = groups(patterns, context, rows, parts)[number]
    by_segment = []
    for segment in range(len(group[0])):
        distinct = {box_of(head[segment], context, row_edge(head, tile_rows, aligned), tile_columns) for head in group}
        by_segment.append(distinct.pop() if len(distinct) == 1 else ADDRESSES)
    return tuple(by_segment) if len(by_segment) <= SEGMENTS else (ADDRESSES,) * len(by_segment)


def describable(*tensors: Tensor) -> bool:
    """Whether addresses and strides have the alignment that descriptors need, and no axis is expanded."""
    return all(
        t.data_ptr() % ALIGNMENT == 0
        and t.stride(-1) == 1
        and all(stride > 0 and stride * t.itemsize % ALIGNMENT == 0 for stride in t.stride()[:3])
        for t in tensors
    )


def descriptor_of(tensor: Tensor, box: Box, block: int, width: int) -> TensorDescriptor:
    """The descriptor of (B, H, N, D) for tiles of ``block`` positions and ``width`` padded columns."""
    batch, heads, _, columns = tensor.shape
    stride_b, stride_h, stride_n, _ = tensor.stride()
    shape = [batch, heads, box.outer, box.inner, columns]
    strides = [stride_b, stride_h, box.inner * stride_n, stride_n, 1]
    return TensorDescriptor(tensor, shape, strides, [1, 1, block // box.tile_inner, box.tile_inner, width])


def flat_of(tensor: Tensor) -> Flat | None:
    """(B, H, N, D) as two axes; None where batch entries do not begin with whole rows, or heads lie across rows."""
    (batch, heads, context, width), (stride_b, stride_h, stride_n, _) = tensor.shape, tensor.stride()
    if stride_n < width or stride_b % stride_n:
        return None
    row_of_head, column_of_head = divmod(stride_h, stride_n)
    columns = (heads - 1) * column_of_head + width
    rows = (batch - 1) * (stride_b // stride_n) + (heads - 1) * row_of_head + context
    if columns > stride_n or rows >= 2**31:
        return None
    return Flat(rows, columns, stride_b // stride_n, row_of_head, column_of_head)
