"""Launch plans: the allocations and launches of a call of attention, planned once for all calls of one signature.

Choosing passes, tables, tiles and specialised kernels costs the host milliseconds, longer than a short kernel runs. A
``Planner`` makes these choices from patterns, shapes, strides, dtype and device, and returns a ``LaunchPlan``. The plan
allocates, fills in tensors and launches.

Letters: B batch, H heads of q, M queries, N positions, D width of q and k, Dv width of v.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from longstride.kernels.backends import accumulator_dtype, row_strides
from longstride.kernels.backends.triton.configurations import (
    Choice,
    Configuration,
    Kernel,
    candidates,
    choose,
    closed_choice,
    slices_of,
)
from longstride.kernels.backends.triton.forward_kernel import forward_kernel
from longstride.kernels.backends.triton.packing import Form, Group, Parts, Pass, groups, pack, sources
from longstride.kernels.backends.triton.sums_kernel import gather_kernel, groups_kernel
from longstride.kernels.patterns import Pattern
from longstride.kernels.plan import Side

INTERPRETED = not isinstance(forward_kernel, triton.runtime.JITFunction)  # decided when triton was imported

Inputs = Sequence[Tensor | int | None]  # q, k and v first


def interpreter_trouble() -> str | None:
    """Return why this triton cannot interpret kernels with this numpy, or None."""
    triton_version, numpy_version = (tuple(map(int, v.split(".")[:2])) for v in (triton.__version__, np.__version__))
    if triton_version < (3, 7) and numpy_version >= (2, 4):
        return f"the interpreter of triton {triton.__version__} needs numpy below 2.4, not {np.__version__}"
    return None


class Slot(NamedTuple):
    """A tensor of a plan: an input, or memory that every run allocates."""

    number: int  # index among a run's values
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class Launch:
    """One launch of a plan."""

    kernel: Any
    grid: int
    arguments: Callable[[list[Any]], tuple[Any, ...]]  # selects from a run's values, including constants
    options: dict[str, Any]  # warps, stages, registers
    compiled: Any = None  # set by the first run on an NVIDIA card

    def run(self, values: list[Any], stream: int | None) -> None:
        """Launch on a stream of the current device, or None in the interpreter."""
        arguments, kernel = self.arguments(values), self.compiled
        if kernel is None:
            kernel = self.kernel[(self.grid,)](*arguments, **self.options)
            if not torch.version.hip:  # on AMD, kernels also depend on the size of a tensor's storage
                self.compiled = kernel
            return
        hooks = triton.knobs.runtime
        enter, leave, metadata = hooks.launch_enter_hook, hooks.launch_exit_hook, None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler is attached
            metadata = kernel.launch_metadata((self.grid,), stream, *arguments)
        else:
            enter = leave = None
        function, packed = kernel.function, kernel.packed_metadata
        kernel.run(self.grid, 1, 1, stream, function, packed, metadata, enter, leave, *arguments)


class LaunchPlan(NamedTuple):
    """A planned call, for all inputs of one signature."""

    device: torch.device
    constants: list[Any]  # values after the inputs: integers, tables, and None for allocations
    allocations: list[Slot]
    copies: list[tuple[int, int, float]]  # of inputs that kernels cannot read: (target, source, factor)
    launches: list[Launch]
    casts: list[tuple[int, torch.dtype, float]]  # of results: (value, dtype, factor)
    results: list[int]  # indices of values

    def run(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Allocate, launch, and return the results."""
        values = [*inputs, *self.constants]
        for number, shape, strides, dtype in self.allocations:
            values[number] = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
        for number, source, factor in self.copies:
            copy = values[number].copy_(values[source])
            values[number] = copy if factor == 1 else copy.mul_(factor)
        scope: AbstractContextManager[Any] = nullcontext()
        stream = None
        if INTERPRETED:
            scope = without_warnings()
        else:
            driver = triton.runtime.driver.active
            current, index = driver.get_current_device(), self.device.index
            if index not in (None, current):
                current, scope = index, torch.cuda.device(self.device)
            stream = driver.get_current_stream(current)
        with scope:
            for launch in self.launches:
                launch.run(values, stream)
        for number, dtype, factor in self.casts:
            result = values[number]
            values[number] = (result if factor == 1 else result * factor).to(dtype)
        return tuple([values[number] for number in self.results])


@contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore numpy's errors and warnings, which the interpreter causes."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


