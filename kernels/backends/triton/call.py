"""The host side of a launch: sizes, dtypes and device of one call, and what surrounds a kernel.

Letters: B batch, H heads, N positions, D width of q and k, Dv width of v.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from longstride.kernels.autograd import accumulator_dtype
from longstride.kernels.backends.triton.choice import Choice, chosen, num_slices
from longstride.kernels.backends.triton.configurations import Configuration, Kernel, candidates
from longstride.kernels.backends.triton.described import ADDRESSES, SEGMENTS, Shape, boxes, describable, described
from longstride.kernels.backends.triton.forward_kernel import forward_kernel
from longstride.kernels.backends.triton.packing import Parts, Pass, packed
from longstride.kernels.patterns.base import Pattern
from longstride.kernels.plan import Side

INTERPRETED = not isinstance(forward_kernel, triton.runtime.JITFunction)  # settled when triton was imported


def interpreter_trouble() -> str | None:
    """Why this triton cannot interpret kernels with this numpy, or None."""
    if _version(triton.__version__) < (3, 7) and _version(np.__version__) >= (2, 4):
        return f"the interpreter of triton {triton.__version__} needs numpy below 2.4, not {np.__version__}"
    return None


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a positive scale, which the kernels need to take the maximum before scaling."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


class Call:
    """The sizes, dtypes, patterns and device of one call."""

    def __init__(self, q: Tensor, v: Tensor, patterns: tuple[Pattern, ...]) -> None:
        self.batch, self.heads, self.context, width = q.shape
        self.patterns = patterns
        self.dtype = q.dtype
        self.device = q.device
        self.wide = accumulator_dtype(q.dtype)
        # numpy has no bf16: the interpreter computes in fp32 and rounds where a card would have rounded.
        self.round_bf16 = INTERPRETED and q.dtype == torch.bfloat16
        self.widths = {
            "WIDTH": width,
            "W": max(16, triton.next_power_of_2(width)),
            "VALUE_WIDTH": v.shape[-1],
            "WV": max(16, triton.next_power_of_2(v.shape[-1])),
        }

    def readable_dtype(self) -> torch.dtype:
        """The dtype that the kernels read and write."""
        return torch.float32 if self.round_bf16 else self.dtype

    def readable(self, tensor: Tensor) -> Tensor:
        """The tensor with adjacent columns, in a dtype that the kernels can read."""
        tensor = tensor.to(self.readable_dtype())
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def candidates(self, kernel: Kernel) -> tuple[Configuration, ...]:
        """The configurations of a kernel on this device."""
        widest = max(self.widths["W"], self.widths["WV"])
        return candidates(kernel, architecture(self.device), self.dtype.itemsize, widest)

    def choices(self, kernel: Kernel, parts: Parts) -> tuple[Choice, ...]:
        """The configuration of each pass of a kernel on this device."""
        rows: Side = "keys" if kernel == "dkdv" else "queries"
        return chosen(self.candidates(kernel), self.patterns, self.context, rows, parts)

    def packed(self, rows: Side, parts: Parts, number: int, choice: Choice) -> Pass:
        """A pass on this device."""
        tile_rows = choice.configuration.block_q if rows == "queries" else choice.configuration.block_k
        return packed(self.patterns, self.context, rows, parts, number, tile_rows, choice.apart, self.device)

    def forms(self, one: Pass) -> dict[str, object]:
        """How kernels over tiles of queries read a pass."""
        columns, bounds = (tuple(int(form) for form in forms) for forms in (one.columns, one.bounds))
        return {"SEGMENTS": len(columns), "ROWS": int(one.rows), "COLUMNS": columns, "BOUNDS": bounds}

    def descriptors(
        self, choice: Choice, rows: Side, parts: Parts, number: int, one: Tensor, other: Tensor
    ) -> tuple[list[Any], tuple[int, ...]]:
        """Of a pass, descriptors of two tensors for each segment a kernel has parameters for, and the tiles' shapes.

        Where there is no descriptor, the tensors themselves fill the parameter, which the kernel then does not read.
        """
        tiles = choice.configuration
        sizes = (tiles.block_q, tiles.block_k) if rows == "queries" else (tiles.block_k, tiles.block_q)
        found = boxes(self.patterns, self.context, rows, parts, number, *sizes, choice.apart)
        if not tiles.described or not describable(one, other):
            found = (ADDRESSES,) * len(found)
        arguments: list[Any] = []
        for box in (*found, ADDRESSES)[:SEGMENTS]:
            for tensor, width in ((one, self.widths["W"]), (other, self.widths["WV"])):
                plain = box.shape == Shape.ADDRESSES
                arguments.append(tensor if plain else described(tensor, box, sizes[1], width))
        return arguments, tuple(int(box.shape) for box in found)

    def num_slices(self, one: Pass, choice: Choice) -> int:
        """Into how many slices of queries to split a pass over keys."""
        programs = one.num_row_tiles * self.batch * self.heads
        return num_slices(programs, choice.longest, num_processors(self.device))

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
        """A kernel over all heads, with so many programs a head."""
        if programs * self.batch * self.heads == 0:
            return
        strides = [stride for tensor in strided for stride in tensor.stride()[:3]]
        if tiles is not None:
            constants |= {"BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k, "ROUND_BF16": self.round_bf16}
            constants |= {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        constants["ACCUMULATOR"] = tl.float64 if self.wide == torch.float64 else tl.float32
        with self._ready():
            kernel[(programs * self.batch * self.heads,)](
                *tensors, *strides, self.heads, self.context, *sizes, **constants
            )

    @contextlib.contextmanager
    def _ready(self) -> Any:
        """On the tensors' own card; in the interpreter, as silent about inf and nan as a card is."""
        if not INTERPRETED:
            with torch.cuda.device(self.device):
                yield
            return
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the interpreter's own, from numpy
            yield


def num_processors(device: torch.device) -> int:
    """Multiprocessors that programs are spread over."""
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def architecture(device: torch.device) -> str:
    """The name of a table of configurations: interpreter, sm_90, gfx942, …"""
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
