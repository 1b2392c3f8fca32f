"""What each part of the recipe gains in equal time: ``python -m benchmarks.recipe``.

Every row is trained by ``longstride train`` in one process of one thread, from several seeds, for the same seconds of
steps, and scored on the same held-out bytes. The ladder begins at the paper's block and ends at the demo's recipe; each
step adds one part. The rows below it are the recipe without one part. They are compared with a dense transformer in
plain torch (``benchmarks/training/plain_transformer.py``), the best of several shapes and rates.

How many steps the time allows is measured first, in rounds over all rows, as the speed of the machine varies: a row's
best median of a few steps counts. All seeds of a row then take as many steps.
Rows are written to the result file as they are finished.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.machine import about
from benchmarks.report import ROOT, markdown, new_parser, parse, positive, rounded, write_json
from longstride.launcher.output import metrics_file

PRESETS = ROOT / "ds_configs" / "experiments"
PILOT_ROUNDS, PILOT_STEPS, WARM_STEPS = 3, 16, 6  # steps that are timed in each round, and before those
HELD_OUT_BYTES = 442_368  # evenly spread over the held-out files
WARMUP_SHARE = 0.03  # of the steps of a row
SHUFFLE_BYTES = 1 << 25

MUON = {"type": "muon", "rates": {"matrices": 0.015}}
NGRAMS_4 = {"orders": [2, 3, 4], "rows": 32_768}
WINDOW_THEN_FIXED = [{"type": "local", "window": 128}, {"type": "fixed", "stride": 128, "summary": 8}]


class Row(NamedTuple):
    """A row of the table: its name, and its changes by path; null removes a key."""

    name: str
    changes: dict[str, Any]


# Each on top of all before it. The last one is the demo's recipe, which ``all_rows`` adds.
LADDER = (
    Row(
        "the paper's block, fp32, 512 bytes a step, AdamW, cosine",
        {"train.global_batch": 2, "train.micro_batch": 2},
    ),
    Row("4,096 bytes a step", {"train.global_batch": 16, "train.micro_batch": 16}),
    Row("bf16, rate 0.004", {"deepspeed": "zero0_bf16", "train.learning_rate": 0.004}),
    Row(
        "Muon on matrices, warm-up, constant, decay",
        {"train.optimizer": MUON, "train.learning_rate": 0.005, "train.schedule": {"type": "wsd"}},
    ),
    Row(
        "context 1,024: rotary positions and a window of 128, one head",
        {
            "model.context": 1024, "train.global_batch": 4, "train.micro_batch": 4,
            "model.attention": {"type": "local", "window": 128}, "model.heads": 1,
            "model.embedding": {"type": "tokens"}, "model.rotary": {},
        },
    ),
    Row("RMS norms, normalised queries and keys", {"model.norm": "rms", "model.query_key_norm": True}),
    Row(
        "squared ReLU, no biases, outputs that begin at zero",
        {
            "model.feed_forward": {"activation": "squared_relu"}, "model.bias": False,
            "model.initialization": "zero_outputs",
        },
    ),
    Row("a convolution over 3 positions", {"model.convolution": 3}),
    Row("n-gram tables of orders 2 to 4, 32,768 rows each", {"model.ngrams": NGRAMS_4}),
)  # fmt: skip
RECIPE = "the demo's recipe"
WITHOUT = (
    Row("a window of 128", {"model.attention": {"type": "local", "window": 128}}),
    Row("two layers, a window of 128, then fixed", {"model.layers": 2, "model.attention": WINDOW_THEN_FIXED}),
    Row("queries and keys as they are", {"model.query_key_norm": None}),
    Row("no rotary positions", {"model.rotary": None}),
    Row("no convolution", {"model.convolution": None}),
    Row("no n-gram tables", {"model.ngrams": None}),
    Row(
        "AdamW on matrices, rate 0.006",
        {"train.optimizer": {"type": "adamw", "rates": {"matrices": 0.006, "tables": 0.015}}},
    ),
    Row("feed-forward of four times the width", {"model.feed_forward_ratio": None}),
    Row("4 layers", {"model.layers": 4}),
)  # fmt: skip
# Of the dense transformer: layers, width, heads, context and rate; the best by one seed is trained from all.
PLAIN_SHAPES = [
    (layers, 128, 4, context, rate)
    for layers, context in ((4, 256), (2, 256), (4, 1_024))
    for rate in (0.002, 0.004, 0.008)
]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--seconds", type=positive(float), default=80.0, help="of steps, for every training")
    parser.add_argument("--rows", nargs="+", metavar="WORD", help="only rows whose name has one of these words")
    parser.add_argument("--seeds", type=positive(int), default=3)
    parser.add_argument("--parallel", type=positive(int), default=1, help="trainings at once, each on its own core")
    options = parse(parser, arguments, "recipe")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data, sources = folder / "data", sysconfig.get_paths()["stdlib"]
        longstride("data", "build", sources, "--exclude", "site-packages", "--output", data)
        measure(options, data, folder)
    return 0


def measure(options: argparse.Namespace, data: Path, folder: Path) -> None:
    """Train all rows, and write the result file after each."""
    result = about(torch.device("cpu")) | {"threads": 1, "seconds": options.seconds, "ladder": {}, "without": {}}
    if options.rows and options.output.exists():  # the other rows stay
        before = json.loads(options.output.read_text())
        if before["seconds"] != options.seconds:
            raise SystemExit(
                f"--seconds={options.seconds}: {options.output} has rows of {before['seconds']} s; take that"
            )
        result |= {key: before[key] for key in ("ladder", "without", "plain") if key in before}
    selected = [
        (kind, row, content)
        for kind, row, content in all_rows()
        if not options.rows or any(word in row.name for word in options.rows)
    ]
    with ThreadPoolExecutor(options.parallel) as pool:
        rounds = [pool.map(lambda row: pilot(row[2], data, folder), selected) for _ in range(PILOT_ROUNDS)]
        steps = [max(1, int(options.seconds / min(seconds))) for seconds in zip(*rounds, strict=True)]
        jobs = [
            [pool.submit(train, content, count, seed, data, folder) for seed in range(options.seeds)]
            for (_, _, content), count in zip(selected, steps, strict=True)
        ]
        for (kind, row, _), seeds in zip(selected, jobs, strict=True):
            runs = [job.result() for job in seeds]
            result[kind][row.name] = runs
            write_json(options.output, result)
            print(f"{kind}: {row.name}: {summary(runs)}", flush=True)
    if not options.rows or any(word in "plain dense transformer" for word in options.rows):
        result["plain"] = plain(options, data, folder)
        write_json(options.output, result)


def all_rows() -> Iterator[tuple[str, Row, dict[str, Any]]]:
    """Yield every row with its configuration."""
    content = preset("paper_small")
    for row in LADDER:
        content = changed(content, row.changes)
        yield "ladder", row, content
    yield "ladder", Row(RECIPE, {}), recipe()
    for row in WITHOUT:
        yield "without", row, changed(recipe(), row.changes)


def recipe() -> dict[str, Any]:
    """Return the demo's model and optimiser, for one process of one thread."""
    return preset("demo") | {"deepspeed": "zero0_bf16"}


