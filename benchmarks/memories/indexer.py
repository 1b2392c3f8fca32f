"""Attention to keys that an indexer chooses beside dense attention: ``python -m benchmarks.memories.indexer``.

Choosing, attention forward and backward, and the indexer's loss with its gradients, in rounds in which all take turns.
On a CPU, seconds are processor time of one thread in fp32, the least of the rounds, and dense attention is ours. On a
GPU they are times between synchronizations in bf16, medians, and dense attention is the faster of torch's flash and
cuDNN. Memory is the most that torch held at once during all of these, beyond the inputs, with their gradients.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.attention import timing
from benchmarks.attention.peers import dense_contenders
from benchmarks.machine import about, synchronize
from benchmarks.memories.recurrences import most_held
from benchmarks.report import markdown, new_parser, parse, positive, rounded, write_result
from longstride.kernels import sparse_attention
from longstride.kernels.indexed import choose_keys, indexed_attention, indexer_loss
from longstride.kernels.patterns import Dense

HEADS, WIDTH, KEYS, WINDOW, INDEX_HEADS, INDEX_WIDTH = 8, 64, 256, 64, 4, 32
PARTS = ("choosing", "forward", "backward", "loss")


class Inputs(NamedTuple):
    """Leaves: of the indexer (1, N, J, I), (1, N, I), (1, N, J), queries (1, H, N, D), keys and values (1, K, N, D)."""

    indexer: tuple[Tensor, Tensor, Tensor]
    heads: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def drawn(cls, context: int, key_value_heads: int, device: torch.device) -> Inputs:
        """Draw random ones, whose choices are spread as widely as can be."""
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def leaves(*shapes: tuple[int, ...]) -> Any:
            drawn = (torch.randn(1, *shape, generator=generator).to(device, dtype) for shape in shapes)
            return tuple(x.requires_grad_() for x in drawn)

        indexer = (context, INDEX_HEADS, INDEX_WIDTH), (context, INDEX_WIDTH), (context, INDEX_HEADS)
        return cls(leaves(*indexer), leaves(*((heads, context, WIDTH) for heads in (HEADS, *[key_value_heads] * 2))))


def now(device: torch.device) -> float:
    """Return the seconds of a clock, once the device has nothing to do."""
    synchronize(device)
    return time.perf_counter() if device.type == "cuda" else time.process_time()


def indexed(inputs: Inputs, block: int) -> dict[str, float]:
    """Return the seconds of each part of a training step of attention."""
    clock = partial(now, inputs.heads[0].device)
    times = [clock()]
    window = min(WINDOW, KEYS - block + 1)
    numbers = choose_keys(*inputs.indexer, count=KEYS // block, block=block, window=window)
    times.append(clock())
    out, target = indexed_attention(*inputs.heads, numbers, block=block, return_weights=True)
    times.append(clock())
    out.backward(out.detach())
    times.append(clock())
    indexer_loss(*inputs.indexer, inputs.heads[:2], numbers=numbers, block=block, target=target).backward()
    times.append(clock())
    return {part: end - begin for part, begin, end in zip(PARTS, times[:-1], times[1:], strict=True)}


def dense(inputs: Inputs, attention: Callable[..., Tensor]) -> float:
    """Return the seconds of both passes of dense attention."""
    device = inputs.heads[0].device
    begin = now(device)
    out = attention(*inputs.heads)
    out.backward(out.detach())
    return now(device) - begin


def measured(
    context: int, key_value_heads: int, blocks: list[int], rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """Return a row for each size of blocks at one context."""
    inputs = Inputs.drawn(context, key_value_heads, device)
    found: dict[int, list[dict[str, float]]] = {block: [] for block in blocks}
    best: Callable[..., float] = min
    peers: list[Callable[..., Any]] = [lambda q, k, v: sparse_attention(q, k, v, Dense())]
    if device.type == "cuda":
        best = statistics.median
        running, _ = dense_contenders(timing.Inputs(inputs.heads, inputs.heads[0].detach()))
        peers = [contender.attention for contender in running.values()]
    of_dense: list[list[float]] = [[] for _ in peers]
    for _ in range(rounds + 1):
        for attention, each in zip(peers, of_dense, strict=True):
            each.append(dense(inputs, attention))
        for block, seconds in found.items():
            seconds.append(indexed(inputs, block))
    seconds_of_dense = min(best(each[1:]) for each in of_dense)  # the first compiles
    rows = []
    for block, seconds in found.items():
        total = best([sum(parts.values()) for parts in seconds[1:]])
        row: dict[str, Any] = {"context": context, "key_value_heads": key_value_heads, "block": block, "rounds": rounds}
        row |= {part: rounded(best([parts[part] for parts in seconds[1:]])) for part in PARTS}
        row |= {"dense": rounded(seconds_of_dense), "ratio": rounded(total / seconds_of_dense)}
        rows.append(row | {"peak_bytes": most_held(partial(indexed, inputs, block), device)})
    return rows


def table(result: dict[str, Any]) -> str:
    """Format the rows."""
    columns = ["context", "K", "block", *PARTS, "dense", "of dense", "MB"]
    lines = []
    for row in result["rows"]:
        seconds = (f"{row[name]:.3g}" for name in (*PARTS, "dense"))
        lines.append(
            [
                f"{row['context']:,}",
                str(row["key_value_heads"]),
                str(row["block"]),
                *seconds,
                f"{row['ratio']:.2f}",
                f"{row['peak_bytes'] / 1e6:,.0f}",
            ]
        )
    return f"{result['device']}, torch {result['torch']}, {result['date']}.\n\n" + markdown(columns, lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--contexts", type=positive(int), nargs="+", default=[4_096, 16_384, 65_536])
    parser.add_argument("--key-value-heads", type=positive(int), nargs="+", default=[1, HEADS], help="K, of 8 heads")
    parser.add_argument("--blocks", type=positive(int), nargs="+", default=[1, 16, 64], help="keys chosen together")
    parser.add_argument("--rounds", type=positive(int), default=3, help="after one that is not counted")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    options = parse(parser, arguments, "indexer")
    torch.set_num_threads(1)
    rows = [
        row
        for context in options.contexts
        for shared in options.key_value_heads
        for row in measured(context, shared, options.blocks, options.rounds, options.device)
    ]
    result = about(options.device) | {"keys": KEYS, "rows": rows}
    write_result(options, result)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
