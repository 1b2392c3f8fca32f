"""Profile attention on a CPU, and compare sizes of chunks and slabs.

Run ``python benchmarks/attention/cpu_time.py``. The first part profiles each pattern on one thread, forward and
backward, and sorts the time of torch's operators into kinds. The second part times every pattern with each size of
``SIZES`` on all threads; all of them take turns in every repeat. Results go to the terminal and to a JSON file.

Letters: B batch, H heads, N positions, D head width.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.attention.cases import CPU_HEADS, Group
from benchmarks.attention.gate import ours
from benchmarks.attention.timing import Contender, Inputs, inputs_of, take_turns
from benchmarks.machine import about, slug
from benchmarks.report import add_output_arguments, check_output, rounded, write_json
from longstride.kernels.backends.cpu import attention, chunks, slabs
from longstride.kernels.backends.cpu.attention import visited_pairs
from longstride.kernels.cache import cached
from longstride.kernels.patterns import Dense, Pattern
from longstride.kernels.plan import num_pairs

NAMES = ("local", "column", "block", "summary", "strided merged", "fixed merged")
KINDS = {  # kinds of torch's operators
    "products": ("bmm", "baddbmm_", "baddbmm"),
    "softmax": ("exp2_", "exp_", "sub_", "amax", "sum", "mul_", "mul", "log2", "log", "lerp_", "sigmoid", "logaddexp"),
    "copies": ("copy_", "add_", "div", "fill_", "zero_", "index_select", "index_add_", "index_copy_", "clone", "cat"),
}
OTHER = "calls and new memory"  # Python, torch's dispatch, and page faults of new memory
SIZES = {
    "as shipped": (slabs.SCORES_IN_WORK, chunks.KEY_COST),
    "slabs of 2^17": (1 << 17, chunks.KEY_COST),
    "slabs of 2^18": (1 << 18, chunks.KEY_COST),
    "slabs of 2^20": (1 << 20, chunks.KEY_COST),
    "shorter chunks": (slabs.SCORES_IN_WORK, chunks.KEY_COST // 2),
    "longer chunks": (slabs.SCORES_IN_WORK, chunks.KEY_COST * 4),
}
PROFILED_CALLS = 5


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=12_288)
    parser.add_argument("--stride", type=int, default=128)
    parser.add_argument("--head-width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    add_output_arguments(parser)
    options = parser.parse_args(arguments)
    device = torch.device("cpu")
    check_output(parser, options, f"cpu-time-{slug(device)}.json")
    group = Group(options.context, options.stride, options.head_width, "float32", CPU_HEADS, names=NAMES)
    (inputs,) = inputs_of(group, device)
    patterns: dict[str, Pattern] = {name: p for name, p in group.patterns().items() if isinstance(p, Pattern)}
    result = {
        **about(device),
        **group.sizes(),
        "shares": [{"pattern": name, **shares(pattern, inputs)} for name, pattern in patterns.items()],
        "sizes": sizes(patterns, inputs, options.repeats),
    }
    write_json(options.output, result)
    for row in result["shares"]:
        parts = ", ".join(f"{kind} {share:.0%}" for kind, share in row["shares"].items())
        print(f"{row['pattern']}: computes {row['computed']:.2f} pairs for each allowed one; {parts}")
    for row in result["sizes"]:
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["seconds_over_shipped"].items())
        print(f"{row['sizes']}: {ratios}")
    return 0


def shares(pattern: Pattern, inputs: Inputs) -> dict[str, Any]:
    """Return the limit of the speed-up, computed pairs per allowed pair, and time shares by kind of operator."""
    context = inputs.leaves[0].shape[2]
    attend, threads = ours(pattern, "cpu"), torch.get_num_threads()

    def call() -> None:
        torch.autograd.grad(attend(*inputs.leaves), inputs.leaves, inputs.grad_out)

    torch.set_num_threads(1)
    try:
        call()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(PROFILED_CALLS):
                call()
    finally:
        torch.set_num_threads(threads)
    spent = dict.fromkeys((*KINDS, OTHER), 0.0)
    for event in profiled.key_averages():
        name = event.key.removeprefix("aten::")
        spent[next((kind for kind, names in KINDS.items() if name in names), OTHER)] += event.self_cpu_time_total
    total = sum(spent.values())
    allowed = num_pairs(pattern, context)
    return {
        "limit": rounded(num_pairs(Dense(), context) / allowed),
        "computed": rounded(visited_pairs(inputs.leaves[0], pattern) / allowed),
        "shares": {kind: rounded(time / total) for kind, time in spent.items()},
    }


def sizes(patterns: dict[str, Pattern], inputs: Inputs, repeats: int) -> list[dict[str, Any]]:
    """Return each pattern's time with each of ``SIZES``, relative to shipped sizes and to dense attention."""
    contenders = {"dense": Contender(ours(Dense(), "cpu"))}
    for size in SIZES:
        cut = cached(inspect.unwrap(chunks.chunked))  # a cache for each size
        contenders |= {f"{n}, {size}": Contender(_in_sizes(pattern, size, cut)) for n, pattern in patterns.items()}
    shipped = slabs.SCORES_IN_WORK, chunks.KEY_COST, chunks.chunked
    try:
        turns = take_turns(contenders, [inputs], torch.device("cpu"), repeats, 0.0)
    finally:
        slabs.SCORES_IN_WORK, chunks.KEY_COST, attention.chunked = shipped
    seconds = {name: contender.seconds()["both"] for name, contender in turns.items()}
    return [
        {
            "sizes": size,
            "scores_in_work": SIZES[size][0],
            "key_cost": SIZES[size][1],
            "seconds_over_shipped": {
                n: rounded(seconds[f"{n}, {size}"] / seconds[f"{n}, as shipped"]) for n in patterns
            },
            "ratio_to_dense": {n: rounded(seconds["dense"] / seconds[f"{n}, {size}"]) for n in patterns},
        }
        for size in SIZES
    ]


def _in_sizes(pattern: Pattern, size: str, cut: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention in other sizes, which stay set for its backward pass."""
    attend = ours(pattern, "cpu")

    def attention_in_sizes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slabs.SCORES_IN_WORK, chunks.KEY_COST = SIZES[size]
        attention.chunked = cut
        return attend(q, k, v)

    return attention_in_sizes


if __name__ == "__main__":
    sys.exit(main())
