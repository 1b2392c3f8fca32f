"""Elementwise work on a CPU, a tile at a time, so that what one operation writes is still in the cache for the next.

What lies between is written to the same few tiles over and over: memory that is asked for anew costs more than the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TILE = 1 << 18  # numbers: in fp32 about a core's second cache, and enough that calling an operation takes little of it
EPS = 1e-6  # added to a mean square, where a configuration says nothing else


def wide_of(x: Tensor) -> torch.dtype:
    """The precision of sums and of what lies between operations: fp32, for fp64 itself."""
    return torch.promote_types(x.dtype, torch.float32)


def tiles(x: Tensor, axis: int, scratch: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Places along an axis that make a tile, one tile after another, each with memory of its shape to work in.

    All places at once where x is not on a CPU, and where a compiler fuses operations.

    Args:
        x: what is gone through.
        axis: along which.
        scratch: how many tiles of memory, in ``wide_of(x)``. It holds anything.
    """
    shape = list(x.shape)
    whole = x.device.type != "cpu" or torch.compiler.is_compiling()  # whose sizes may be symbols, which no range takes
    count = shape[axis] if whole else max(1, TILE * max(1, shape[axis]) // max(1, x.numel()))
    if not whole:
        shape[axis] = min(count, shape[axis])
    memory = [torch.empty(shape, dtype=wide_of(x), device=x.device) for _ in range(scratch)]
    if whole:
        yield slice(0, count), memory
        return
    for start in range(0, x.shape[axis], count):
        place = slice(start, min(start + count, x.shape[axis]))
        yield place, [each.narrow(axis, 0, place.stop - place.start) for each in memory]


def inverse_rms(x: Tensor, out: Tensor | None = None, eps: float = EPS) -> Tensor:
    """1 / √(mean x² + ε) over the last axis: (…, C) to (…, 1) in fp32 (fp64 for fp64)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide_of(x))
    return torch.addcmul(length.new_full((), eps), length, length, value=1 / x.shape[-1], out=out).rsqrt_()
