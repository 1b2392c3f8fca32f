"""Host side: choose tiles, pack layouts, launch the kernels pass by pass.

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

from kernels.autograd import accumulator_dtype
from kernels.backends.triton.choice import Choice, chosen, num_slices
from kernels.backends.triton.configurations import Configuration, Kernel, candidates
from kernels.backends.triton.delta_kernel import delta_kernel
from kernels.backends.triton.dkdv_kernel import dkdv_kernel, gather_kernel
from kernels.backends.triton.dq_kernel import dq_kernel
from kernels.backends.triton.forward_kernel import forward_kernel
from kernels.backends.triton.packing import Pass, groups, packed, sources
from kernels.memory import empty_like_rows
from kernels.patterns.base import Pattern
from kernels.plan import Side

INTERPRETED = not isinstance(forward_kernel, triton.runtime.JITFunction)  # settled when triton was imported
BLOCK_DELTA = 64  # rows a program of the delta kernel, and of the gather kernel


def forward(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, Dv) in v's dtype and logsumexp (B, H, N); ``patterns`` is one a head."""
    q, scale = _positive_scale(q, scale)
    call = _Call(q, v, patterns)
    q, k, v = (call.readable(t) for t in (q, k, v))
    out = empty_like_rows(v)
    lse = torch.empty(q.shape[:3], dtype=call.wide, device=q.device)
    choices = call.choices("forward")
    between = torch.empty(v.shape, dtype=call.wide, device=v.device) if len(choices) > 1 else out
    for number, (tiles, _) in enumerate(choices):
        final = number == len(choices) - 1
        one = call.packed("queries", number, tiles.block_q)
        target = out if final else between
        call.launch(
            forward_kernel,
            one.num_row_tiles,
            (q, k, v, between, target, lse, one.table, one.data),
            (q, k, v, target),
            (one.num_row_tiles,),
            tiles,
            **call.widths,
            **call.forms(one),
            SCALE=scale,
            RESUME=number > 0,
            FINAL=final,
        )
    return out.to(call.dtype), lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    patterns: tuple[Pattern, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their shapes and dtypes; the same bits on every run."""
    sign = float(np.sign(scale))
    q, scale = _positive_scale(q, scale)
    call = _Call(q, v, patterns)
    q, k, v, out, grad_out = (call.readable(t) for t in (q, k, v, out, grad_out))
    lse = lse.contiguous()
    inputs = (q, k, v, grad_out, lse, _delta(call, out, grad_out, lse, grad_lse))
    dk, dv = _dkdv(call, inputs, scale)
    dq = _dq(call, inputs, scale)
    dq = dq if sign == 1 else dq * sign
    return dq.to(call.dtype), dk.to(call.dtype), dv.to(call.dtype)


def _delta(call: _Call, out: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None) -> Tensor:
    """Of each query, the sum of out * grad_out less the gradient of lse: (B, H, N)."""
    delta = torch.empty_like(lse)
    blocks = triton.cdiv(call.context, BLOCK_DELTA)
    given = lse if grad_lse is None else grad_lse.contiguous()
    call.launch(
        delta_kernel,
        blocks,
        (out, grad_out, lse, given, delta),
        (out, grad_out),
        (blocks,),
        None,
        VALUE_WIDTH=call.widths["VALUE_WIDTH"],
        WV=call.widths["WV"],
        BLOCK=BLOCK_DELTA,
        GRAD_LSE=grad_lse is not None,
    )
    return delta


def _dkdv(call: _Call, inputs: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor]:
    """dK and dV: passes that leave their sums in a workspace, and one that adds them up."""
    q, k, v, grad_out, _, _ = inputs
    dk, dv = empty_like_rows(k), empty_like_rows(v)
    choices = call.choices("dkdv")
    passes = [call.packed("keys", number, tiles.block_k) for number, (tiles, _) in enumerate(choices)]
    slices = [call.num_slices(one, choice) for one, choice in zip(passes, choices, strict=True)]
    covers = all(head[0].num_rows == call.context for head in groups(call.patterns, call.context, "keys")[-1])
    in_place = covers and slices[-1] == 1  # the last pass can add up as it goes
    through = len(passes) - in_place
    source_table, source_data, form = sources(call.patterns, call.context, tuple(slices[:through]), q.device)
    rows = [one.num_rows * count for one, count in zip(passes[:through], slices, strict=False)]
    width = q.shape[-1] + v.shape[-1]
    workspace = torch.empty((*q.shape[:2], sum(rows), width), dtype=call.wide, device=q.device)
    num_sources = source_table.shape[1]
    for number, (one, (tiles, _)) in enumerate(zip(passes, choices, strict=True)):
        call.launch(
            dkdv_kernel,
            one.num_row_tiles * slices[number],
            (*inputs, workspace, dk, dv, one.table, one.data, source_table, source_data),
            (q, k, v, grad_out, dk, dv),
            (one.num_row_tiles, slices[number], one.num_rows, sum(rows[:number]), sum(rows), num_sources),
            tiles,
            **call.widths,
            ROWS=int(one.rows),
            COLUMNS=int(one.columns[0]),
            BOUNDS=int(one.bounds[0]),
            SCALE=scale,
            FINAL=number == through,
            SOURCES=num_sources > 0,
            SOURCE_FORM=int(form),
        )
    if not in_place:
        blocks = triton.cdiv(call.context, BLOCK_DELTA)
        tensors = (workspace, dk, dv, source_table, source_data)
        sizes = (blocks, sum(rows), num_sources)
        constants = {"BLOCK": BLOCK_DELTA, "SOURCE_FORM": int(form)}
        call.launch(gather_kernel, blocks, tensors, (dk, dv), sizes, None, **call.widths, **constants)
    return dk, dv


def _dq(call: _Call, inputs: tuple[Tensor, ...], scale: float) -> Tensor:
    """dQ: each pass adds to the sums of the one before, which are kept wide."""
    q, k, v, grad_out, _, _ = inputs
    dq = empty_like_rows(q)
    choices = call.choices("dq")
    between = torch.empty(q.shape, dtype=call.wide, device=q.device) if len(choices) > 1 else dq
    for number, (tiles, _) in enumerate(choices):
        one = call.packed("queries", number, tiles.block_q)
        target = dq if number == len(choices) - 1 else between
        call.launch(
            dq_kernel,
            one.num_row_tiles,
            (*inputs, between, target, one.table, one.data),
            (q, k, v, grad_out, target),
            (one.num_row_tiles,),
            tiles,
            **call.widths,
            **call.forms(one),
            SCALE=scale,
            RESUME=number > 0,
        )
    return dq


def interpreter_trouble() -> str | None:
    """Why this triton cannot interpret kernels with this numpy, or None."""
    if _version(triton.__version__) < (3, 7) and _version(np.__version__) >= (2, 4):
        return f"the interpreter of triton {triton.__version__} needs numpy below 2.4, not {np.__version__}"
    return None


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a positive scale, which the kernels need to take the maximum before scaling."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


class _Call:
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

    def readable(self, tensor: Tensor) -> Tensor:
        """The tensor with adjacent columns, in a dtype that the kernels can read."""
        tensor = tensor.float() if self.round_bf16 else tensor
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def choices(self, kernel: Kernel) -> tuple[Choice, ...]:
        """The configuration of each pass of a kernel on this device."""
        widest = max(self.widths["W"], self.widths["WV"])
        found = candidates(kernel, _architecture(self.device), self.dtype.itemsize, widest)
        return chosen(found, self.patterns, self.context, "keys" if kernel == "dkdv" else "queries")

    def packed(self, rows: Side, number: int, tile_rows: int) -> Pass:
        """A pass on this device."""
        return packed(self.patterns, self.context, rows, number, tile_rows, self.device)

    def forms(self, one: Pass) -> dict[str, object]:
        """How kernels over tiles of queries read a pass."""
        columns, bounds = (tuple(int(form) for form in forms) for forms in (one.columns, one.bounds))
        return {"SEGMENTS": one.segments, "ROWS": int(one.rows), "COLUMNS": columns, "BOUNDS": bounds}

    def num_slices(self, one: Pass, choice: Choice) -> int:
        """Into how many slices of queries to split a pass over keys."""
        programs = one.num_row_tiles * self.batch * self.heads
        return num_slices(programs, choice.longest, _num_processors(self.device))

    def launch(
        self,
        kernel: Any,
        programs: int,
        tensors: tuple[Tensor, ...],
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


def _num_processors(device: torch.device) -> int:
    """Multiprocessors that programs are spread over."""
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def _architecture(device: torch.device) -> str:
    """The name of a table of configurations: interpreter, sm_90, gfx942, …"""
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
