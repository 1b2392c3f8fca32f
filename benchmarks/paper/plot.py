"""The picture of a result file of benchmarks/paper/paper.py: bits per byte over seconds of training."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.paper.cases import PATTERNS

SKIPPED = 0.1  # of the steps: losses fall so far at first that later differences could not be seen


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
