"""Compare attention over selections with dense causal attention: ``python -m benchmarks.attention.selections``.

A gate comes first: output and gradients of each selection against fp64. Then all take turns in every repeat. Times
include selecting: the products with centroids, their maximum, and the sort. On a CPU, time is the least CPU time of the
process on one thread, which other programs disturb least. On a card, it is the median between events on the device
(``timing``). The growth is the exponent of the time in the context, with window and clusters the root of the context;
the pairs have 3/2. A table is printed, and all figures go to JSON.

Letters: B batch, H heads, N positions, D head width.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

from benchmarks.attention.cases import DTYPES, Group, heads_of, stride_of
from benchmarks.attention.figures import PHASES, ByPhase, rounded_all
from benchmarks.attention.gate import Attention, results, unexplained
from benchmarks.attention.measure import GROUP_SECONDS
from benchmarks.attention.tables import selections_table
from benchmarks.attention.timing import Contender, HostClock, inputs_of, take_turns
from benchmarks.machine import about
from benchmarks.report import exponent, new_parser, parse, ratio, rounded, write_result
from longstride.kernels import selected_attention, sparse_attention
from longstride.kernels.patterns import Dense
from longstride.kernels.selections import Selection, recent_members

Select = Callable[[Tensor, Tensor], Selection]  # from q (B, H, N, D) and vectors (H, K, D)
GATE_CONTEXT = 192
DENSE_LIMIT = 12_288
DENSE = ("torch", "dense pattern")  # torch's function, and our backend with a dense pattern


def selects(window: int) -> dict[str, Select]:
    """Return the ways to select by their names in tables."""

    def routing(q: Tensor, vectors: Tensor) -> Selection:
        return Selection((recent_members((normalize(q, dim=-1) @ vectors.mT).argmax(-1), window=window),), window)

    def rounds(q: Tensor, vectors: Tensor) -> Selection:
        """Select by two rounds of hashing, each with half of the vectors and their negatives."""
        halves = (q @ vectors.mT).chunk(2, -1)
        parts = (recent_members(torch.cat([x, -x], -1).argmax(-1), window=window) for x in halves)
        return Selection(tuple(parts), window, disjoint=False)

    return {"routing": routing, "two hash rounds": rounds}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if the gate fails."""
    options = read_options(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(options.device)
    for name, error in gate(options.dtype, options.head_width, device).items():
        if error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    rows = [row for context in sorted(options.contexts) for row in measure(context, options)]
    clock = "CPU time of the process" if device.type == "cpu" else "between events on the device"
    facts = {**about(device), "clock": clock, "repeats": options.repeats}
    result = {**facts, "timings": rows, "growth": growth_of(rows)}
    print(selections_table(result))
    write_result(options, result)
    return 0


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[3_072, 12_288, 49_152])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--heads", type=int, default=None, help="4 on the CPU, else as many as fill the card")
    parser.add_argument("--head-width", type=int, default=64)
    parser.add_argument("--dtype", default=None, help="float32 on the CPU, else bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dense-limit", type=int, default=DENSE_LIMIT, help="positions beyond which dense is left out")
    options = parse(parser, arguments, "selections")
    options.dtype = options.dtype or DTYPES[torch.device(options.device).type][0]
    return options


def vectors_of(group: Group) -> Tensor:
    """Return unit vectors (H, K, D) to compare queries with; K is even, near the root of the context."""
    count = 2 * round(math.sqrt(group.context) / 2)
    return normalize(torch.randn(group.heads, count, group.head_width), dim=-1).to(getattr(torch, group.dtype))


def selecting(select: Select, vectors: Tensor) -> Attention:
    """Return attention that includes selecting."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            selection = select(q, vectors)
        return selected_attention(q, k, v, selection)

    return attention


def gate(dtype: str, head_width: int, device: torch.device) -> dict[str, str]:
    """Return what is wrong with each selection; empty if rounding explains how far all results are from fp64."""
    group = Group(GATE_CONTEXT, 1, head_width, dtype, 2)
    vectors, (leaves, grad_out) = vectors_of(group).to(device), inputs_of(group, device)[0]
    inputs = [*(x.detach() for x in leaves), grad_out]
    problems = {}
    for name, select in selects(16).items():
        selection = select(inputs[0], vectors)
        outputs = results(functools.partial(selected_attention, selection=selection), inputs)
        problems[name] = unexplained(outputs, inputs, selection) or ""
    return problems


def measure(context: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a row per selection at one context."""
    device = torch.device(options.device)
    heads = options.heads or heads_of(context, device.type)
    group = Group(context, stride_of(context), options.head_width, options.dtype, heads)
    sets, vectors = inputs_of(group, device), vectors_of(group).to(device)
    ways = selects(group.stride)
    contenders = {name: Contender(selecting(select, vectors)) for name, select in ways.items()}
    if context <= options.dense_limit:
        contenders["torch"] = Contender(functools.partial(scaled_dot_product_attention, is_causal=True))
        contenders["dense pattern"] = Contender(functools.partial(sparse_attention, pattern=Dense()))
    for name, select in ways.items():
        contenders[f"plan {name}"] = Contender(functools.partial(select_only, select, vectors), backward=False)
    clock = HostClock(time.process_time) if device.type == "cpu" else None
    turns = take_turns(contenders, sets, device, options.repeats, GROUP_SECONDS, clock)
    best: dict[str, ByPhase] = dict.fromkeys(DENSE, dict.fromkeys(PHASES))
    best |= {name: contender_turns.seconds() for name, contender_turns in turns.items()}
    rows = []
    for name, select in ways.items():
        parts = select(sets[0].leaves[0].detach(), vectors).parts
        rows.append(
            {
                "selection": name,
                **{key: value for key, value in group.sizes().items() if key not in ("stride", "summary")},
                "window": group.stride,
                "vectors": vectors.shape[1],
                "pairs": sum(int((part.high - part.low).sum()) for part in parts) // group.heads,
                "seconds": rounded_all(best[name]),
                "selecting_seconds": rounded(best[f"plan {name}"]["forward"]),
                "dense_seconds": {dense: rounded_all(best[dense]) for dense in DENSE},
                "ratio_to_dense": {
                    dense: rounded_all({phase: ratio(best[dense][phase], best[name][phase]) for phase in PHASES})
                    for dense in DENSE
                },
            }
        )
    return rows


def select_only(select: Select, vectors: Tensor, q: Tensor, *_: Tensor) -> Tensor:
    """Select without attending; the returned tensor depends on all parts."""
    with torch.no_grad():
        return select(q, vectors).parts[-1].high


def growth_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the exponent of each selection's time from the least to the largest context; None for one context."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        points.setdefault(row["selection"], []).append((row["context"], row["seconds"]["both"]))
    return {name: exponent(of_name[0], of_name[-1]) for name, of_name in points.items()}


if __name__ == "__main__":
    sys.exit(main())
