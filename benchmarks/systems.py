"""Small comparisons of systems: ``python benchmarks/systems.py``.

Each comparison trains models that differ in a single respect, by ``longstride train`` in one process of one thread, on
the same data, for the same number of steps, from the same seeds. They are scored on the same held-out bytes of Python's
own sources. The base is the recipe of docs/recipes.md with four layers and without n-gram tables, so that the layers
have something left to learn.

Rows are written to the result file as they are finished; ``--tables`` makes the table of docs/systems.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

from benchmarks.machine import about
from benchmarks.recipe import Row, changed, longstride, measured, recipe, summary, train
from benchmarks.report import RESULTS, markdown, new_parser, positive, replaced, rounded, write_json
from longstride.launcher.checkpoints import master_weights, open_checkpoint
from longstride.launcher.models import TRAINED
from longstride.launcher.planning.costs import parameter_parts, work
from longstride.sparse_model import ModelConfig, SparseTransformer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "systems.md"
BEGIN, END = "<!-- made by benchmarks/systems.py: begin -->", "<!-- end -->"
BASE = {"model.layers": 4, "model.ngrams": None}


def windows(*widths: int) -> dict[str, Any]:
    """Make a window for each layer."""
    return {"model.attention": [{"type": "local", "window": width} for width in widths]}


def synthesizer(*kinds: str) -> dict[str, Any]:
    """Make scores of these kinds for all earlier positions, in contexts so short that a table of all pairs is small.

    Positions have tables, as most of these kinds have no queries and keys to rotate.
    """
    scores = {"type": "synthesizer", "kind": list(kinds)} if kinds else {"type": "dense"}
    return {
        "model.attention": scores,
        "model.context": 256,
        "model.heads": 4,
        "model.embedding": {"type": "text", "row_width": 16},
        "model.rotary": None,
        "model.query_key_norm": None,
        "train.micro_batch": 16,
        "train.global_batch": 16,
    }


def hashed(**lsh: int) -> dict[str, Any]:
    """Make attention by hashing, or dense attention, without normalised queries: hashing has keys of unit length."""
    kind = {"type": "lsh", "buckets": 32, "chunk": 16} | lsh if lsh else {"type": "dense"}
    return {"model.attention": kind, "model.query_key_norm": None}


def experts(ratio: float, **others: Any) -> dict[str, Any]:
    """Make experts instead of the dense feed-forwards."""
    shared = {"type": "experts", "activation": "squared_relu"}
    return {"model.feed_forward": shared | others, "model.feed_forward_ratio": ratio}


def by_content(kind: str, narrow: int, wide: int) -> dict[str, Any]:
    """Make a narrow local head, and a head with a wider window, or with as many random or routed keys."""
    local = {"heads": [{"count": 1, "type": "local", "window": window} for window in (narrow, wide)]}
    clustered = {"clusters": 8, "window": wide, "local": {"heads": 1, "window": narrow}, "decay": 0.99}
    content = {"type": "routing", "keys": kind} | clustered
    return {"model.attention": local if kind == "local" else content, "model.heads": 2}


def on_copies(changes: dict[str, Any]) -> dict[str, Any]:
    """Use two layers, and contexts that divide the documents of ``write_copies``."""
    return changes | {"model.context": 384, "train.micro_batch": 16, "train.global_batch": 16, "model.layers": 2}


BY_CONTENT = {"local windows alone": "local", "windows and random keys": "random", "windows and routing": "routed"}


def reading(attention: dict[str, Any]) -> dict[str, Any]:
    """Make four heads of this attention in every layer."""
    return {"model.heads": 4, "model.attention": attention}


COMPARISONS: dict[str, tuple[Row, ...]] = {
    "sandwich": (
        Row("interleaved, (sf)4", {}),
        Row("sandwich, s (sf)3 f", {"model.order": "s (sf)3 f"}),
        Row("sandwich, s2 (sf)2 f2", {"model.order": "s2 (sf)2 f2"}),
        Row("the other way round, f2 (sf)2 s2", {"model.order": "f2 (sf)2 s2"}),
    ),
    "windows": (
        Row("windows that grow, 32 to 256", windows(32, 64, 128, 256)),
        Row("windows that shrink, 256 to 32", windows(256, 128, 64, 32)),
    ),
    "synthesizers": (
        Row("vanilla attention over 256 bytes", synthesizer()),
        Row("synthesizer: dense + vanilla", synthesizer("dense", "attention")),
        Row("synthesizer: random + vanilla", synthesizer("random", "attention")),
        Row("synthesizer: dense", synthesizer("dense")),
        Row("synthesizer: factorized random", synthesizer("factorized_random")),
    ),
    "hash rounds": (
        Row("dense attention", hashed()),
        Row("one bucket, every earlier key", hashed(buckets=1, chunk=1024)),
        Row("hash rounds: 1", hashed(rounds=1)),
        Row("hash rounds: 2", hashed(rounds=2)),
        Row("hash rounds: 4", hashed(rounds=4)),
    ),
    "chosen blocks": (  # of about as many pairs
        Row("window of 113", windows(113)),
        Row("4 blocks of 32, the best three of the past", {"model.attention": {"type": "moba", "block": 32, "top": 4}}),
    ),
    "experts at equal operations": (
        Row("dense", {}),
        Row("8 experts, one a byte", experts(2.0, count=8, top=1)),
        Row("8 experts of half the width, two a byte", experts(1.0, count=8, top=2)),
    ),
    "routing": tuple(Row(name, by_content(kind, 32, 64)) for name, kind in BY_CONTENT.items()),
    "routing on copies": tuple(
        Row(f"on copies: {name}", on_copies(by_content(kind, 16, 48))) for name, kind in BY_CONTENT.items()
    ),
    "hash rounds on copies": (
        Row("on copies: dense attention", on_copies(hashed())),
        *(Row(f"on copies: hash rounds: {count}", on_copies(hashed(rounds=count, buckets=16))) for count in (1, 2, 4)),
    ),
    "adaptive span": (
        Row("a window of 256", reading({"type": "local", "window": 256})),
        Row("adaptive span up to 256, penalty 1e-5", reading({"type": "adaptive_span", "limit": 256, "penalty": 1e-5})),
        Row("adaptive span up to 256, penalty 1e-4", reading({"type": "adaptive_span", "limit": 256, "penalty": 1e-4})),
        Row("adaptive span up to 256, penalty 1e-3", reading({"type": "adaptive_span", "limit": 256, "penalty": 1e-3})),
    ),
    "entmax": (
        Row("softmax over a window of 64", reading({"type": "local", "window": 64})),
        Row("entmax over a window of 64", reading({"type": "entmax", "pattern": {"type": "local", "window": 64}})),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=positive(int), default=300, help="of every training (default: 300)")
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, help="these comparisons alone; the others stay")
    return measured(parser, arguments, "systems", PAGE, with_table, measure)


def measure(options: argparse.Namespace, data: Path, folder: Path) -> None:
    """Train all rows, and write the result file after each."""
    result = about(torch.device("cpu")) | {"threads": 1, "steps": options.steps, "comparisons": {}}
    if options.only and options.output.exists():
        before = json.loads(options.output.read_text())
        if before["steps"] != options.steps:
            raise SystemExit(f"--steps={options.steps}: {options.output} has {before['steps']} steps; take that")
        result["comparisons"] = before["comparisons"]
    write_copies(folder / "copies")
    longstride("data", "build", folder / "copies", "--output", folder / "copies-data")
    with ThreadPoolExecutor(options.parallel) as pool:
        jobs = {}
        for name in options.only or COMPARISONS:
            place = folder / "copies-data" if name.endswith("on copies") else data  # else Python's sources
            for row in COMPARISONS[name]:
                content = changed(changed(recipe(), BASE), row.changes)
                seeds = [
                    pool.submit(train, content, options.steps, seed, place, folder, learned)
                    for seed in range(options.seeds)
                ]
                jobs[name, row.name] = sizes(content), seeds
            result["comparisons"][name] = {}
        for (name, row_name), (counted, seeds) in jobs.items():
            runs = [job.result() for job in seeds]
            result["comparisons"][name][row_name] = counted | {"runs": runs}
            write_json(options.output, result)
            print(f"{name}: {row_name}: {summary(runs)}", flush=True)


def write_copies(folder: Path, documents: int = 1024, size: int = 3840) -> None:
    """Write documents that repeat a random string, alternately forwards and backwards.

    A string has 48 to 96 of 96 bytes, each at most once. So the next byte stands right before the latest occurrence of
    the present byte. Only content tells how far back that is, and a query must find its own byte. (If all copies run
    forwards, a query must find the byte after its own. Dense attention learns that within some hundred steps from
    strings with an inner structure, and clusters do not.)
    """
    draw = np.random.default_rng(0)
    folder.mkdir()
    for number in range(documents):
        string = bytes(draw.permutation(96)[: draw.integers(48, 97)].astype(np.uint8) + 32)
        both = string + string[::-1]
        (folder / f"{number:04}.txt").write_bytes((both * (size // len(both) + 1))[:size])


def learned(run: Path) -> dict[str, Any]:
    """Return the mean span in positions, or the mean α, of heads that learn how they read; nothing for others."""
    checkpoint = open_checkpoint(run, None)
    model = SparseTransformer(checkpoint.config.model)
    model.load_state_dict(master_weights(checkpoint, TRAINED))
    means = {}
    with torch.no_grad():
        for name, what in (("positions_read", "mean_span"), ("excess", "mean_excess")):
            heads = [getattr(mixer, name)() for mixer in model.mixers if hasattr(mixer, name)]
            if heads:
                means[what] = rounded(float(torch.cat(heads).mean()))
    return means


def sizes(content: dict[str, Any]) -> dict[str, int]:
    """Count parameters, and operations of a forward pass over a byte."""
    config = ModelConfig.model_validate(content["model"])
    operations = work(config, content["train"]["micro_batch"]).whole.forward // config.context
    return {"parameters": sum(parameter_parts(config).values()), "operations": operations}


def with_table(page: str) -> str:
    """Return the page's text with its table made from the result files."""
    files = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("systems-*.json"))]
    return replaced(page, BEGIN, "".join(map(table, files)), END)


def table(result: dict[str, Any]) -> str:
    """Format one device's result."""
    title = (
        f"{result['device']}, one thread, torch {result['torch']}, {result['date']}: {result['steps']} steps. "
        "The mean of the seeds, with the least and the most:\n\n"
    )
    lines: list[list[str]] = []
    for comparison, rows in result["comparisons"].items():
        lines.append([f"**{comparison}**", "", ""])
        for name, row in rows.items():
            bits, seconds = ([run[key] for run in row["runs"]] for key in ("bits_per_byte", "seconds"))
            cells = [f"{statistics.fmean(bits):.3f} ({min(bits):.3f}–{max(bits):.3f})"]
            for what, text in (("mean_span", "mean span {:.0f}"), ("mean_excess", "mean α 1 + {:.2f}")):
                if what in row["runs"][0]:
                    name += "; " + text.format(statistics.fmean(run[what] for run in row["runs"]))
            cells += [f"{statistics.fmean(seconds):.0f}"]
            lines.append([name.removeprefix("on copies: "), *cells])
    return title + markdown(["", "bits per byte", "seconds"], lines)


if __name__ == "__main__":
    sys.exit(main())
