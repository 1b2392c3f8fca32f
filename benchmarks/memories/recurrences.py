"""The delta rule in chunks beside attention: ``python -m benchmarks.memories.recurrences``.

Seconds are those of a forward and a backward pass, on a CPU in fp32 in one thread, on a GPU in bf16; the median of some
rounds in which all take turns. Ratios are medians too, of the ratio in each round. Memory is the most that torch held
at once during both passes beyond the inputs, with their gradients. Dense attention is ours on a CPU, torch's flash
attention on a GPU.

Generation: a network of the rule and a window in turn reads a text of any length in contexts that carry their state.
After so many bytes, seconds are those of a step, the median of some, and memory that of all caches, pickled.
"""

from __future__ import annotations

import itertools
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks.attention.peers import DENSE_KERNELS, dense_attention
from benchmarks.machine import about, synchronize
from benchmarks.report import markdown, new_parser, parse, positive, rounded, write_result
from longstride.kernels import sparse_attention
from longstride.kernels.patterns import Dense, Local
from longstride.kernels.recurrences import delta_rule
from longstride.sparse_model import ModelConfig, Session, SparseTransformer

HEADS, WIDTH, WINDOW = 8, 64, 256
RULE, DENSE = "gated delta rule", "dense attention"
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
NETWORK: dict[str, Any] = {
    "context": 4_096, "layers": 2, "heads": HEADS, "width": HEADS * WIDTH, "embedding": {"type": "tokens"},
    "attention": [{"type": "delta", "stateful": True}, {"type": "local", "window": WINDOW}],
}  # fmt: skip
STEPS = 64


def dense(inputs: Inputs) -> Tensor:
    """Return dense attention of queries, keys and values."""
    if inputs[0].device.type == "cuda":
        return dense_attention(DENSE_KERNELS["flash"])(*inputs[:3])
    return sparse_attention(*inputs[:3], Dense())


OPERATIONS: dict[str, Callable[[Inputs], Tensor]] = {
    RULE: lambda inputs: delta_rule(*inputs)[0],
    f"window of {WINDOW}": lambda inputs: sparse_attention(*inputs[:3], Local(WINDOW)),
    DENSE: dense,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--context", type=positive(int), default=12_288, help="positions whose passes are timed")
    parser.add_argument("--rounds", type=positive(int), default=5)
    lengths = [3_072, 6_144, 12_288, 24_576]
    parser.add_argument("--contexts", type=positive(int), nargs="+", default=lengths, help="whose memory is measured")
    lengths = [4_096, 32_768, 262_144]
    parser.add_argument("--generated", type=positive(int), nargs="+", default=lengths, help="bytes before timed steps")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    options = parse(parser, arguments, "recurrences")
    torch.set_num_threads(1)
    device = options.device
    result = about(device) | {"context": options.context, "rounds": options.rounds}
    result["rows"] = times(options.context, options.rounds, device)
    result["memory"] = [{"context": context, "peak_bytes": peak(context, device)} for context in options.contexts]
    result["generation"] = generation(sorted(options.generated), device)
    write_result(options, result)
    print(table(result))
    return 0


def inputs_of(context: int, device: torch.device) -> Inputs:
    """Draw queries, keys of length 1, values, logarithms of decays, and rates of correction."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = torch.randn(3, 1, context, HEADS, WIDTH, generator=generator).transpose(2, 3)
    decay, rate = torch.rand(2, 1, HEADS, context, generator=generator).to(device)
    q, k, v = (x.to(device, dtype) for x in (q, F.normalize(k, dim=-1), v))
    q, k, v, decay, rate = (x.detach().requires_grad_() for x in (q, k, v, -decay, rate))
    return q, k, v, decay, rate


def passes(name: str, inputs: Inputs) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward pass."""
    device = inputs[0].device
    synchronize(device)
    start = time.perf_counter()
    out = OPERATIONS[name](inputs)
    synchronize(device)
    middle = time.perf_counter()
    out.backward(out.detach())
    synchronize(device)
    return middle - start, time.perf_counter() - middle


def times(context: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Time each operation once in every round, after one that is not counted."""
    inputs = inputs_of(context, device)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in OPERATIONS}
    for _ in range(rounds + 1):
        for name, measured in seconds.items():
            measured.append(passes(name, inputs))
    rows = []
    for name, measured in seconds.items():
        pairs = zip(seconds[DENSE][1:], measured[1:], strict=True)
        forward, backward = (rounded(statistics.median(each)) for each in zip(*measured[1:], strict=True))
        faster = rounded(statistics.median(sum(dense) / sum(own) for dense, own in pairs))
        rows.append({"operation": name, "forward": forward, "backward": backward, "dense_over_own": faster})
    return rows


def peak(context: int, device: torch.device) -> int:
    """Return the most bytes that both passes of the rule hold at once."""
    inputs = inputs_of(context, device)
    return most_held(lambda: passes(RULE, inputs), device)


def most_held(function: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that torch holds at once for what a function computes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    changes = (event.nbytes() for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(itertools.accumulate(changes))


def generation(lengths: list[int], device: torch.device) -> list[dict[str, Any]]:
    """Measure steps and caches of a session after each number of bytes, in ascending order."""
    torch.manual_seed(0)
    session, rows = Session(SparseTransformer(ModelConfig.model_validate(NETWORK)).eval().to(device), back=0), []
    read = 0
    for length in lengths:
        session.read(torch.randint(256, (1, length - read - STEPS), device=device))
        seconds = []
        for token in torch.randint(256, (STEPS, 1), device=device):
            start = time.perf_counter()
            session.append(token)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        read = length
        states = len(pickle.dumps(session.states))
        rows.append({"bytes": length, "seconds": rounded(statistics.median(seconds)), "cache_bytes": states})
    return rows


def table(result: dict[str, Any]) -> str:
    """Format one device's result."""
    rows = [
        [
            row["operation"],
            f"{1e3 * row['forward']:,.1f}",
            f"{1e3 * row['backward']:,.1f}",
            f"{row['dense_over_own']:.1f}×",
        ]
        for row in result["rows"]
    ]
    memory, generated = result["memory"], result["generation"]
    where, dtype = ("", "bf16") if result["device_type"] == "cuda" else (", one thread", "fp32")
    title = f"{result['device']}{where}, torch {result['torch']}, {result['date']}. "
    sizes = f"{result['context']:,} positions, {HEADS} heads of {WIDTH} in {dtype}:"
    measured = markdown(["", "forward, ms", "backward, ms", "dense / it"], rows)
    held = ", ".join(f"{row['peak_bytes'] / 2**20:,.0f}" for row in memory)
    contexts = ", ".join(f"{row['context']:,}" for row in memory)
    seconds = ", ".join(f"{1e3 * row['seconds']:.1f}" for row in generated)
    read = ", ".join(f"{row['bytes']:,}" for row in generated)
    caches = max(row["cache_bytes"] for row in generated) / 2**20
    text = f"Memory of the rule's two passes: {held} MiB of {contexts}. "
    text += f"A step of generation, with caches of {caches:.1f} MiB: {seconds} ms after {read} bytes."
    return f"{title}{sizes}\n\n{measured}\n{text}\n"


if __name__ == "__main__":
    sys.exit(main())
