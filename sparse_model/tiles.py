"""Elementwise CPU work, a tile at a time, so that intermediate results stay in the cache.

They are written to the same few tiles over and over: allocating new memory costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TILE = 1 << 18  # numbers: in fp32 about a core's L2 cache, and enough that the calls take little of the time
EPS = 1e-6  # default of what is added to a mean square


def wide_of(x: Tensor) -> torch.dtype:
    """Return the dtype of sums and intermediate results: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def tiles(x: Tensor, axis: int, scratch: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield slices along an axis that make one tile each, with scratch memory of its shape.

    There is a single tile if x is not on a CPU, or if a compiler fuses operations.

    Args:
        x: the tensor to traverse.
        axis: along which.
        scratch: how many tiles of memory to yield, uninitialised, in ``wide_of(x)``.
    """
    shape = list(x.shape)
    single = x.device.type != "cpu" or torch.compiler.is_compiling()  # sizes may be symbols, which range() rejects
    count = shape[axis] if single else max(1, TILE * max(1, shape[axis]) // max(1, x.numel()))
    if not single:
        shape[axis] = min(count, shape[axis])
    memory = [torch.empty(shape, dtype=wide_of(x), device=x.device) for _ in range(scratch)]
    if single:
        yield slice(0, count), memory
        return
    for start in range(0, x.shape[axis], count):
        place = slice(start, min(start + count, x.shape[axis]))
        yield place, [tile.narrow(axis, 0, place.stop - place.start) for tile in memory]


def inverse_rms(x: Tensor, out: Tensor | None = None, eps: float = EPS) -> Tensor:
    """Compute 1 / √(mean x² + ε) over the last axis: (…, C) to (…, 1) in fp32 (fp64 for fp64)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide_of(x))
    return torch.addcmul(length.new_full((), eps), length, length, value=1 / x.shape[-1], out=out).rsqrt_()
