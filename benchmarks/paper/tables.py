"""The tables and the picture of a result file of benchmarks/paper/paper.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.cases import IMAGES, PATTERNS, TEXT
from benchmarks.report import markdown

SKIPPED = 0.1  # of the steps: losses fall so far at first that later differences could not be seen
# The paper's Table 2: bits per byte, and seconds of a training iteration; enwik8 and CIFAR-10.
PAPER: dict[str, tuple[str, dict[str, tuple[float, float]]]] = {
    TEXT: ("enwik8", {"dense": (1.00, 1.31), "fixed": (0.99, 0.55), "strided": (1.13, 0.35)}),
    IMAGES: ("CIFAR-10", {"dense": (2.82, 0.54), "fixed": (2.85, 0.47), "strided": (2.80, 0.38)}),
}


def section(result: dict[str, Any]) -> str:
    """Format one device's part of docs/results.md."""
    picture = f"![training curves on {result['device']}](../benchmarks/results/{result['name']}.png)\n"
    return "\n".join([*tables_of(result), picture])


def tables_of(result: dict[str, Any]) -> list[str]:
    """Format one device's paragraphs and tables: what ran, Table 2, the order of the patterns, and Table 3."""
    parts = [
        f"**{result['device']}**, {result['threads']} threads, torch {result['torch']}, {result['dtype']}, "
        f"{result['date']}: `--size {result['size']}`, {result['seconds'] / 60:.0f} minutes in all.\n",
        *(case_line(case, runs_of(result, name)) for name, case in result["cases"].items() if runs_of(result, name)),
        table_2(result),
        *(order_line(name, runs_of(result, name)) for name in result["cases"] if runs_of(result, name)),
    ]
    return parts + ([table_3(result)] if result["minimum_contexts"] else [])


def runs_of(result: dict[str, Any], dataset: str, pattern: str | None = None) -> list[dict[str, Any]]:
    """Select the runs on a data set, with one pattern or with all."""
    return [run for run in result["runs"] if run["dataset"] == dataset and pattern in (None, run["pattern"])]


def case_line(case: dict[str, Any], runs: Sequence[dict[str, Any]]) -> str:
    """Describe one data set's models and their training."""
    run = runs[0]
    return (
        f"- {case['name']} ({case['source']}): n = {case['context']:,}, l = {case['stride']}, c = {case['summary']}; "
        f"{case['layers']} layers, {case['heads']} heads, width {case['width']}, {run['parameters']:,} parameters; "
        f"{run['steps']:,} steps of {run['bytes_trained'] // run['steps']:,} bytes; "
        f"scored on {run['held_out_bytes']:,} bytes.\n"
    )


def table_2(result: dict[str, Any]) -> str:
    """Format bits per byte and seconds a step, by data set and pattern, with the paper's."""
    columns = ["data", "pattern", "bits per byte", "seconds a step", "speed", "seeds", "the paper's", "its speed"]
    lines = []
    for dataset in result["cases"]:
        for pattern in PATTERNS:
            runs = runs_of(result, dataset, pattern)
            if runs:
                seconds = statistics.fmean(run["seconds_per_step"] for run in runs)
                cells = [dataset, pattern, spread([run["bits_per_byte"] for run in runs]), f"{seconds:.3f}"]
                cells += [f"{times_dense(result, runs):.2f}×", str(len(runs)), *paper_cells(dataset, pattern)]
                lines.append(cells)
    return markdown(columns, lines)


def table_3(result: dict[str, Any]) -> str:
    """Format bits per byte by minimum context, of one data set's model with one pattern."""
    first = result["minimum_contexts"][0]
    title = (
        f"The {first['pattern']} {first['dataset']} models on the same {first['bytes']:,} held-out bytes, "
        "of which each sees at least so many earlier ones:\n\n"
    )
    lines = []
    for minimum in sorted({row["minimum_context"] for row in result["minimum_contexts"]}):
        bits = [row["bits_per_byte"] for row in result["minimum_contexts"] if row["minimum_context"] == minimum]
        lines.append([f"{minimum:,}", spread(bits), str(len(bits))])
    return title + markdown(["minimum context", "bits per byte", "seeds"], lines)


