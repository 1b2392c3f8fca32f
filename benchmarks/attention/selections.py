"""Attention over selections beside dense causal attention on a CPU: ``python benchmarks/attention/selections.py``.

A gate comes first: output and gradients of each selection against fp64. Then all take turns in every repeat. What
selects is timed with what attends: the products with centroids, their maximum, the sort. Time is that of the process on
one thread, which other programs disturb least, and the least of the repeats. The growth is the exponent of the time in
the context, where window and clusters are the root of it: 3/2 is that of the pairs. The table goes to the terminal, all
figures to JSON.

Letters: B batch, H heads, N positions, D head width.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

from benchmarks.attention.cases import CPU_HEADS, Group, stride_of
from benchmarks.attention.figures import PHASES, ByPhase, rounded_all
from benchmarks.attention.gate import Attention, results
from benchmarks.attention.timing import Inputs, inputs_of
from benchmarks.machine import about, slug
from benchmarks.report import add_output_arguments, cell, check_output, ratio, rounded, write_json
from longstride.kernels import selected_attention, sparse_attention
from longstride.kernels.patterns import Dense
from longstride.kernels.selections import Selection, recent_members

Select = Callable[[Tensor, Tensor], Selection]  # by q (B, H, N, D) and vectors (H, K, D) to compare it with
GATE_CONTEXT = 192
DENSE_LIMIT = 12_288
DENSE = ("torch", "dense pattern")  # torch's own function, and our cpu backend under a dense pattern


def selects(window: int) -> dict[str, Select]:
    """What is measured, by the name it has in tables."""

    def routing(q: Tensor, vectors: Tensor) -> Selection:
        return Selection((recent_members((normalize(q, dim=-1) @ vectors.mT).argmax(-1), window=window),), window)

    def rounds(q: Tensor, vectors: Tensor) -> Selection:
        """Two rounds of hashing, each with half of the vectors and their negatives."""
        halves = (q @ vectors.mT).chunk(2, -1)
        found = (recent_members(torch.cat([x, -x], -1).argmax(-1), window=window) for x in halves)
        return Selection(tuple(found), window, disjoint=False)

    return {"routing": routing, "two hash rounds": rounds}


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 1 where the gate fails."""
    options = read_options(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, error in gate(options.dtype, options.head_width).items():
        if error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    rows = [row for context in sorted(options.contexts) for row in measure(context, options)]
    growth = growth_of(rows)
    print_table(rows, growth)
    found = {**about(torch.device("cpu")), "clock": "CPU time of the process", "repeats": options.repeats}
    write_json(options.output, {**found, "timings": rows, "growth": growth})
    print(f"\nwrote {options.output}")
    return 0


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[3_072, 12_288, 49_152])
    parser.add_argument("--heads", type=int, default=CPU_HEADS)
    parser.add_argument("--head-width", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dense-limit", type=int, default=DENSE_LIMIT, help="positions beyond which dense is left out")
    add_output_arguments(parser)
    options = parser.parse_args(arguments)
    check_output(parser, options, f"selections-{slug(torch.device('cpu'))}.json")
    return options


def vectors_of(group: Group) -> Tensor:
    """Unit vectors (H, K, D) to compare queries with, an even number next to the root of the context."""
    count = 2 * round(math.sqrt(group.context) / 2)
    return normalize(torch.randn(group.heads, count, group.head_width), dim=-1).to(getattr(torch, group.dtype))


def selecting(select: Select, vectors: Tensor, backend: str) -> Attention:
    """Selecting and attending as one."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            selection = select(q, vectors)
        return selected_attention(q, k, v, selection, backend=backend)

    return attention


def gate(dtype: str, head_width: int) -> dict[str, str]:
    """For each selection what is wrong, or nothing within twice the error of the specification in this dtype."""
    group = Group(GATE_CONTEXT, 1, head_width, dtype, 2)
    vectors, one = vectors_of(group), inputs_of(group, torch.device("cpu"))[0]
    inputs = [*(x.detach() for x in one.leaves), one.grad_out]
    said = {}
    for name, select in selects(16).items():
        selection = select(inputs[0], vectors)

        def attending(backend: str, selection: Selection = selection) -> Attention:
            return functools.partial(selected_attention, selection=selection, backend=backend)

        wanted = results(attending("reference"), [x.double() for x in inputs])
        found, dense = results(attending("cpu"), inputs), results(attending("reference"), inputs)
        errors = [
            [float((x.double() - c).square().mean().sqrt()) for x in (a, b)]
            for a, b, c in zip(found, dense, wanted, strict=True)
        ]
        wrong = [pair for pair in errors if not pair[0] <= 2 * pair[1] + 4 * torch.finfo(torch.float32).eps]
        said[name] = f"off by {wrong[0][0]:.3g}; the specification is off by {wrong[0][1]:.3g}" if wrong else ""
    return said


def measure(context: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a selection at one context."""
    group = Group(context, stride_of(context), options.head_width, options.dtype, options.heads)
    inputs, vectors = inputs_of(group, torch.device("cpu"))[0], vectors_of(group)
    several = selects(group.stride)
    contenders = {name: selecting(select, vectors, "cpu") for name, select in several.items()}
    if context <= options.dense_limit:
        contenders["torch"] = functools.partial(scaled_dot_product_attention, is_causal=True)
        contenders["dense pattern"] = functools.partial(sparse_attention, pattern=Dense(), backend="cpu")
    runs: dict[str, list[ByPhase]] = {name: [] for name in contenders}
    planning: dict[str, list[float]] = {name: [] for name in several}
    for repeat in range(options.repeats + 1):
        for name, attention in contenders.items():
            seconds = turn(attention, inputs)
            if repeat:  # the first one warms up
                runs[name].append(seconds)
        for name, select in several.items():
            with torch.no_grad():
                planning[name].append(clocked(functools.partial(select, inputs.leaves[0], vectors)))
    best: dict[str, ByPhase] = dict.fromkeys(DENSE, dict.fromkeys(PHASES))
    best |= {name: {phase: min(run[phase] for run in found) for phase in PHASES} for name, found in runs.items()}
    rows = []
    for name, select in several.items():
        parts = select(inputs.leaves[0].detach(), vectors).parts
        rows.append(
            {
                "selection": name,
                **{key: value for key, value in group.sizes().items() if key not in ("stride", "summary")},
                "window": group.stride,
                "vectors": vectors.shape[1],
                "pairs": sum(int((part.high - part.low).sum()) for part in parts) // group.heads,
                "seconds": rounded_all(best[name]),
                "selecting_seconds": rounded(min(planning[name])),
                "dense_seconds": {dense: rounded_all(best[dense]) for dense in DENSE},
                "ratio_to_dense": {
                    dense: rounded_all({phase: ratio(best[dense][phase], best[name][phase]) for phase in PHASES})
                    for dense in DENSE
                },
            }
        )
    return rows


def turn(attention: Attention, inputs: Inputs) -> ByPhase:
    """Seconds of one forward and one backward pass."""
    found: list[Tensor] = []
    forward = clocked(lambda: found.append(attention(*inputs.leaves)))
    backward = clocked(lambda: torch.autograd.grad(found[0], inputs.leaves, inputs.grad_out))
    return {"forward": forward, "backward": backward, "both": forward + backward}


def clocked(call: Callable[[], object]) -> float:
    """Seconds of the process in a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def growth_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The exponent of each selection's time, of both passes, from the least context to the largest; None of one."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["selection"] for row in rows):
        own = [row for row in rows if row["selection"] == name]
        wider = math.log(own[-1]["context"] / own[0]["context"])
        longer = math.log(own[-1]["seconds"]["both"] / own[0]["seconds"]["both"])
        found[name] = rounded(longer / wider) if wider else None
    return found


def print_table(rows: list[dict[str, Any]], growth: dict[str, Any]) -> None:
    """Milliseconds, and how many times faster than either dense attention."""
    print(
        f"{'selection':<16}{'context':>9}{'window':>8}{'pairs':>12}  {'ms: selecting, forward, backward, both':<42}",
        end="",
    )
    print("".join(f"{f'times {name}':>22}" for name in DENSE))
    for row in rows:
        times = [row["selecting_seconds"], *(row["seconds"][phase] for phase in PHASES)]
        ratios = [" / ".join(cell(row["ratio_to_dense"][name][phase], ".1f") for phase in PHASES) for name in DENSE]
        shown = " / ".join(cell(x, ".1f", 1e3) for x in times)
        print(
            f"{row['selection']:<16}{row['context']:>9,}{row['window']:>8}{row['pairs']:>12,}  {shown:<42}"
            + "".join(f"{x:>22}" for x in ratios)
        )
    for name, exponent in growth.items():
        print(f"{name}: time grows by the {cell(exponent)}th power of the context")


if __name__ == "__main__":
    sys.exit(main())
