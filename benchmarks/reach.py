"""What each pattern can carry, and what it costs: ``python -m benchmarks.reach``.

Every run trains a network of two layers for the same seconds of processor time, on one thread. The first layer has a
window of 128; the second has the pattern. A run has stages (``benchmarks/reach_training.py``):

1. The lesson: random strings that are repeated, in contexts of 128. The network learns to copy.
2. Texts only: contexts of 512, and n-gram tables from here on. Attention is dense up to here.
3. Long contexts. All patterns of a task continue from the same weights.

Tasks whose distance is always the same have long contexts only.

The tasks are in ``benchmarks/reach_tasks.py``.

Rows are written to the result file as they finish. A second call continues the file: it trains only the missing rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch

from benchmarks.machine import about
from benchmarks.reach_picture import Point, picture
from benchmarks.reach_tasks import LESSON_CONTEXT, TASKS, Task, lesson_of, version_folders
from benchmarks.reach_training import CLOCK_STEPS, Progress, Stage, best_device, score, solved_at, trained
from benchmarks.recipe import changed, preset
from benchmarks.report import append_row, has_row, markdown, new_parser, open_rows, positive, rounded
from longstride.kernels import ConfigError
from longstride.sparse_model import ModelConfig

WINDOW = {"type": "local", "window": 128}  # of the first layer
NARROW = {"type": "local", "window": 8}  # of the first layer, in look-ups
SHORT_CONTEXT = 512
STEP_BYTES = 4_096
EVALUATED = 12  # held-out contexts
WARMUP_SHARE = 0.03
# Unlike the demo's: logits of normalised queries and keys are at most √128, too few to find one key among thousands.
# Slow rotations let what is learned in short contexts reach far.
# Texts need both.
MODEL = {"query_key_norm": False, "rotary": {"base": 1e8}}
TABLE_ROWS = 65_536  # of each order of n-grams
DRAWN = (("versions", 4_096), ("python", 4_096))  # tasks and contexts of the picture
TRAIN = {
    "global_batch": 1,
    "micro_batch": 1,
    "learning_rate": 0.01,
    "optimizer": {"type": "muon", "rates": {"matrices": 0.01, "tables": 0.015}},
    "betas": [0.9, 0.95],
    "warmup_steps": round(WARMUP_SHARE * CLOCK_STEPS),
    "schedule": {"type": "wsd", "decay_fraction": 0.5},
}
DENSE: Mapping[str, Any] = {"type": "dense"}


class Pattern(NamedTuple):
    """The attention of the second layer, in long contexts and in short ones."""

    long: Mapping[str, Any]
    short: Mapping[str, Any] = DENSE


# Hashed queries are their keys. A single bucket whose chunk is half of a short context makes them dense.
HASHED = Pattern(
    {"type": "lsh", "buckets": 32, "rounds": 2, "chunk": 64}, {"type": "lsh", "buckets": 1, "chunk": SHORT_CONTEXT // 2}
)
PATTERNS = {
    "dense": Pattern(DENSE),
    **{
        f"window {size:,}": Pattern({"type": "local", "window": size})
        for size in (128, 512, 1_024, 2_048, 4_096, 8_192)
    },
    **{
        f"fixed {stride:,}, summary {size}": Pattern({"type": "fixed", "stride": stride, "summary": size})
        for stride, size in ((128, 64), (2_048, 256))
    },
    "strided 128": Pattern({"type": "strided", "stride": 128}),
    "strided 128, aligned": Pattern({"type": "strided", "stride": 128, "align": "target"}),
    "dilated 256 by 8": Pattern({"type": "local", "window": 256, "dilation": 8}),
    "delta rule": Pattern({"type": "delta"}, {"type": "delta"}),
    "delta rule, no decay": Pattern({"type": "delta", "decay": False}, {"type": "delta", "decay": False}),
    "routing": Pattern({"type": "routing", "clusters": 32, "window": 256, "shared_query_key": False, "decay": 0.95}),
    "hashing": HASHED,
    **{
        f"MoBA {block}, top {top}": Pattern({"type": "moba", "block": block, "top": top})
        for block, top in ((2, 16), (16, 8), (16, 16), (64, 3))
    },
    **{  # dense in short contexts, without its loss
        f"indexer, 256 keys, blocks of {block}": Pattern(
            {"type": "indexed", "keys": 256, "block": block, "window": 64},
            {"type": "indexed", "keys": SHORT_CONTEXT, "loss_weight": 0},
        )
        for block in (1, 16)
    },
    **{
        f"match {order}": Pattern({"type": "match", "window": 256, "order": order, "matches": matches})
        for order, matches in ((3, 16), (4, 32), (6, 16), (20, 4))
    },
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS), metavar="PATTERN")
    parser.add_argument(
        "--seconds",
        type=positive(float),
        nargs=3,
        metavar="S",
        default=[9.0, 17.0, 12.0],
        help="of the lesson, short and long contexts",
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--context", type=int, help="instead of the task's")
    parser.add_argument("--parallel", type=int, default=2, help="trainings at once, each on a core of its own")
    options = parser.parse_args(arguments)
    versions = [path.name for path in version_folders()]
    open_rows(options, "reach", about(best_device()) | {"threads": 1, "versions": versions})
    os.environ["OMP_NUM_THREADS"] = "1"  # of libraries that torch.set_num_threads does not reach
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.parallel, processes, torch.set_num_threads, (1,)) as pool:
        units = itertools.product(range(options.seeds), options.tasks)
        futures = [pool.submit(run_unit, task, seed, options.patterns, options) for seed, task in units]
        for future in futures:
            future.result()
    return 0


def run_unit(task_name: str, seed: int, names: Sequence[str], options: argparse.Namespace) -> None:
    """Train the rows of a task and seed that the result file lacks. Those with equal first stages share them."""
    task = TASKS[task_name]
    context = options.context or task.context
    beginnings: dict[str, list[Progress]] = {}
    for name in names:
        row = {"task": task_name, "context": context, "pattern": name, "seed": seed, "seconds": options.seconds}
        if has_row(options.output, row):
            continue
        try:
            *first, last = stages(task, context, PATTERNS[name], options.seconds)
            ModelConfig.model_validate(last.model)
        except ConfigError as error:
            print(f"{name}: skipped: {error}", flush=True)
            continue
        whole = sum(stage.seconds for stage in (*first, last))
        key = json.dumps([stage.model for stage in first])
        if key not in beginnings:
            beginnings[key] = []
            for stage in first:
                before = beginnings[key][-1] if beginnings[key] else None
                beginnings[key].append(trained(stage, TRAIN, seed, whole, before)[1])
        network, end = trained(last, TRAIN, seed, whole, beginnings[key][-1] if first else None)
        parts = (*beginnings[key], end)
        row |= {
            "steps": [part.steps for part in parts],
            "seconds_per_step": [rounded(part.seconds_per_step) for part in parts],
            "pairs": sum(mixer.work(context, 1).pairs for mixer in network.mixers[1:]),
            "solved_at": solved_at(end.curve, task.floor),
        } | score(task, network, EVALUATED)
        append_row(options.output, row)


def stages(task: Task, context: int, pattern: Pattern, seconds: Sequence[float]) -> list[Stage]:
    """Return the stages of a run: the lesson, short contexts of a text, and long contexts.

    If the distance is always the same, there are only long contexts, and the network is the demo's.
    """
    lesson, short, long = seconds
    demo, ngrams, window = preset("demo")["model"], {}, WINDOW
    model = changed(demo, {"ngrams": None, "layers": 2})
    if task.floor is None:
        model, ngrams = model | MODEL, {"ngrams": demo["ngrams"] | {"rows": TABLE_ROWS}}
    elif task.varies:  # without rotations, and with a window that the lesson exceeds, copying reaches far at once
        model, window = changed(model, {"rotary": None}), NARROW

    def stage(task: Task, context: int, seconds: float, attention: Mapping[str, Any], tables: dict[str, Any]) -> Stage:
        content = model | tables | {"context": context, "attention": [window, attention]}
        if attention["type"] == "lsh":  # has keys of unit length
            content["query_key_norm"] = False
        if attention["type"] == "delta":  # has a convolution
            content["convolution"] = None
        return Stage(task, content, max(1, STEP_BYTES // context), seconds)

    if not task.varies:
        return [stage(task, context, lesson + long, pattern.long, {})]
    first = stage(lesson_of(task), LESSON_CONTEXT, lesson, pattern.short, {})
    middle = [stage(task, SHORT_CONTEXT, short, pattern.short, ngrams)] if ngrams else []
    return [first, *middle, stage(task, context, long, pattern.long, ngrams)]


Rows = dict[str, list[dict[str, Any]]]  # by pattern


def rows_of(result: dict[str, Any], task: str, context: int) -> Rows:
    """Return the rows of a task by pattern, in the order of ``PATTERNS``: those of its longest runs."""
    rows = [row for row in result["rows"] if (row["task"], row["context"]) == (task, context)]
    if not rows:
        return {}
    longest = max(row["seconds"] for row in rows)
    by_pattern = {name: [r for r in rows if (r["pattern"], r["seconds"]) == (name, longest)] for name in PATTERNS}
    return {name: runs for name, runs in by_pattern.items() if runs}


def tables(result: dict[str, Any]) -> str:
    """Format one device's result: a table of the tasks with a floor, and one of texts."""
    text = f"{result['device']}, one thread, torch {result['torch']}, {result['date']}.\n"
    contexts = sorted({row["context"] for row in result["rows"]})
    for has_floor in (True, False):
        names = [name for name, task in TASKS.items() if (task.floor is not None) == has_floor]
        columns: list[tuple[str, Rows, Callable[[Sequence[dict[str, Any]]], str]]] = []
        for context in contexts:
            for name in names:
                rows = rows_of(result, name, context)
                columns.append((title(name, rows) if rows else name, rows, bits))
            if not has_floor and columns:
                costs = {pattern: runs for _, rows, _ in columns[-len(names) :] for pattern, runs in rows.items()}
                columns.append(("ms a step", costs, milliseconds))
        columns = [column for column in columns if column[1]]
        lines = [
            [pattern, *(form(rows[pattern]) if pattern in rows else "" for _, rows, form in columns)]
            for pattern in PATTERNS
            if any(pattern in rows for _, rows, _ in columns)
        ]
        if lines:
            text += "\n" + markdown(["pattern", *(title for title, _, _ in columns)], lines)
    return text