class Planner:
    """Builds a launch plan for inputs of one signature.

    ``inputs`` has a slot for each of q (B, H, …, D), k (B, K, N, D), v (B, K, N, Dv) and further inputs, or None.
    """

    def __init__(self, inputs: Inputs, patterns: tuple[Pattern, ...]) -> None:
        self.inputs: list[Any] = [
            Slot(number, tuple(value.shape), value.stride(), value.dtype)
            if isinstance(value, Tensor)
            else (None if value is None else Slot(number, (), (), torch.int64))
            for number, value in enumerate(inputs)
        ]
        q, k, v = self.inputs[:3]
        assert isinstance(inputs[0], Tensor)
        self.batch, self.heads = q.shape[:2]
        self.context = k.shape[2]
        # Fewer than N behind a cache, which takes a selection. A single query is (B, H, D).
        self.num_queries = q.shape[2] if len(q.shape) == 4 else self.context
        self.group = self.heads // v.shape[1]  # heads of q that read the same head of k and v
        self.patterns, self.dtype, self.device = patterns, q.dtype, inputs[0].device
        self.wide = accumulator_dtype(q.dtype)
        # numpy has no bf16, so the interpreter computes in fp32 and rounds as a card would.
        self.round_bf16 = INTERPRETED and q.dtype == torch.bfloat16
        self.readable_dtype = torch.float32 if self.round_bf16 else q.dtype
        self.widths = {
            "WIDTH": q.shape[-1],
            "W": max(16, triton.next_power_of_2(q.shape[-1])),
            "VALUE_WIDTH": v.shape[-1],
            "WV": max(16, triton.next_power_of_2(v.shape[-1])),
        }
        self._constants: list[Any] = []
        self._allocations: list[Slot] = []
        self._copies: list[tuple[int, int, float]] = []
        self._launches: list[Launch] = []
        self._casts: list[tuple[int, torch.dtype, float]] = []

    def readable(self, source: Slot, factor: float = 1.0) -> Slot:
        """Return an input times a factor in a form that kernels can read, by a copy if needed.

        (B, H, N, D) must have adjacent columns. Other tensors must be contiguous.
        """
        has_rows = len(source.shape) == 4
        dtype = self.readable_dtype if source.dtype == self.dtype else source.dtype
        fits = source.strides[-1] == 1 if has_rows else source.strides == contiguous_strides(source.shape)
        if fits and source.dtype == dtype and factor == 1:
            return source
        copy = self.empty_like_rows(source) if has_rows else self.empty(*source.shape, dtype=dtype)
        self._copies.append((copy.number, source.number, factor))
        return copy

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Slot:
        """Plan contiguous memory, by default in the accumulator's dtype."""
        return self._allocate(shape, contiguous_strides(shape), dtype or self.wide)

    def empty_like_rows(self, like: Slot, heads: int | None = None, rows: int | None = None) -> Slot:
        """Plan memory for a result in the layout of an input."""
        shape = (like.shape[0], heads or like.shape[1], rows or like.shape[2], like.shape[3])
        return self._allocate(shape, row_strides(shape, like.strides), self.readable_dtype)

    def _allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Slot:
        slot = Slot(self._number(None), shape, strides, dtype)
        self._allocations.append(slot)
        return slot

    def _number(self, argument: Any) -> int:
        """Return the index of a slot, or add a constant as a value and return its index."""
        if isinstance(argument, Slot):
            return argument.number
        self._constants.append(argument)
        return len(self.inputs) + len(self._constants) - 1

    def launch(
        self,
        kernel: Any,
        programs: int,
        tensors: tuple[Any, ...],
        strided: tuple[Slot, ...],
        sizes: tuple[int, ...],
        tiles: Configuration | None,
        **constants: object,
    ) -> None:
        """Plan the launch of a kernel over all heads.

        Args:
            kernel: a Triton kernel.
            programs: programs per head.
            tensors: first arguments of the kernel.
            strided: the tensors with strides among its arguments.
            sizes: integers among its arguments, after the number of heads and the context.
            tiles: configuration, for kernels that have one.
            constants: constexpr arguments and compile options.
        """
        grid = programs * self.batch * self.heads
        if grid == 0:
            return
        strides = [stride for slot in strided for stride in slot.strides[:3]]
        if tiles is not None:
            blocks = {"BLOCK": tiles.block_k, "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k}
            constants |= {name: size for name, size in blocks.items() if name in kernel.arg_names}
            constants |= {"ROUND_BF16": self.round_bf16, **tiles.options()}
        # Length of a kernel's contiguous tensors: only these two have rows of keys.
        context = self.context if kernel in (gather_kernel, groups_kernel) else self.num_queries
        constants["ACCUMULATOR"] = tl.float64 if self.wide == torch.float64 else tl.float32
        arguments = [*tensors, *strides, self.heads, context, *sizes]
        arguments += [constants.pop(name) for name in kernel.arg_names[len(arguments) :]]
        self._launches.append(Launch(kernel, grid, operator.itemgetter(*map(self._number, arguments)), constants))

    def result(self, slot: Slot, factor: float = 1.0) -> Slot:
        """Declare this memory, in the caller's dtype and times a factor, a result."""
        if slot.dtype != self.dtype or factor != 1:
            self._casts.append((slot.number, self.dtype, factor))
        return slot

    def plan(self, *results: Slot) -> LaunchPlan:
        """Return the plan of everything requested so far, with these results."""
        lists = self._constants, self._allocations, self._copies, self._launches, self._casts
        return LaunchPlan(self.device, *lists, [slot.number for slot in results])

    def candidates(self, kernel: Kernel, overlapping: bool = False) -> tuple[Configuration, ...]:
        """Return the configurations of a kernel on this device."""
        widest = max(self.widths["W"], self.widths["WV"])
        return candidates_on(self.device, kernel, self.dtype.itemsize, widest, overlapping)

    def groups(self, rows: Side, parts: Parts) -> tuple[Group, ...]:
        """Return the passes over some parts of all heads."""
        return groups(self.patterns, self.context, rows, parts)

    def choices(self, kernel: Kernel, parts: Parts) -> tuple[Choice, ...]:
        """Return the choice for each pass of a kernel on this device."""
        rows: Side = "keys" if kernel == "dkdv" else "queries"
        of_runs = self.candidates("closed_forward") if kernel == "forward" else ()
        return choose(self.candidates(kernel), self.groups(rows, parts), rows, of_runs)

    def closed_choice(self) -> Choice | None:
        """Return the choice for closed runs in the backward pass; None if a head has none or none fits."""
        return closed_choice(self.candidates("closed"), self.patterns, self.context)

    def pack(self, rows: Side, parts: Parts, number: int, choice: Choice) -> Pass:
        """Return a pass on this device."""
        tile_rows, _ = choice.configuration.tile_sizes(rows)
        return pack(self.groups(rows, parts)[number], tile_rows, choice.aligned, self.device)

    def forms(self, packed: Pass) -> dict[str, Any]:
        """Return the constants with which kernels over tiles of queries read a pass."""
        columns, bounds = (tuple(int(form) for form in forms) for forms in (packed.columns, packed.bounds))
        return {
            "SEGMENTS": len(columns),
            "ROWS": int(packed.rows),
            "COLUMNS": columns,
            "BOUNDS": bounds,
            "EARLIER": packed.earlier,
            "GROUP": self.group,
            **self.widths,
        }

    def closed_forms(self, packed: Pass) -> dict[str, Any]:
        """Return the constants with which kernels over closed runs read a pass."""
        return {"ROWS": int(packed.rows), "BOUNDS": int(packed.bounds[0]), "GROUP": self.group, **self.widths}

    def ends_with_every_key(self, parts: Parts) -> bool:
        """Whether the last pass over keys has all keys of every head."""
        return all(head[0].num_rows == self.context for head in self.groups("keys", parts)[-1])

    def sources(self, parts: Parts, slices: tuple[int, ...]) -> tuple[Tensor, Tensor, Form]:
        """Return where the sums of the first passes over keys are: see ``packing.sources``."""
        passes = self.groups("keys", parts)[: len(slices)]
        return sources(passes, self.heads, self.context, slices, self.device)

    def num_slices(self, parts: Parts, number: int, choice: Choice) -> int:
        """Return into how many slices of queries to split a pass over keys."""
        return slices_of(choice, self.groups("keys", parts)[number], self.batch, num_processors(self.device))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, each the product of the sizes after it."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def batch_stride(table: Tensor) -> int:
    """Return the stride of a table between batch entries; 0 if all have the same rows."""
    return table.stride(0) if table.dim() == 4 else 0


def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of the device."""
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def architecture(device: torch.device) -> str:
    """Return the name of a device's table of configurations: interpreter, sm_90, gfx942, …"""
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def candidates_on(
    device: torch.device, kernel: Kernel, bytes_an_element: int, width: int, overlapping: bool = False
) -> tuple[Configuration, ...]:
    """Return the configurations of a kernel on a device."""
    return candidates(kernel, architecture(device), bytes_an_element, width, overlapping)
