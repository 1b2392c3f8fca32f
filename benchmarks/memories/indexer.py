"""Attention to keys that an indexer chooses beside dense attention: ``python -m benchmarks.memories.indexer``.

Seconds are processor time of one thread in fp32, the least of some rounds in which all take turns: choosing, attention
forward and backward, and the indexer's loss with its gradients. Dense attention is ours, forward and backward. Memory
is the most that torch held at once during all of these, beyond the inputs, with their gradients.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.machine import about
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
    def drawn(cls, context: int, key_value_heads: int) -> Inputs:
        """Draw random ones, whose choices are spread as widely as can be."""
        generator = torch.Generator().manual_seed(0)

        def leaves(*shapes: tuple[int, ...]) -> Any:
            return tuple(torch.randn(1, *shape, generator=generator, requires_grad=True) for shape in shapes)

        indexer = (context, INDEX_HEADS, INDEX_WIDTH), (context, INDEX_WIDTH), (context, INDEX_HEADS)
        return cls(leaves(*indexer), leaves(*((heads, context, WIDTH) for heads in (HEADS, *[key_value_heads] * 2))))


def indexed(inputs: Inputs, block: int) -> dict[str, float]:
    """Return the seconds of each part of a training step of attention."""
    times = [time.process_time()]
    window = min(WINDOW, KEYS - block + 1)
    numbers = choose_keys(*inputs.indexer, count=KEYS // block, block=block, window=window)
    times.append(time.process_time())
    out, target = indexed_attention(*inputs.heads, numbers, block=block, return_weights=True)
    times.append(time.process_time())
    out.backward(out.detach())
    times.append(time.process_time())
    indexer_loss(*inputs.indexer, inputs.heads[:2], numbers=numbers, block=block, target=target).backward()
    times.append(time.process_time())
    return {part: end - begin for part, begin, end in zip(PARTS, times[:-1], times[1:], strict=True)}


def dense(inputs: Inputs) -> float:
    """Return the seconds of both passes of dense attention."""
    begin = time.process_time()
    out = sparse_attention(*inputs.heads, Dense())
    out.backward(out.detach())
    return time.process_time() - begin


def measured(context: int, key_value_heads: int, blocks: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each size of blocks at one context."""
    inputs = Inputs.drawn(context, key_value_heads)
    found: dict[int, list[dict[str, float]]] = {block: [] for block in blocks}
    of_dense = []
    for _ in range(rounds):
        of_dense.append(dense(inputs))
        for block, seconds in found.items():
            seconds.append(indexed(inputs, block))
    rows = []
    for block, seconds in found.items():
        best = min(seconds, key=lambda parts: sum(parts.values()))
        row: dict[str, Any] = {"context": context, "key_value_heads": key_value_heads, "block": block, "rounds": rounds}
        row |= {part: rounded(value) for part, value in best.items()}
        row |= {"dense": rounded(min(of_dense)), "ratio": rounded(sum(best.values()) / min(of_dense))}
        rows.append(row | {"peak_bytes": most_held(partial(indexed, inputs, block))})
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
    parser.add_argument("--rounds", type=positive(int), default=3)
    options = parse(parser, arguments, "indexer")
    torch.set_num_threads(1)
    rows = [
        row
        for context in options.contexts
        for shared in options.key_value_heads
        for row in measured(context, shared, options.blocks, options.rounds)
    ]
    result = about(torch.device("cpu")) | {"threads": 1, "keys": KEYS, "rows": rows}
    write_result(options, result)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
