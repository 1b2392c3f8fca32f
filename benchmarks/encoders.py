"""Two-sided attention of masked models, compared in miniature and by its cost: ``python -m benchmarks.encoders``.

Trainings: models that differ in their attention alone learn masked bytes of Python's own sources by ``longstride
train``, in one process of one thread, for equally many steps, from the same seeds. They are scored on the same held-out
bytes, of which the same are masked. Two dense ones predict bytes in a random order instead (MPNet without its biases,
XLNet); their scores compare with each other alone. ``--rows NAME …`` trains these models, and leaves the results of
others as they are.

Costs: forward and backward of one layer's mixer, projections included, at each context. Seconds are those of one
thread, the least of some passes. Memory is the most that torch held at once during a pass beyond inputs and parameters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import about
from benchmarks.recipe import changed, longstride, recipe, run
from benchmarks.report import markdown, new_parser, parse, positive, rounded, write_json, write_result
from longstride.launcher.output import metrics_file
from longstride.sparse_model import ModelConfig, SparseTransformer

HEADS, HEAD_WIDTH, REACH = 2, 64, 256
SPENT = 5.0  # seconds of passes after which a context is not measured again
HELD_OUT_CONTEXTS = 512
BASE: dict[str, Any] = {
    "model.context": 512, "model.layers": 4, "model.heads": 4, "model.embedding": {"type": "learned"},
    "model.objective": {"type": "masked", "span": 5}, "model.rotary": None, "model.convolution": None,
    "model.ngrams": None, "train.micro_batch": 16, "train.global_batch": 16,
}  # fmt: skip
ATTENTION: dict[str, dict[str, Any]] = {  # sparse ones read about as many keys
    "dense": {"type": "dense", "causal": False},
    "longformer": {"type": "longformer", "window": 32, "globals": 1, "causal": False},
    "bigbird": {
        "type": "bigbird", "block": 8, "window": 3, "globals": 1, "random": 2, "context": 512, "causal": False,
    },
    "linformer": {"type": "linformer", "rows": 64},
}  # fmt: skip
DENSE = ATTENTION["dense"]
PERMUTED = {"type": "permuted", "span": 5}
ROWS: dict[str, dict[str, Any]] = {name: {"model.attention": attention} for name, attention in ATTENTION.items()} | {
    "mpnet": {"model.attention": DENSE, "model.objective": PERMUTED},
    "xlnet": {
        "model.attention": DENSE,
        "model.objective": PERMUTED | {"compensate": False, "random": 0.0, "unchanged": 0.0},
    },
}
COSTS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "longformer": {"type": "longformer", "window": REACH, "globals": 1, "causal": False},
    "linformer": {"type": "linformer", "rows": REACH},
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=positive(int), default=400, help="of every training")
    parser.add_argument("--seeds", type=positive(int), default=3)
    parser.add_argument("--parallel", type=positive(int), default=1, help="trainings at once, each on its own core")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="NAME", help=f"trainings alone: {', '.join(ROWS)}")
    parser.add_argument("--contexts", type=positive(int), nargs="+", default=[4_096, 16_384, 65_536], help="of costs")
    options = parse(parser, arguments, "encoders")
    torch.set_num_threads(1)
    result = about(torch.device("cpu")) | {"threads": 1, "steps": options.steps, "trainings": {}, "costs": []}
    if options.rows and options.output.exists():
        result = json.loads(options.output.read_text())
        if result["steps"] != options.steps:
            raise SystemExit(f"--steps={options.steps}: {options.output} has trainings of {result['steps']}; take that")
    for context in [] if options.rows else options.contexts:
        for name in COSTS:
            result["costs"].append({"attention": name, "context": context} | cost(name, context))
            print(result["costs"][-1], flush=True)
            write_json(options.output, result)
    with tempfile.TemporaryDirectory() as place:
        result["trainings"] |= trainings(options, Path(place))
    write_result(options, result)
    return 0


def cost(name: str, context: int) -> dict[str, Any]:
    """Measure a mixer at a context."""
    config = {
        "context": context, "layers": 1, "heads": HEADS, "width": HEADS * HEAD_WIDTH, "attention": COSTS[name],
        "embedding": {"type": "tokens"}, "objective": {"type": "masked"},
    }  # fmt: skip
    torch.manual_seed(0)
    mixer: Any = SparseTransformer(ModelConfig.model_validate(config)).blocks[0].attention
    h = torch.randn(1, context, HEADS * HEAD_WIDTH, requires_grad=True)
    grad_out = torch.randn_like(h)

    def step() -> None:
        torch.autograd.grad(mixer(h).rows, [h, *mixer.parameters()], grad_out)

    seconds: list[float] = []
    while sum(seconds) < SPENT:
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    changes = (event.nbytes() for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
    return {"seconds": rounded(min(seconds)), "peak_bytes": max(itertools.accumulate(changes))}


def trainings(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Train every row from every seed, and return the scores."""
    data, sources = folder / "data", sysconfig.get_paths()["stdlib"]
    longstride("data", "build", sources, "--exclude", "site-packages", "--output", data)
    base = changed(recipe(), BASE)

    def train(name: str, seed: int) -> dict[str, Any]:
        content = changed(base, ROWS[name])
        output = folder / f"{name}-{seed}"
        lines = run(content, options.steps, seed, data, output, evaluate_contexts=HELD_OUT_CONTEXTS)
        _, bits = metrics_file.bits_of(lines[-1])
        assert bits is not None
        steps = [line for line in lines if metrics_file.is_step(line)]
        seconds = sum(line["seconds"] for line in steps)
        return {"bits": rounded(bits), "seconds": rounded(seconds)}

    with ThreadPoolExecutor(options.parallel) as pool:
        jobs = {
            name: [pool.submit(train, name, seed) for seed in range(options.seeds)] for name in options.rows or ROWS
        }
        return {name: [job.result() for job in seeds] for name, seeds in jobs.items()}


def tables(result: dict[str, Any]) -> str:
    """Format one device's result."""
    contexts = sorted({row["context"] for row in result["costs"]})
    lines = []
    for name in COSTS:
        rows = [row for row in result["costs"] if row["attention"] == name]
        cells = [text for row in rows for text in (f"{row['seconds']:,.2f}", f"{row['peak_bytes'] / 2**20:,.0f}")]
        growth = [f"{rows[-1][key] / rows[0][key]:.0f}×" for key in ("seconds", "peak_bytes")]
        lines.append([name, *cells, *growth])
    columns = [column for context in contexts for column in (f"{context:,}: s", "MiB")]
    costs = markdown(["attention", *columns, "growth of time", "of memory"], lines)
    scores = []
    for name, runs in result["trainings"].items():
        bits = [run["bits"] for run in runs]
        spread = f"{statistics.fmean(bits):.3f} ({min(bits):.3f}–{max(bits):.3f})"
        scores.append([name, spread])
    trained = markdown(["", "bits per masked or predicted byte"], scores)
    title = f"{result['device']}, one thread, torch {result['torch']}, {result['date']}. "
    layer = f"Both passes of a layer in fp32, {HEADS} heads of width {HEAD_WIDTH}, windows of {REACH} to each side, or "
    heading = f"After {result['steps']} steps, mean of the seeds (least–most):"
    return f"{title}{layer}{REACH} mixtures:\n\n{costs}\n{heading}\n\n{trained}"


if __name__ == "__main__":
    sys.exit(main())
