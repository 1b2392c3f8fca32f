"""The cost of turning a dense model sparse: ``python -m benchmarks.memories.to_sparse``.

``longstride train`` trains a byte model with dense attention on Python's own sources, in one process of one thread. The
model then goes on for a tenth of its steps: dense, or converted by ``--from``. The conversion to chosen keys has the
stages of the preset ``dense_to_sparse``: its indexers alone learn from dense attention, then everything learns. As a
control, queries read as many keys that are the last ones, and everything learns in all steps.

All go on with the same contexts, which differ from the first ones in their order, and at the same rate. They are scored
on the same held-out files. Rows are written to the result file as they are finished, so that processes can share seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import about
from benchmarks.recipe import NGRAMS_4, changed, longstride, recipe, run
from benchmarks.report import DASH, append_row, has_row, markdown, new_parser, open_rows, positive, rounded

CONTEXT, KEYS, WINDOW = 4_096, 256, 32
SHORT_CONTEXT, SHORT_SHARE = 512, 0.7  # of the dense model's steps
LATER_SHARE, WARM_UP_SHARE = 0.1, 0.3  # later steps, of the dense model's; the indexers' warm-up, of the later steps
HELD_OUT_SHARE = 0.01  # of the files
LATER_SEED = 1_000  # added to the seed of the dense model
UNMOVED = 1e-30  # a learning rate at which a step leaves every bit of the network's weights
BASE: dict[str, Any] = {
    "model.context": CONTEXT, "model.layers": 2, "model.heads": 4, "model.attention": {"type": "dense"},
    "model.feed_forward_ratio": None, "model.ngrams": NGRAMS_4, "train.final_learning_rate": 0.001,
    "train.schedule": {"type": "wsd", "decay_fraction": 0.3}, "deepspeed": "zero0_fp32",
}  # fmt: skip
LATER: dict[str, Any] = {"train.optimizer": None, "train.schedule": "cosine", "train.final_learning_rate": 0.0}
COLUMNS = {"converted": "right after", "warmed": "after the indexers' warm-up", "recovered": "at the end"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=positive(int), default=1_000, help="of the dense model, each of one context")
    parser.add_argument("--rate", type=positive(float), default=0.001, help="of all that goes on")
    parser.add_argument("--indexer-rate", type=positive(float), default=0.003, help="of the indexers' warm-up")
    parser.add_argument("--blocks", type=positive(int), nargs="*", default=[16, 1], help="keys chosen together")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], metavar="SEED")
    parser.add_argument("--folder", type=Path, help="keep data and dense runs here, and take those that are there")
    options = parser.parse_args(arguments)
    facts = {name: getattr(options, name) for name in ("steps", "rate", "indexer_rate")}
    facts |= {"context": CONTEXT, "keys": KEYS, "later_share": LATER_SHARE, "warm_up_share": WARM_UP_SHARE}
    open_rows(options, "to-sparse", about(torch.device("cpu")) | {"threads": 1} | facts)
    with tempfile.TemporaryDirectory() as place:
        folder = options.folder or Path(place)
        data = folder / "data"
        if not data.exists():
            words = ("--exclude", "site-packages", "--validation-fraction", HELD_OUT_SHARE, "--output", data)
            longstride("data", "build", sysconfig.get_paths()["stdlib"], *words)
        for seed in options.seeds:
            before, steps = folder / f"dense-{seed}", later_steps(options)
            for name, content in later(options).items():
                row: dict[str, Any] = {"seed": seed, "attention": name}
                if not has_row(options.output, row):
                    if not before.exists():
                        run(dense(options.steps), options.steps, seed, data, before, evaluate_contexts=1)
                    append_row(options.output, row | measure(content, steps, seed + LATER_SEED, data, before))
    print(table(json.loads(options.output.read_text())))
    return 0


def measure(content: dict[str, Any], steps: int, seed: int, data: Path, before: Path) -> dict[str, Any]:
    """Train on from a dense run; return bits per byte before any step, after the indexers' warm-up, and at the end."""
    bits: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=before.parent) as place:
        converted, recovered = Path(place) / "converted", Path(place) / "recovered"
        lines = run(content, steps, seed, data, recovered, evaluate_contexts=4, source=before)
        if content["model"]["attention"]["type"] != "dense":
            still = changed(content, {"train.context_schedule": None, "train.learning_rate": UNMOVED})
            run(still, 1, seed, data, converted, evaluate_contexts=1, source=before)
        bits["converted"] = score(converted if converted.exists() else before)
        if "context_schedule" in content["train"]:
            bits["warmed"] = score(recovered, "--step", content["train"]["checkpoint_every"])
            bits["mass"] = rounded(statistics.fmean(lines[-1]["indexer_mass"]))
        return bits | {"recovered": score(recovered)}


def dense(steps: int) -> dict[str, Any]:
    """Return the configuration of a dense model, without its data and steps."""
    stages = [{"context": SHORT_CONTEXT, "steps": round(SHORT_SHARE * steps)}, {"context": CONTEXT}]
    return changed(recipe(), BASE | {"train.context_schedule": stages})


def later_steps(options: argparse.Namespace) -> int:
    """Return the steps of all that goes on."""
    return max(2, round(LATER_SHARE * options.steps))


def later(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the configurations of what goes on by the names of their rows; the dense one is the first."""
    base = changed(recipe(), BASE | LATER | {"train.learning_rate": options.rate})
    contents = {"dense": base}
    warm_up = max(1, round(WARM_UP_SHARE * later_steps(options)))
    for block in options.blocks:
        attention = {"type": "indexed", "keys": KEYS, "block": block, "window": WINDOW}
        alone = {"context": CONTEXT, "steps": warm_up, "trained": "indexer", "learning_rate": options.indexer_rate}
        stages = [alone | {"attention": attention | {"keys": CONTEXT}}, {"context": CONTEXT}]
        changes = {"model.attention": attention, "train.context_schedule": stages, "train.checkpoint_every": warm_up}
        contents[f"{KEYS} keys, " + (f"in blocks of {block}" if block > 1 else "alone")] = changed(base, changes)
    contents[f"the last {KEYS} keys"] = changed(base, {"model.attention": {"type": "local", "window": KEYS}})
    return contents


def score(output: Path, *words: object) -> float:
    """Return a run's bits per byte on the held-out files."""
    line = json.loads(longstride("evaluate", output, *words))
    return round(line["bits_per_byte"], 4)


def table(result: dict[str, Any]) -> str:
    """Format one device's result."""
    of_dense = {row["seed"]: row["recovered"] for row in result["rows"] if row["attention"] == "dense"}
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_name.setdefault(row["attention"], []).append(row | {"more": row["recovered"] - of_dense[row["seed"]]})

    def mean(rows: list[dict[str, Any]], key: str, form: str = ".3f") -> str:
        values = [row[key] for row in rows if key in row]
        each = f" ({', '.join(format(value, form) for value in values)})" if len(values) > 1 else ""
        return f"{statistics.fmean(values):{form}}{each}" if values else DASH

    lines = [
        [name, *(mean(rows, key) for key in COLUMNS), mean(rows, "more", "+.3f")] for name, rows in by_name.items()
    ]
    title = f"{result['device']}, one thread, torch {result['torch']}, {result['date']}. {result['steps']:,} dense "
    title += f"steps of {result['context']:,} bytes, {result['later_share']:.0%} more; mean of the seeds (each):\n\n"
    return title + markdown(["attention", *COLUMNS.values(), "more than dense"], lines)


if __name__ == "__main__":
    sys.exit(main())
