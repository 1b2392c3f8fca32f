"""What benchmarks ask of plans: the pairs a pattern allows, those its tiles visit, and what a plan costs.

The only file here that knows how plans are made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.attention.cases import patterns_of, stride_of
from benchmarks.report import rounded
from longstride.kernels.backends.cpu.chunks import chunked
from longstride.kernels.backends.triton.packing import Parts, groups, pack
from longstride.kernels.patterns import Pattern
from longstride.kernels.plan import Side, view

SIDES: tuple[Side, Side] = ("queries", "keys")
TILE_ROWS = 128


def one_a_head(pattern: Pattern | Sequence[Pattern]) -> tuple[Pattern, ...]:
    """The patterns of heads that are given one each, or that of the first head, for all."""
    return (pattern.for_head(0),) if isinstance(pattern, Pattern) else tuple(pattern)


def allowed_pairs(pattern: Pattern | Sequence[Pattern], context: int) -> int:
    """Pairs of a query and a key that the pattern allows, for one head; the mean of heads that differ."""
    heads = one_a_head(pattern)
    found = (view(part, context, "queries").intervals for head in heads for part in head.parts())
    return sum(int((intervals.high - intervals.low).sum()) for intervals in found) // len(heads)


def visited_pairs(
    pattern: Pattern | Sequence[Pattern],
    context: int,
    phase: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_width: int,
) -> int | None:
    """Pairs in the tiles that the Triton kernels of a phase visit, for one head; None where those cannot run.

    The backward pass visits tiles twice, four products for dK and dV and three for dQ, and counts their mean; closed
    runs, whose kernel visits each once, count once.
    """
    try:
        from longstride.kernels.backends.triton.configurations import Kernel, choose, closed_choice
        from longstride.kernels.backends.triton.launch_plan import INTERPRETED, candidates_on
    except ImportError:
        return None
    if device.type == "cpu" and not INTERPRETED:
        return None
    padded = max(16, 1 << (head_width - 1).bit_length())
    heads = one_a_head(pattern)

    def of(kernel: Kernel, rows: Side, parts: Parts) -> int:
        found = candidates_on(device, kernel, dtype.itemsize, padded)
        of_runs = candidates_on(device, "closed_forward", dtype.itemsize, padded) if kernel == "forward" else ()
        return sum(choice.pairs for choice in choose(found, heads, context, rows, parts, of_runs)) // len(heads)

    if phase == "forward":
        return of("forward", "queries", "all")
    closed = closed_choice(candidates_on(device, "closed", dtype.itemsize, padded), heads, context)
    parts: Parts = "all" if closed is None else "open"
    once = 0 if closed is None else closed.pairs // len(heads)
    return once + round((4 * of("dkdv", "keys", parts) + 3 * of("dq", "queries", parts)) / 7)


def measure_plans(context: int, stride: int | None, summary: int) -> list[dict[str, Any]]:
    """A row a pattern: seconds and bytes of its plans as kernels read them, and seconds of the CPU's chunks."""
    stride, rows = stride or stride_of(context), []
    for name, pattern in patterns_of(stride, summary).items():
        for cached in (view, groups, chunked):
            cached.cache_clear()
        start = time.perf_counter()
        found = [
            pack((pattern,), context, side, "all", number, TILE_ROWS, True, torch.device("cpu"))
            for side in SIDES
            for number in range(len(groups((pattern,), context, side, "all")))
        ]
        middle = time.perf_counter()
        view.cache_clear()
        for part in pattern.parts():
            chunked(part, context)
        rows.append(
            {
                "pattern": name,
                "context": context,
                "stride": stride,
                "tile_rows": TILE_ROWS,
                "plan_seconds": rounded(middle - start),
                "plan_bytes": sum(one.num_bytes() for one in found),
                "cpu_chunks_seconds": rounded(time.perf_counter() - middle),
            }
        )
    return rows
