"""`longstride show pattern CONFIG`, `show attention RUN|MODEL`, `show loss RUN`: the verbs, and a loss drawn."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from longstride.kernels import ConfigError
from longstride.launcher.drawing.series import MEAN_SHARE, read_metrics, smoothed
from longstride.launcher.output import say
from longstride.launcher.verbs import TRUST_OPTION

LEAST_MEAN = 3  # lines that a running mean is over, at least: a shorter run has none


def _source(arguments: argparse.Namespace, metavar: str) -> Path:
    """Return the source, from where it stands; ConfigError unless there is one."""
    sources: list[Path] = [each for each in (arguments.source, arguments.behind) if each is not None]
    if len(sources) != 1:
        many = "is missing" if not sources else f"is given twice, {sources[0]} and {sources[1]}"
        raise ConfigError(f"{metavar} {many}; give it once")
    return sources[0]


def run_pattern(arguments: argparse.Namespace) -> int:
    """Run `show pattern`; return its exit code.

    Raises:
        ConfigError: the configuration, the query or the text does not fit, or a file cannot be written.
    """
    source = _source(arguments, "CONFIG")
    if arguments.output is None and arguments.html is None:
        raise ConfigError("--output: is missing; such as --output pattern.png, or --html pattern.html for a page")
    if arguments.query is not None and len(arguments.query) > 1:
        raise ConfigError(f"--query={arguments.query[1]}: a pattern is shown for one query; give one number")
    if arguments.trust_checkpoint and arguments.text is None:
        raise ConfigError(f"{TRUST_OPTION}: only --text FILE reads a checkpoint; leave it out")
    if arguments.html is not None and arguments.text is not None:
        raise ConfigError(f"--text={arguments.text}: a page has no text; draw --output FILE.png, and leave out --html")
    from longstride.launcher.drawing.pattern import draw_pattern
    from longstride.launcher.drawing.pattern_page import pattern_page
    from longstride.launcher.pictures import check_output, save_content, save_picture

    if arguments.output is not None:
        check_output(arguments.output)
    if arguments.html is not None:
        check_output(arguments.html, "--html", ".html")
    query = arguments.query[0] if arguments.query else None
    if arguments.html is not None:
        save_content(pattern_page(source, query).encode(), arguments.html, "--html")
        print(arguments.html)
    if arguments.output is not None:
        figure = draw_pattern(source, query, arguments.text, trusted=arguments.trust_checkpoint)
        save_picture(figure, arguments.output)
        print(arguments.output)
    return 0


def run_attention(arguments: argparse.Namespace) -> int:
    """Run `show attention`; return its exit code.

    Raises:
        ConfigError: there is no such checkpoint, head or query, nothing to read, or a file cannot be written.
        DataError: there is no such context, or data cannot be read.
    """
    from longstride.launcher.drawing.attention import draw_attention
    from longstride.launcher.pictures import check_output, save_picture

    source = _source(arguments, "RUN|MODEL")
    check_output(arguments.output)
    figure = draw_attention(
        source,
        arguments.step,
        arguments.context_number,
        arguments.head,
        arguments.query,
        arguments.weights,
        data=arguments.data,
        text=arguments.text,
        trusted=arguments.trust_checkpoint,
    )
    save_picture(figure, arguments.output)
    print(arguments.output)
    return 0


def run_loss(arguments: argparse.Namespace) -> int:
    """Run `show loss`; return its exit code.

    Raises:
        ConfigError: the run has no measurements yet, or a file cannot be written.
    """
    from longstride.launcher.pictures import check_output, save_picture

    check_output(arguments.output)
    save_picture(draw_loss(arguments.source), arguments.output)
    print(arguments.output)
    return 0


def draw_loss(run_folder: Path) -> Any:
    """Draw the bits per byte over the steps of a run, training and held-out.

    Raises:
        ConfigError: there is no run, or its metrics.jsonl cannot be read or holds no line yet.
    """
    from longstride.launcher.pictures import LINES, curves, styled

    metrics = read_metrics(run_folder)
    for notice in metrics.notices:
        say(f"notice: {notice}")
    loss = metrics.train.get("bits")
    with styled():
        figure, axis = curves()
        if loss is not None:
            split, window = metrics.train_split, len(loss) // MEAN_SHARE
            # Single batches are noisy: they stand pale behind their running mean.
            pale = {"linewidth": 0.6, "alpha": 0.35} if window >= LEAST_MEAN else {}
            axis.plot(loss.steps, loss.values, color=LINES[0], label=split, **pale)
            if pale:
                label = f"{split}, mean of {window} lines"
                axis.plot(loss.steps, smoothed(loss, window).values, color=LINES[0], label=label)
        for split, series in metrics.evaluations.items():
            axis.plot(series.steps, series.values, marker="o", markersize=4, color=LINES[1], label=split)
        drawn = [series.values for series in (loss, *metrics.evaluations.values()) if series is not None]
        if drawn:
            _scale(axis, np.concatenate(drawn))
            axis.legend()
        axis.set(xlabel="step", ylabel=metrics.unit)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        ends = [f"{split} {each.last:.3f} at step {each.steps[-1]:,}" for split, each in metrics.evaluations.items()]
        axis.set_title(" · ".join([run_folder.resolve().name, *ends]))
    return figure


def _scale(axis: Any, values: np.ndarray) -> None:
    """Make the axis logarithmic, on which late progress shows, where values allow it and lie far enough apart."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if values.min() <= 0 or values.max() < 2 * values.min():
        return
    axis.set_yscale("log", base=2)
    subs = (1.0, 1.5) if values.max() > 4 * values.min() else (1.0, 1.25, 1.5, 1.75)
    axis.yaxis.set_major_locator(LogLocator(base=2, subs=subs))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:.3g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
