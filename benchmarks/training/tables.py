"""Cost of n-gram tables in a training step: sparse updates, against a dense gradient and AdamW on the whole table.

``python benchmarks/training/tables.py``: one thread trains only the tables, on bytes of this project's own sources,
both ways in one run; times are processor time. Then two processes exchange a step's gradients over gloo, and for
comparison sum a dense gradient in bf16, as DeepSpeed's all-reduce would; times are wall time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional as F

from benchmarks.machine import about
from benchmarks.report import markdown, new_parser, parse, rounded, write_result
from longstride.launcher.config import TrainConfig
from longstride.launcher.engine.device import prepare_accelerator
from longstride.launcher.engine.tables import Tables
from longstride.launcher.ranks.processes import Ranks
from longstride.sparse_model import Ngrams
from longstride.sparse_model.config import NgramTables

ROOT = Path(__file__).resolve().parents[2]
SPARSE_PARTS = ("hash", "lookup", "backward", "update")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--contexts", type=int, default=4, help="of a step")
    parser.add_argument("--context", type=int, default=1_024)
    parser.add_argument("--rows", type=int, default=262_144, help="of each order")
    parser.add_argument("--orders", type=int, nargs="+", default=[2, 3, 4, 5, 6])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=30, help="steps; a tenth of them the dense way")
    options = parse(parser, arguments, "tables")
    torch.set_num_threads(1)
    prepare_accelerator()
    result = about(torch.device("cpu")) | {
        name: getattr(options, name) for name in ("contexts", "context", "rows", "width", "orders", "repeats")
    }
    result |= {"milliseconds": measure(options), "exchange": exchange(options)}
    print_found(result)
    write_result(options, result)
    return 0


def make_tables(options: argparse.Namespace) -> Ngrams:
    """Make the model's part."""
    return Ngrams(NgramTables(orders=tuple(options.orders), rows=options.rows), 256, options.width)


def batches(options: argparse.Namespace, count: int) -> list[Tensor]:
    """Return the tokens before each position of some steps, (B, L + N - 1), from this project's sources."""
    content = b"".join(path.read_bytes() for path in sorted((ROOT / "launcher").rglob("*.py")))
    data, generator = torch.tensor(list(content)), torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - options.context, (count, options.contexts), generator=generator).tolist()
    steps = (torch.stack([data[start : start + options.context - 1] for start in step]) for step in starts)
    return [F.pad(step, (options.orders[-1], 0), value=-1) for step in steps]


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Measure processor milliseconds a step, by part; medians."""
    sparse, dense = make_tables(options), make_tables(options)
    train = TrainConfig(output="run", steps=10**6, global_batch=1, micro_batch=1, learning_rate=1e-2)
    tables = Tables(sparse, train, Ranks(), sharded=False)
    optimizer = torch.optim.AdamW([dense.rows], lr=1e-2, fused=True)
    shape = (options.contexts, options.context, options.width)
    milliseconds: dict[str, list[float]] = {}

    def timed(part: str, work: Callable[..., Any], *arguments: Any) -> Any:
        start = time.process_time()
        result = work(*arguments)
        milliseconds.setdefault(part, []).append(1e3 * (time.process_time() - start))
        return result

    for number, before in enumerate(batches(options, options.repeats)):
        h = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
        gradient = 1e-4 * torch.randn(shape).bfloat16()
        ids = timed("hash", sparse.ids, before)
        out = timed("lookup", tables.add, h, ids)
        timed("backward", out.backward, gradient)
        timed("update", tables.step, number, 1.0)
        if number % 10 == 0:
            out = timed("dense forward", dense, h, before)
            timed("dense backward", out.backward, gradient)
            timed("dense update", optimizer.step)
            dense.rows.grad = None
    # Without the first steps, which allocate memory.
    return {part: rounded(statistics.median(x[len(x) // 4 :])) or 0.0 for part, x in milliseconds.items()}


def exchange(options: argparse.Namespace) -> dict[str, float]:
    """Measure what two processes send for a step, and the wall seconds."""
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_exchange, (options, f"file://{folder}/meeting", queue), nprocs=2)
    return queue.get()


def _exchange(rank: int, options: argparse.Namespace, meeting: str, queue: Any) -> None:
    """Run one of two processes; the first reports its measurements."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=2)
    positions, orders = options.contexts * options.context, len(options.orders)
    sent = torch.zeros(positions, 2 * options.width + 4 * orders, dtype=torch.uint8)
    gradient = torch.zeros(orders * options.rows, options.width, dtype=torch.bfloat16)

    def seconds(work: Callable[[], Any], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            torch.distributed.barrier()
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return rounded(statistics.median(times)) or 0.0

    ranks = Ranks(rank, rank, 2)
    result = {
        "sent_bytes": sent.numel(),
        "seconds": seconds(lambda: ranks.gather(sent), options.repeats),
        "dense_bytes": gradient.nbytes,
        "dense_seconds": seconds(lambda: torch.distributed.all_reduce(gradient), max(1, options.repeats // 10)),
    }
    if rank == 0:
        queue.put(result)
    torch.distributed.destroy_process_group()


def print_found(result: dict[str, Any]) -> None:
    """Print the tables."""
    times, exchanged = result["milliseconds"], result["exchange"]
    dense = [part for part in times if part.startswith("dense")]
    positions = result["contexts"] * result["context"]
    print(f"{positions:,} positions, orders {result['orders']} of {result['rows']:,} rows of {result['width']}\n")
    rows = []
    for name, parts in (("rows touched", SPARSE_PARTS), ("dense gradient, AdamW", dense)):
        details = ", ".join(f"{part.removeprefix('dense ')} {times[part]:.1f}" for part in parts)
        rows.append([name, f"{sum(times[part] for part in parts):.1f}", details])
    print(markdown(["tables", "ms of one thread a step", ""], rows))
    rows = [
        [name, f"{exchanged[f'{size}_bytes'] / 1e6:.1f}", f"{1e3 * exchanged[f'{prefix}seconds']:.1f}"]
        for name, prefix, size in (("rows touched", "", "sent"), ("dense gradient", "dense_", "dense"))
    ]
    print(markdown(["two processes", "MB from each", "ms"], rows), end="")


if __name__ == "__main__":
    sys.exit(main())
