"""The host side of a launch: sizes, dtypes and device of one call, and what surrounds a kernel.

Letters: B batch, H heads of q, N positions, D width of q and k, Dv width of v.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

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
from longstride.kernels.backends.triton.packing import Form, Parts, Pass, groups, packed, sources
from longstride.kernels.backends.triton.recording import Inputs, Recorder, Recording
from longstride.kernels.patterns import Pattern
from longstride.kernels.plan import Side

INTERPRETED = not isinstance(forward_kernel, triton.runtime.JITFunction)  # settled when triton was imported


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
        return candidates_on(self.device, kernel, self.dtype.itemsize, widest, overlapping)

    def choices(self, kernel: Kernel, parts: Parts) -> tuple[Choice, ...]:
        """The configuration of each pass of a kernel on this device."""
        rows: Side = "keys" if kernel == "dkdv" else "queries"
        of_runs = self.candidates("closed_forward") if kernel == "forward" else ()
        return chosen(self.candidates(kernel), self.patterns, self.context, rows, parts, of_runs)

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


def candidates_on(
    device: torch.device, kernel: Kernel, bytes_an_element: int, width: int, overlapping: bool = False
) -> tuple[Configuration, ...]:
    """The configurations of a kernel on a device."""
    return candidates(kernel, architecture(device), bytes_an_element, width, overlapping)
