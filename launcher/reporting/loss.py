"""`longstride show loss RUN`: draw the loss of a run over its steps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from longstride.launcher.files import check_new
from longstride.launcher.output import say
from longstride.launcher.pictures import LINES, curves, save_picture, styled
from longstride.launcher.reporting.charts import MEAN_SHARE, smoothed
from longstride.launcher.reporting.records import read_curves

LEAST_MEAN = 3  # lines under a running mean; a shorter run has none


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return its exit code."""
    check_new(arguments.output, "--output", ".png")
    save_picture(draw_loss(arguments.source), arguments.output)
    print(arguments.output)
    return 0


def draw_loss(run_folder: Path) -> Any:
    """Draw the bits per byte over the steps of a run, training and held-out.

    Raises:
        ConfigError: there is no run, or its metrics.jsonl cannot be read or holds no line yet.
    """
    metrics = read_curves(run_folder)
    for notice in metrics.notices:
        say(f"notice: {notice}")
    loss = metrics.train.get("bits")
    with styled():
        figure, axis = curves()
        if loss is not None:
            split, window = metrics.train_split, len(loss) // MEAN_SHARE
            # Single batches are noisy: they are drawn pale behind their running mean.
            pale = {"linewidth": 0.6, "alpha": 0.35} if window >= LEAST_MEAN else {}
            axis.plot(loss.steps, loss.values, color=LINES[0], label=split, **pale)
            if pale:
                label = f"{split}, mean of {window} lines"
                axis.plot(loss.steps, smoothed(loss, window).values, color=LINES[0], label=label)
        for split, series in metrics.evaluations.items():
            axis.plot(series.steps, series.values, marker="o", markersize=4, color=LINES[1], label=split)
        drawn = [series.values for series in (loss, *metrics.evaluations.values()) if series is not None]
        if drawn:
            values = np.concatenate(drawn)
            if values.min() > 0 and values.max() >= 2 * values.min():  # a logarithmic axis shows late progress
                axis.set_yscale("log", base=2)
                subs = (1.0, 1.5) if values.max() > 4 * values.min() else (1.0, 1.25, 1.5, 1.75)
                axis.yaxis.set_major_locator(LogLocator(base=2, subs=subs))
                axis.yaxis.set_major_formatter(StrMethodFormatter("{x:.3g}"))
                axis.yaxis.set_minor_formatter(NullFormatter())
            axis.legend()
        axis.set(xlabel="step", ylabel=metrics.unit)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        ends = [f"{split} {curve.last:.3f} at step {curve.steps[-1]:,}" for split, curve in metrics.evaluations.items()]
        axis.set_title(" · ".join([run_folder.resolve().name, *ends]))
    return figure
