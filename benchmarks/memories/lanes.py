"""The gain of state that is carried over contexts: ``python -m benchmarks.memories.lanes``.

Each kind of mixer is trained twice on Python's own sources by ``longstride train``, in one process of one thread: with
what it carries from context to context, and without. Both read the same contexts, in lanes, for equally many steps.
They are scored on the same held-out contexts, read in lanes too, in all and in the first positions of each context.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import about
from benchmarks.recipe import changed, longstride, recipe, run
from benchmarks.report import markdown, new_parser, parse, positive, rounded, write_json, write_result

CONTEXT, FIRST = 128, 32
BASE: dict[str, Any] = {
    "model.context": CONTEXT, "model.layers": 2, "model.heads": 2, "model.width": 64, "model.rotary": None,
    "model.query_key_norm": None, "model.convolution": None, "model.ngrams": None,
    "train.micro_batch": 32, "train.global_batch": 32,
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # alone, and what makes it carry
    "transformer_xl": ({"type": "transformer_xl", "memory": 0}, {"memory": CONTEXT}),
    "delta": ({"type": "delta"}, {"stateful": True}),
    "recurrent": ({"type": "recurrent"}, {"stateful": True}),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=positive(int), default=600, help="of every training")
    parser.add_argument("--seeds", type=positive(int), default=3)
    parser.add_argument("--parallel", type=positive(int), default=1, help="trainings at once, each on its own core")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME")
    options = parse(parser, arguments, "lanes")
    torch.set_num_threads(1)
    result = about(torch.device("cpu")) | {"threads": 1, "steps": options.steps, "rows": {}}
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(options.parallel) as pool:
        folder = Path(place)
        data, sources = folder / "data", sysconfig.get_paths()["stdlib"]
        longstride("data", "build", sources, "--exclude", "site-packages", "--output", data)
        jobs = {
            (kind, carries): [
                pool.submit(train, options, kind, carries, seed, data, folder) for seed in range(options.seeds)
            ]
            for kind in options.kinds
            for carries in (False, True)
        }
        for (kind, carries), seeds in jobs.items():
            result["rows"].setdefault(kind, {})["carried" if carries else "alone"] = [job.result() for job in seeds]
            write_json(options.output, result)
    write_result(options, result)
    return 0


def train(
    options: argparse.Namespace, kind: str, carries: bool, seed: int, data: Path, folder: Path
) -> dict[str, float | None]:
    """Train a model and score it; return its bits per byte at all positions and at the first ones, and its seconds."""
    output = folder / f"{kind}-{carries}-{seed}"
    content = configuration(kind, carries)
    lines = run(content, options.steps, seed, data, output, evaluate_contexts=16, in_lanes=True)
    picture = output / "positions.png"
    words = ("--batch", 32, "--positions", picture)
    longstride("evaluate", output, *words)
    scored = json.loads(picture.with_suffix(".json").read_text())
    bins = scored["positions"]
    first = [
        (count, bits)
        for end, count, bits in zip(bins["end"], bins["bytes"], bins["bits_per_byte"], strict=True)
        if end <= FIRST
    ]
    seconds = sum(line["seconds"] for line in lines if "grad_norm" in line)
    return {
        "bits": rounded(scored["bits_per_byte"]),
        "first_bits": rounded(sum(count * bits for count, bits in first) / sum(count for count, _ in first)),
        "seconds": rounded(seconds),
    }


def configuration(kind: str, carries: bool) -> dict[str, Any]:
    """Return the configuration of a run, without its data and steps."""
    alone, carrying = KINDS[kind]
    return changed(changed(recipe(), BASE), {"model.attention": alone | carrying if carries else alone})


def tables(result: dict[str, Any]) -> str:
    """Format one device's result."""
    rows = []
    for kind, by_state in result["rows"].items():
        for state, runs in by_state.items():
            cells = []
            for key in ("first_bits", "bits"):
                values = [run[key] for run in runs]
                cells.append(f"{statistics.fmean(values):.3f} ({min(values):.3f}–{max(values):.3f})")
            rows.append([kind, state, *cells, f"{statistics.fmean(run['seconds'] for run in runs):.0f}"])
    columns = ["mixer", "contexts", f"bits per byte, first {FIRST} positions", "all positions", "seconds"]
    title = f"{result['device']}, one thread, torch {result['torch']}, {result['date']}. Contexts of {CONTEXT}, "
    return f"{title}{result['steps']} steps, mean of the seeds (least–most):\n\n{markdown(columns, rows)}"


if __name__ == "__main__":
    sys.exit(main())