def preset(name: str) -> dict[str, Any]:
    """Return the model and optimiser of a preset, with one micro-batch a step."""
    content = json.loads((PRESETS / f"{name}.json").read_text())
    keys = ("learning_rate", "optimizer", "schedule", "betas", "weight_decay", "micro_batch")
    train = {key: content["train"][key] for key in keys if key in content["train"]}
    train["global_batch"] = train["micro_batch"]
    return {"model": content["model"], "train": train, "deepspeed": "zero0_fp32"}


def changed(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Copy a configuration with some values replaced, or removed if they are null."""
    content = deepcopy(content)
    for path, value in changes.items():
        *above, last = path.split(".")
        place = content
        for key in above:
            place = place[key]
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return content


def pilot(content: dict[str, Any], data: Path, folder: Path) -> float:
    """Measure the seconds of a step: the median of a few."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        lines = run(content, WARM_STEPS + PILOT_STEPS, 0, data, Path(place) / "run", evaluate_contexts=1)
    return statistics.median(
        line["seconds"] for line in lines if metrics_file.is_step(line) and line["step"] > WARM_STEPS
    )


def train(content: dict[str, Any], steps: int, seed: int, data: Path, folder: Path) -> dict[str, Any]:
    """Train once; return its score, bytes and seconds."""
    contexts = HELD_OUT_BYTES // content["model"]["context"]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        lines = run(content, steps, seed, data, Path(place) / "run", evaluate_contexts=contexts)
    steps_taken = [line for line in lines if metrics_file.is_step(line)]
    scores = [line["bits_per_byte"] for line in lines if not metrics_file.is_step(line)]
    return {
        "seed": seed,
        "bits_per_byte": rounded(scores[-1]),
        "bytes": sum(line["tokens"] for line in steps_taken),
        "seconds": rounded(sum(line["seconds"] for line in steps_taken)),
        "steps": steps,
    }


def run(
    content: dict[str, Any],
    steps: int,
    seed: int,
    data: Path,
    output: Path,
    *,
    evaluate_contexts: int,
    in_lanes: bool = False,
    source: Path | None = None,
) -> list[dict[str, Any]]:
    """Train into a new run folder, and return the lines of its metrics.jsonl.

    Every lane is shuffled whole: in blocks, the few bytes of a training would come from a part of the files. With
    ``in_lanes``, each lane reads the files in their order. A ``source`` is a run whose weights are the first ones.
    """
    order = {"shuffle_bytes": 0, "shuffle_shards": False} if in_lanes else {"shuffle_bytes": SHUFFLE_BYTES}
    changes = {
        "train.steps": steps,
        "train.warmup_steps": max(1, round(WARMUP_SHARE * steps)),
        "train.seed": seed,
        "train.output": str(output),
        "train.evaluate_contexts": evaluate_contexts,
        "data": {"path": str(data), "seed": seed, **order},
    }
    file = output.with_suffix(".json")
    file.write_text(json.dumps(changed(content, changes)))
    longstride("train", "--config", file, "--processes", 1, *(("--from", source) if source else ()))
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def plain(options: argparse.Namespace, data: Path, folder: Path) -> dict[str, Any]:
    """Train the dense transformer in plain torch: every shape and rate from one seed, and the best from all seeds."""

    def trained(shape: tuple[float, ...], seed: int) -> dict[str, Any]:
        words = [*shape, "--seed", seed, "--seconds", options.seconds, "--data", data, "--held-out", HELD_OUT_BYTES]
        return dict(json.loads(command(sys.executable, "-m", "benchmarks.training.plain_transformer", *words)))

    with ThreadPoolExecutor(options.parallel) as pool:
        tried = list(pool.map(lambda shape: trained(shape, 0), PLAIN_SHAPES))
        best = min(range(len(tried)), key=lambda number: tried[number]["bits_per_byte"])
        runs = [tried[best], *pool.map(lambda seed: trained(PLAIN_SHAPES[best], seed), range(1, options.seeds))]
    print(f"plain dense transformer, {PLAIN_SHAPES[best]}: {summary(runs)}", flush=True)
    keys = ("layers", "width", "heads", "context", "learning_rate")
    shapes = [dict(zip(keys, shape, strict=True)) for shape in PLAIN_SHAPES]
    return {"shape": shapes[best], "runs": runs, "tried": [a | b for a, b in zip(shapes, tried, strict=True)]}


def longstride(*words: object) -> str:
    """Run `longstride WORDS …` with one thread."""
    return command(sys.executable, "-m", "longstride.launcher.cli", *words)


def command(*words: object) -> str:
    """Run a command with one thread; return its standard output.

    Raises:
        RuntimeError: it failed, with its error output.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([str(word) for word in words], cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: exit code {ended.returncode}\n{ended.stderr[-3000:]}")
    return ended.stdout


def summary(runs: Iterable[dict[str, Any]]) -> str:
    """Format bits per byte of a row, the bytes that it has seen, and its seconds: three cells of the table."""
    bits, size, seconds = ([run[key] for run in runs] for key in ("bits_per_byte", "bytes", "seconds"))
    cells = f"{statistics.fmean(bits):.3f} ({min(bits):.3f}–{max(bits):.3f}) | {statistics.fmean(size) / 1e6:.2f} MB"
    return f"{cells} | {statistics.fmean(seconds):.0f}"


def table(result: dict[str, Any]) -> str:
    """Format one device's result."""
    title = (
        f"{result['device']}, one thread, torch {result['torch']}, {result['date']}: {result['seconds']:g} s of steps. "
        "The mean of the seeds, with the least and the most:\n\n"
    )
    rows = []
    if "plain" in result:
        shape = "{layers} layers of {width}, context {context}, rate {learning_rate}".format(**result["plain"]["shape"])
        name = f"plain dense transformer, torch alone, best of {len(PLAIN_SHAPES)}: {shape}"
        rows.append([name, summary(result["plain"]["runs"])])
    for kind, begin in (("ladder", "… "), ("without", "demo, but with ")):
        for number, (name, runs) in enumerate(result[kind].items()):
            is_complete = kind == "ladder" and (number == 0 or name == RECIPE)
            rows.append([f"{'' if is_complete else begin}{name}", summary(runs)])
    return title + markdown(["recipe", "bits per byte", "bytes seen", "seconds"], rows)


if __name__ == "__main__":
    sys.exit(main())