def order_line(dataset: str, runs: Sequence[dict[str, Any]]) -> str:
    """Compare the order of the patterns by bits with the paper's order."""
    bits = {p: statistics.fmean(run["bits_per_byte"] for run in runs if run["pattern"] == p) for p in PATTERNS}
    name, theirs = PAPER[dataset]
    orders = (sorted(bits, key=bits.__getitem__), sorted(theirs, key=lambda pattern: theirs[pattern][0]))
    ours, papers = (" < ".join(order) for order in orders)
    return f"Bits per byte on {dataset}: {ours}; the paper's on {name}: {papers}.\n"


def times_dense(result: dict[str, Any], runs: Sequence[dict[str, Any]]) -> float:
    """Return how many times faster than dense attention a pattern's step was: the mean over seeds of the ratio."""
    dense = {run["seed"]: run["seconds_per_step"] for run in runs_of(result, runs[0]["dataset"], "dense")}
    return statistics.fmean(dense[run["seed"]] / run["seconds_per_step"] for run in runs)


def paper_cells(dataset: str, pattern: str) -> list[str]:
    """Return the paper's bits per byte on its own data set, and the speed of its iteration relative to dense."""
    name, theirs = PAPER[dataset]
    bits, seconds = theirs[pattern]
    return [f"{bits:.2f} ({name})", f"{theirs['dense'][1] / seconds:.2f}×"]


def spread(values: Sequence[float]) -> str:
    """Format the mean, and the least and the most of several values."""
    mean = f"{statistics.fmean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.4f}–{max(values):.4f})"


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw a panel for each data set: training bits as thin lines, their mean as a thick one, held-out bits as dots."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in result["cases"] if any(run["dataset"] == name for run in result["runs"])]
    figure, panels = plt.subplots(1, len(names), figsize=(5.4 * len(names), 4.2), layout="constrained", squeeze=False)
    colours = dict(zip(PATTERNS, plt.get_cmap("tab10").colors, strict=False))
    for axes, name in zip(panels[0], names, strict=True):
        for pattern in PATTERNS:
            runs = [run for run in result["runs"] if run["dataset"] == name and run["pattern"] == pattern]
            if runs:
                draw(axes, runs, pattern, colours[pattern])
        case = result["cases"][name]
        axes.set_title(f"{name}: n = {case['context']:,}, {case['layers']} layers of {case['width']}", fontsize=10)
        axes.set_xlabel("seconds of training (steps × the median step)")
        axes.set_ylabel("bits per byte")
        axes.grid(True, alpha=0.3)
        axes.legend(frameon=False, title="lines: training\ndots: held out", title_fontsize=8, fontsize=9)
    figure.suptitle(
        f"{result['device']}, torch {result['torch']}, {result['date']}: seeds thin, their mean thick", fontsize=11
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw(axes: Any, runs: list[dict[str, Any]], pattern: str, colour: Any) -> None:
    """Draw the runs with one pattern, which have their points at the same steps."""
    shown = [step > SKIPPED * runs[0]["steps"] for step, _ in runs[0]["training_curve"]]
    steps = [step for (step, _), keep in zip(runs[0]["training_curve"], shown, strict=True) if keep]
    lines = [[bits for (_, bits), keep in zip(run["training_curve"], shown, strict=True) if keep] for run in runs]
    for run, line in zip(runs, lines, strict=True):
        seconds = [step * run["seconds_per_step"] for step in steps]
        axes.plot(seconds, line, color=colour, linewidth=0.7, alpha=0.4)
        axes.plot(run["steps"] * run["seconds_per_step"], run["bits_per_byte"], "o", color=colour, markersize=4)
    a_step = statistics.fmean(run["seconds_per_step"] for run in runs)
    mean = [statistics.fmean(bits) for bits in zip(*lines, strict=True)]
    axes.plot([step * a_step for step in steps], mean, color=colour, linewidth=2, label=pattern)
