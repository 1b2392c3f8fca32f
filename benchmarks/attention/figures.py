"""Figures derived from seconds: operations, bytes, ratios, and the ideal. Pure arithmetic.

Letters: B batch, H heads, N positions, D head width. A pair is a query and a key; counts of pairs are for one head.
"""

from __future__ import annotations

from typing import Any

from benchmarks.attention.cases import Group
from benchmarks.report import ratio, rounded

PHASES = ("forward", "backward", "both")
ByPhase = dict[str, Any]  # a value, or None, for each of PHASES (or for the first two)
OPERATIONS = {"forward": 4, "backward": 10}  # times D per pair: two and five products, each a multiply and an add
# Rows of D numbers read and written once: q, k, v, out; and q, k, v, out, grad_out, dq, dk, dv.
ROWS = {"forward": 4, "backward": 8}
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
LSE_BYTES = 4


def operations(group: Group, pairs: int, phase: str) -> int:
    """Return the operations of a phase on ``pairs`` pairs per head."""
    return OPERATIONS[phase] * group.head_width * pairs * group.batch * group.heads


def compulsory_bytes(group: Group, phase: str) -> int:
    """Return the fewest bytes that a phase moves: every tensor once, for any pattern."""
    row = ROWS[phase] * group.head_width * ITEM_BYTES[group.dtype] + LSE_BYTES
    return group.batch * group.heads * group.context * row


def ideal(dense_seconds: float | None, density: float, num_bytes: int, bandwidth: float) -> tuple[Any, Any]:
    """Return the ideal seconds, and what bounds them: "operations" or "bytes"; None if dense attention has no time.

    The ideal is the longer of the pattern's share of pairs at the speed of dense attention, and the compulsory bytes at
    the speed of a copy.
    """
    if dense_seconds is None:
        return None, None
    by_operations, by_bytes = dense_seconds * density, num_bytes / bandwidth
    return max(by_operations, by_bytes), "bytes" if by_bytes > by_operations else "operations"


def rounded_all(values: ByPhase) -> ByPhase:
    """Round each value to a few significant digits."""
    return {name: rounded(x) for name, x in values.items()}


def fastest(kernels: dict[str, ByPhase]) -> tuple[ByPhase, ByPhase]:
    """Return the least seconds of each phase among kernels, and the kernel's name; None if no kernel has them."""
    seconds: ByPhase = dict.fromkeys(PHASES)
    names: ByPhase = dict.fromkeys(PHASES)
    for phase in PHASES:
        times = {name: by_phase[phase] for name, by_phase in kernels.items() if by_phase.get(phase) is not None}
        if times:
            names[phase] = min(times, key=lambda name: times[name])
            seconds[phase] = times[names[phase]]
    return seconds, names


def ideals(group: Group, dense: ByPhase, density: float, bandwidth: float) -> tuple[ByPhase, ByPhase]:
    """Return ideal seconds and what bounds them, by phase; both phases together take the sum."""
    seconds, bound = {}, {}
    for phase in OPERATIONS:
        num_bytes = compulsory_bytes(group, phase)
        seconds[phase], bound[phase] = ideal(dense[phase], density, num_bytes, bandwidth)
    if None in seconds.values():
        return {**seconds, "both": None}, {**bound, "both": None}
    same = bound["forward"] == bound["backward"]
    return (
        {**seconds, "both": seconds["forward"] + seconds["backward"]},
        {**bound, "both": bound["forward"] if same else "mixed"},
    )


def derived(
    group: Group, seconds: ByPhase, dense: ByPhase, flex: ByPhase, allowed: int, visited: ByPhase, bandwidth: float
) -> dict[str, Any]:
    """Return the fields of a result file's row that follow from seconds and counts."""
    density = allowed / (group.context * (group.context + 1) // 2)
    ideal_seconds, bound = ideals(group, dense, density, bandwidth)

    def tera(pairs: int | None, phase: str) -> float | None:
        if pairs is None or seconds[phase] is None:
            return None
        return operations(group, pairs, phase) / seconds[phase] / 1e12

    def giga(phase: str) -> float | None:
        return None if seconds[phase] is None else compulsory_bytes(group, phase) / seconds[phase] / 1e9

    return {
        "density": rounded(density),
        "allowed_pairs": allowed,
        "visited_pairs": visited,
        "ratio_to_dense": rounded_all({phase: ratio(dense[phase], seconds[phase]) for phase in PHASES}),
        "ratio_to_flex": rounded_all({phase: ratio(flex[phase], seconds[phase]) for phase in PHASES}),
        "tflops_on_visited": rounded_all({phase: tera(visited[phase], phase) for phase in OPERATIONS}),
        "tflops_on_allowed": rounded_all({phase: tera(allowed, phase) for phase in OPERATIONS}),
        "gigabytes_per_second": rounded_all({phase: giga(phase) for phase in OPERATIONS}),
        "ideal_seconds": rounded_all(ideal_seconds),
        "bound": bound,
        "fraction_of_ideal": rounded_all({phase: ratio(ideal_seconds[phase], seconds[phase]) for phase in PHASES}),
    }
