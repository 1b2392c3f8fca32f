"""Measure the host's time of calls of the Triton backend, without their launches.

Run ``python -m benchmarks.attention.host_time``. No card is needed, and nothing is compiled or launched
(``tests.harness.dry_card``). What remains is the work of Python and torch on CPU tensors. Time is the CPU time of the
thread, which other programs disturb least, per call in the fastest of many groups. "again" is a call with a launch
plan, as all but the first of a shape. "planned" is a call that makes its plan, as the first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.machine import about
from benchmarks.report import markdown, new_parser, parse, rounded, write_result
from longstride.kernels import CachedAttention, sparse_attention
from longstride.kernels.patterns import Block, Fixed, Local, Pattern, Strided

CALLS = 50  # per group
BARS = {"forward": 60e-6, "backward": 150e-6}  # seconds of a call with a plan


PATTERNS: dict[str, Pattern] = {
    "local": Local(128),
    "block": Block(128),
    "strided": Strided(128),
    "fixed": Fixed(128, 8),
}
SHAPE = (1, 8, 12_288, 64)  # B, H, N, D


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if a bar is missed."""
    parser = new_parser(__doc__)
    parser.add_argument("--architecture", default="sm_90", help="of the card that is not there")
    parser.add_argument("--repeats", type=int, default=40, help=f"groups of {CALLS} calls")
    options = parse(parser, arguments, "host-time")
    torch.set_num_threads(1)
    from longstride.kernels.backends import triton as backend
    from tests.harness.dry_card import DryCard

    card = DryCard(options.architecture, compiles=False).install()
    rows = []
    for name, pattern in PATTERNS.items():
        row: dict[str, Any] = {"pattern": name}
        calls = {"forward": forward_of(pattern), "backward": backward_of(pattern)}
        for phase, call in calls.items():
            row[f"{phase}_again_seconds"] = seconds_of(call, options.repeats, card.launched)
            with mock.patch.object(backend.PLANS, "get", lambda key: None):
                row[f"{phase}_planned_seconds"] = seconds_of(call, options.repeats, card.launched, calls=1)
        row["decode_seconds"] = seconds_of(decode_of(pattern), options.repeats, card.launched)
        rows.append(row)
    print_table(rows)
    facts = {**about(torch.device("cpu")), "clock": "CPU time of the thread", "bars_seconds": BARS}
    facts |= {"shape": SHAPE, "dtype": "bfloat16"}
    write_result(options, {**facts, "timings": rows})
    return int(any(row[f"{phase}_again_seconds"] > bar for row in rows for phase, bar in BARS.items()))


def leaves() -> list[Tensor]:
    """Return q, k and v."""
    return [torch.empty(SHAPE, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def forward_of(pattern: Pattern) -> Callable[[], object]:
    """Return a forward pass that builds a graph for the backward pass."""
    q, k, v = leaves()
    return lambda: sparse_attention(q, k, v, pattern, backend="triton")


def backward_of(pattern: Pattern) -> Callable[[], object]:
    """Return a backward pass, including autograd's work."""
    inputs = q, k, v = leaves()
    out = sparse_attention(q, k, v, pattern, backend="triton")
    grad_out = torch.empty_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True)


def decode_of(pattern: Pattern) -> Callable[[], object]:
    """Return attention of one query to a cache, with its position on the device."""
    k, v = (leaf.detach() for leaf in leaves()[:2])
    attend, q, position = CachedAttention(k, v, pattern, backend="triton"), k[:, :, 0].clone(), torch.tensor(1000)
    return lambda: attend(q, position)


def seconds_of(call: Callable[[], object], repeats: int, launched: list[Any], calls: int = CALLS) -> float:
    """Return the CPU time of a call in the fastest of ``repeats`` groups of ``calls``."""
    groups = []
    for _ in range(repeats + 1):
        start = time.thread_time()
        for _ in range(calls):
            call()
        groups.append((time.thread_time() - start) / calls)
        launched.clear()
    return float(rounded(min(groups[1:])) or 0.0)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print microseconds."""
    titles = ["pattern", "forward", "planned", "backward", "planned", "one query"]
    lines = [[row["pattern"], *(f"{1e6 * x:.0f}" for x in list(row.values())[1:])] for row in rows]
    print(markdown(titles, lines), end="")


if __name__ == "__main__":
    sys.exit(main())