def title(task: str, rows: Rows) -> str:
    """Name a task with its context and the seconds of a run."""
    run = next(iter(rows.values()))[0]
    lesson, short, long = run["seconds"]
    return f"{task} ({run['context']:,}; {lesson + (short if TASKS[task].floor is None else 0) + long:g} s)"


def bits(runs: Sequence[dict[str, Any]]) -> str:
    """Format bits per scored byte, with the least and the most of several seeds.

    A task with a floor shows after how many steps at full length each seed solved it. A text shows the bits of the
    first and the last section of a context.
    """
    values = [run["bits"] for run in runs]
    if TASKS[runs[0]["task"]].floor is not None:
        solved = [str(run["solved_at"]) for run in runs if run["solved_at"] is not None]
        return f"{statistics.fmean(values):.2f}" + (f", {'/'.join(solved)} steps" if solved else "")
    text = f"{statistics.fmean(values):.3f}" + (f" ({min(values):.3f}–{max(values):.3f})" if len(values) > 1 else "")
    if runs[0]["by_position"][0] is not None:
        first, last = (statistics.fmean(run["by_position"][place] for run in runs) for place in (0, -1))
        text += f", {first:.2f}→{last:.2f}"
    return text


def milliseconds(runs: Sequence[dict[str, Any]]) -> str:
    """Format the processor time of a step at full length."""
    return f"{cost(runs):.0f}"


def cost(runs: Sequence[dict[str, Any]]) -> float:
    """Return the milliseconds of a step at full length: the mean over seeds."""
    return 1_000 * statistics.fmean(run["seconds_per_step"][-1] for run in runs)


def drawing(result: dict[str, Any]) -> str:
    """Draw bits per scored byte against the cost of a step for each text."""
    panels = {}
    for task, context in DRAWN:
        rows = rows_of(result, task, context)
        panels[f"{task}, contexts of {context:,}"] = [
            Point(name, cost(runs), [run["bits"] for run in runs]) for name, runs in rows.items()
        ]
    return picture({title: points for title, points in panels.items() if points})


if __name__ == "__main__":
    sys.exit(main())
