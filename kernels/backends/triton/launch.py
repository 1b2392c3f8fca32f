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
from kernels.backends.triton.backward_kernels import delta_kernel, dkdv_kernel, dq_kernel
from kernels.backends.triton.configurations import Configuration, Kernel, configuration
from kernels.backends.triton.forward_kernel import forward_kernel
from kernels.backends.triton.packing import Pass, passes
from kernels.patterns.base import Pattern

INTERPRETED = not isinstance(forward_kernel, triton.runtime.JITFunction)  # settled when triton was imported
BLOCK_DELTA = 64  # rows a program of the delta kernel


def forward(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, Dv) in v's dtype and logsumexp (B, H, N); ``patterns`` is one a head."""
    q, scale = _positive_scale(q, scale)
    call = _Call(q, v)
    q, k, v = (call.readable(t) for t in (q, k, v))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    lse = torch.empty(q.shape[:3], dtype=call.wide, device=q.device)
    tiles = call.configuration("forward")
    todo = passes(patterns, call.context, tiles.block_q, tiles.block_k, "queries", q.device)
    partial = torch.empty(out.shape, dtype=call.wide, device=v.device) if len(todo) > 1 else out
    for number, one in enumerate(todo):
        final = number == len(todo) - 1
        call.launch(
            forward_kernel,
            one,
            tiles,
            (q, k, v, partial, out if final else partial, lse),
            (q, k, v),
            SCALE=scale,
            QUERIES_ORDERED=one.rows_ordered,
            KEYS_ORDERED=one.columns_ordered,
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
    call = _Call(q, v)
    q, k, v, out, grad_out = (call.readable(t) for t in (q, k, v, out, grad_out))
    lse = lse.contiguous()
    delta = call.delta(out.contiguous(), grad_out, lse, None if grad_lse is None else grad_lse.contiguous())

    tiles = call.configuration("dkdv")
    todo = passes(patterns, call.context, tiles.block_q, tiles.block_k, "keys", q.device)
    sums = _Sums((k, v), call.wide, todo)
    for number, one in enumerate(todo):
        (previous_k, previous_v), (dk, dv) = sums.source(number), sums.target(number)
        call.launch(
            dkdv_kernel,
            one,
            tiles,
            (q, k, v, grad_out, lse, delta, previous_k, previous_v, dk, dv),
            (q, k, v, grad_out),
            SCALE=scale,
            QUERIES_ORDERED=one.columns_ordered,
            KEYS_ORDERED=one.rows_ordered,
            RESUME=number > 0,
        )
    dk, dv = sums.result()

    tiles = call.configuration("dq")
    todo = passes(patterns, call.context, tiles.block_q, tiles.block_k, "queries", q.device)
    sums = _Sums((q,), call.wide, todo)
    for number, one in enumerate(todo):
        (previous_q,), (dq,) = sums.source(number), sums.target(number)
        call.launch(
            dq_kernel,
            one,
            tiles,
            (q, k, v, grad_out, lse, delta, previous_q, dq),
            (q, k, v, grad_out),
            SCALE=scale,
            QUERIES_ORDERED=one.rows_ordered,
            KEYS_ORDERED=one.columns_ordered,
            RESUME=number > 0,
        )
    (dq,) = sums.result()
    dq = dq if sign == 1 else dq * sign
    return dq.to(call.dtype), dk.to(call.dtype), dv.to(call.dtype)


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


class _Sums:
    """Where the passes add up gradients: wide between passes, in the dtype from a last pass that covers all rows."""

    def __init__(self, like: tuple[Tensor, ...], wide: torch.dtype, todo: tuple[Pass, ...]) -> None:
        def new(covered: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
            fill = torch.empty if covered else torch.zeros
            return tuple(fill(t.shape, dtype=dtype, device=t.device) for t in like)

        self._last = len(todo) - 1
        dtype = like[0].dtype
        several = len(todo) > 1
        self._between = new(todo[0].covers, wide) if several else ()
        self._final = self._between if several and not todo[-1].covers else new(todo[-1].covers, dtype)

    def source(self, number: int) -> tuple[Tensor, ...]:
        """What a pass after the first adds to."""
        return self._between if number > 0 else self.target(number)

    def target(self, number: int) -> tuple[Tensor, ...]:
        """What a pass writes."""
        return self._final if number == self._last else self._between

    def result(self) -> tuple[Tensor, ...]:
        """The sums after the last pass."""
        return self._final


class _Call:
    """The sizes, dtypes and device of one call."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.batch, self.heads, self.context, self.width = q.shape
        self.value_width = v.shape[-1]
        self.dtype = q.dtype
        self.device = q.device
        self.wide = accumulator_dtype(q.dtype)
        # numpy has no bf16: the interpreter computes in fp32 and rounds where a card would have rounded.
        self.round_bf16 = INTERPRETED and q.dtype == torch.bfloat16
        self.padded = max(16, triton.next_power_of_2(self.width))
        self.padded_value = max(16, triton.next_power_of_2(self.value_width))

    def readable(self, tensor: Tensor) -> Tensor:
        """The tensor with adjacent columns, in a dtype that the kernels can read."""
        tensor = tensor.float() if self.round_bf16 else tensor
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def configuration(self, kernel: Kernel) -> Configuration:
        """The tiles of a kernel on this device."""
        widest = max(self.padded, self.padded_value)
        return configuration(kernel, _architecture(self.device), self.dtype.itemsize, widest)

    def delta(self, out: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None) -> Tensor:
        """Of each query, the sum of out * grad_out less the gradient of lse: (B, H, N)."""
        delta = torch.empty_like(lse)
        if delta.numel() == 0:
            return delta
        blocks = triton.cdiv(self.context, BLOCK_DELTA)
        grid = (blocks * self.batch * self.heads,)
        arguments = (out, grad_out, lse, lse if grad_lse is None else grad_lse, delta, *grad_out.stride()[:3])
        with self._ready():
            delta_kernel[grid](
                *arguments,
                self.heads,
                self.context,
                blocks,
                VALUE_WIDTH=self.value_width,
                WV=self.padded_value,
                BLOCK=BLOCK_DELTA,
                GRAD_LSE=grad_lse is not None,
                ACCUMULATOR=self._accumulator(),
            )
        return delta

    def launch(
        self,
        kernel: Any,
        one: Pass,
        tiles: Configuration,
        tensors: tuple[Tensor, ...],
        strided: tuple[Tensor, ...],
        **constants: object,
    ) -> None:
        """One pass of a kernel over all heads."""
        num_programs = one.num_row_tiles * self.batch * self.heads
        if num_programs == 0:
            return
        strides = [stride for tensor in strided for stride in tensor.stride()[:3]]
        with self._ready():
            kernel[(num_programs,)](
                *tensors,
                one.layout_of,
                one.table,
                one.data,
                *strides,
                self.heads,
                self.context,
                one.num_row_tiles,
                WIDTH=self.width,
                W=self.padded,
                VALUE_WIDTH=self.value_width,
                WV=self.padded_value,
                BLOCK_Q=tiles.block_q,
                BLOCK_K=tiles.block_k,
                ROUND_BF16=self.round_bf16,
                ACCUMULATOR=self._accumulator(),
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
                **constants,
            )

    def _accumulator(self) -> tl.dtype:
        return tl.float64 if self.wide == torch.float64 else tl.float32

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


def _architecture(device: torch.device) -> str:
    """The name of a table of configurations: interpreter, sm_90, gfx942, …"""
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
