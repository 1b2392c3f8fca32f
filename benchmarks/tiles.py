"""What benchmarks ask of plans: the pairs a pattern allows, those its tiles visit, and what a plan costs.

The only file here that knows how plans are made.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.cases import patterns_of, stride_of
from benchmarks.figures import rounded
from kernels.backends.triton.packing import passes
from kernels.chunks import chunked
from kernels.patterns import Pattern
from kernels.plan import Side, ordered, plan

PLAN_TILES = (128, 64)


def allowed_pairs(pattern: Pattern, context: int) -> int:
    """Pairs of a query and a key that the pattern allows, for one head."""
    found = (ordered(part, context).by_query for part in pattern.for_head(0).parts())
    return sum(int((intervals.high - intervals.low).sum()) for intervals in found)


def visited_pairs(
    pattern: Pattern, context: int, phase: str, *, device: torch.device, dtype: torch.dtype, head_width: int
) -> int | None:
    """Pairs in the tiles that the Triton kernels of a phase visit, for one head; None where those cannot run.

    The backward pass visits tiles twice: four products for dK and dV, three for dQ. Its count is their mean.
    """
    try:
        from kernels.backends.triton.configurations import Kernel, configuration
        from kernels.backends.triton.launch import INTERPRETED, _architecture
    except ImportError:
        return None
    if device.type == "cpu" and not INTERPRETED:
        return None
    padded = max(16, 1 << (head_width - 1).bit_length())

    def of(kernel: Kernel, rows: Side) -> int:
        chosen = configuration(kernel, _architecture(device), dtype.itemsize, padded)
        edges = (chosen.block_q, chosen.block_k)
        parts = pattern.for_head(0).parts()
        return sum(plan(part, context, *edges, rows).tiles.num_visited() for part in parts) * edges[0] * edges[1]

    if phase == "forward":
        return of("forward", "queries")
    return round((4 * of("dkdv", "keys") + 3 * of("dq", "queries")) / 7)


def measure_plans(context: int, stride: int | None, summary: int) -> list[dict[str, Any]]:
    """A row a pattern: seconds and bytes of its plans as kernels read them, and seconds of the CPU's chunks."""
    stride, rows = stride or stride_of(context), []
    for name, pattern in patterns_of(stride, summary).items():
        for cached in (ordered, plan, passes):
            cached.cache_clear()
        start = time.perf_counter()
        both = [passes((pattern,), context, *PLAN_TILES, side, torch.device("cpu")) for side in ("queries", "keys")]
        middle = time.perf_counter()
        ordered.cache_clear()
        chunked.cache_clear()
        for part in pattern.parts():
            chunked(part, context)
        rows.append(
            {
                "pattern": name,
                "context": context,
                "stride": stride,
                "tiles": list(PLAN_TILES),
                "plan_seconds": rounded(middle - start),
                "plan_bytes": sum(one.num_bytes() for side in both for one in side),
                "cpu_chunks_seconds": rounded(time.perf_counter() - middle),
            }
        )
    return rows
