"""Experts and product keys, compared in miniature: ``python -m benchmarks.feed_forwards.experts``.

Models that differ in their feed-forwards learn Python's own sources by ``longstride train``, in one process of one
thread, for equally many steps, from the same seeds. They are scored on the same held-out bytes. Operations are those
that ``longstride plan`` counts, in even use of all choices: with zero experts a byte has fewer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import about
from benchmarks.recipe import changed, longstride, recipe, run
from benchmarks.report import markdown, new_parser, parse, positive, rounded, write_json
from longstride.launcher.output import metrics_file
from longstride.sparse_model import ModelConfig, SparseTransformer

HELD_OUT_CONTEXTS = 128
BASE: dict[str, Any] = {
    "model.context": 512, "model.layers": 2, "model.attention": {"type": "local", "window": 128}, "model.ngrams": None,
    "train.micro_batch": 8, "train.global_batch": 8,
}  # fmt: skip
EXPERTS = {"type": "experts", "count": 8, "top": 2, "activation": "squared_relu"}
ROWS: dict[str, dict[str, Any]] = {
    "top 2, balance loss": {"model.feed_forward": EXPERTS},
    "top 2, 2 zero experts": {"model.feed_forward": EXPERTS | {"zero": 2}},
    "thresholds, 2 on average": {"model.feed_forward": EXPERTS | {"routing": "threshold"}},
    "product keys, 65,536 values": {"model.feed_forward": {"type": "product_keys", "keys": 256, "query_width": 64}},
    "dense, as many operations": {"model.feed_forward_ratio": 3.5},
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=positive(int), default=100, help="of every training, of 4,096 bytes each")
    parser.add_argument("--seeds", type=positive(int), default=3)
    options = parse(parser, arguments, "experts")
    with tempfile.TemporaryDirectory() as place:
        measure(options, Path(place))
    return 0


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Train every row from every seed, and write the result file after each training."""
    data, sources = folder / "data", sysconfig.get_paths()["stdlib"]
    longstride("data", "build", sources, "--exclude", "site-packages", "--output", data)
    result = about(torch.device("cpu")) | {"threads": 1, "steps": options.steps, "trainings": {}}
    for seed in range(options.seeds):
        for number, name in enumerate(ROWS):
            content, output = configuration(name), folder / f"{number}-{seed}"
            lines = run(content, options.steps, seed, data, output, evaluate_contexts=HELD_OUT_CONTEXTS)
            _, bits = metrics_file.bits_of(lines[-1])
            assert bits is not None
            row = result["trainings"].setdefault(name, {"operations": operations(content["model"]), "bits": []})
            row["bits"].append(rounded(bits))
            print(name, seed, row["bits"][-1], flush=True)
            write_json(options.output, result)


def configuration(name: str) -> dict[str, Any]:
    """Return the run's configuration of a row, without data and steps."""
    return changed(recipe(), BASE | ROWS[name])


def operations(model: dict[str, Any]) -> int:
    """Count the operations of a byte in a forward pass of all blocks."""
    config = ModelConfig.model_validate(model)
    network, kinds = SparseTransformer.of_each_kind(config)
    works = (network.block_work(block, 1).forward for block in network.blocks)
    return sum(work * count for work, count in zip(works, kinds.values(), strict=True)) // config.context


def table(result: dict[str, Any]) -> str:
    """Format one device's result."""
    rows = []
    for name, row in result["trainings"].items():
        bits = row["bits"]
        spread = f"{statistics.fmean(bits):.3f} ({min(bits):.3f}–{max(bits):.3f})"
        rows.append([name, f"{row['operations'] / 1000:,.0f}", spread])
    title = f"{result['device']}, torch {result['torch']}, {result['date']}. Two layers; eight experts, "
    seeds = min(len(row["bits"]) for row in result["trainings"].values())
    heading = f"{title}{result['steps']} steps of 4,096 bytes, seeds: {seeds} (least–most):"
    return f"{heading}\n\n{markdown(['feed-forward', 'thousand operations a byte', 'bits per byte'], rows)}"


if __name__ == "__main__":
    sys.exit(main())
