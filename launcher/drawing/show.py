"""`longstride show pattern CONFIG`, `show attention RUN|MODEL`, `show loss RUN`: the verbs, and a loss drawn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longstride.kernels import ConfigError
from longstride.launcher.output import file_names, metrics_file, say
from longstride.launcher.verbs import TRUST_OPTION

MEAN_SHARE = 40  # the running mean of the training loss covers this part of the run
LEAST_MEAN = 3  # lines that a running mean is over, at least: a shorter run has none


def _source(arguments: argparse.Namespace, metavar: str) -> Path:
    """The source, from where it stands; ConfigError unless there is one."""
    given: list[Path] = [each for each in (arguments.source, arguments.behind) if each is not None]
    if len(given) != 1:
        many = "is missing" if not given else f"is given twice, {given[0]} and {given[1]}"
        raise ConfigError(f"{metavar} {many}; give it once")
    return given[0]


def run_pattern(arguments: argparse.Namespace) -> int:
    """Runs `show pattern`; returns its exit code.

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
    """Runs `show attention`; returns its exit code.

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
    """Runs `show loss`; returns its exit code.

    Raises:
        ConfigError: the run has no measurements yet, or a file cannot be written.
    """
    from longstride.launcher.pictures import check_output, save_picture

    check_output(arguments.output)
    save_picture(draw_loss(arguments.source), arguments.output)
    print(arguments.output)
    return 0


def draw_loss(run_folder: Path) -> Any:
    """Bits per byte over the steps of a run, training and held-out, from its metrics.jsonl.

    Raises:
        ConfigError: there is no run, or its metrics.jsonl cannot be read or holds no line yet.
    """
    from longstride.launcher.pictures import LINES, curves, styled

    if not run_folder.is_dir():
        rule = "is a file; name the folder around it" if run_folder.exists() else "there is no such folder"
        raise ConfigError(f"{run_folder}: {rule}; such as runs/demo")
    if not (run_folder / file_names.METRICS).exists():
        rule = f"holds no run: it has no {file_names.METRICS}; name a folder that `longstride train` wrote"
        raise ConfigError(f"{run_folder}: {rule}")
    points: dict[tuple[bool, str], list[tuple[int, float]]] = {}  # of each curve: steps, or evaluations, of a split
    unit, refused = "", 0
    try:
        for line in metrics_file.read_lines(run_folder):
            refused += not line
            if line:
                unit, bits = metrics_file.bits_of(line)
                curve = points.setdefault((metrics_file.is_step(line), line["split"]), [])
                if bits is not None:  # null of a step whose loss was no number
                    curve.append((line["step"], bits))
    except OSError as error:
        raise ConfigError(f"{run_folder / file_names.METRICS}: cannot be read: {error.strerror}") from None
    if not points:
        raise ConfigError(f"{run_folder / file_names.METRICS}: holds no line yet; wait for the first step")
    if refused:
        say(f"notice: {file_names.METRICS}: lines that are no measurement were left out: {refused:,}")
    ends: list[str] = []  # what each split ended at
    drawn: list[float] = []
    with styled():
        figure, axis = curves()
        for (of_steps, split), curve in points.items():
            if not curve:
                continue
            steps, losses = map(list, zip(*curve, strict=True))
            drawn += losses
            if not of_steps:
                ends.append(f"{split} {losses[-1]:.3f} at step {steps[-1]:,}")
                axis.plot(steps, losses, marker="o", markersize=4, color=LINES[1], label=split)
                continue
            window = len(losses) // MEAN_SHARE
            if window < LEAST_MEAN:
                axis.plot(steps, losses, color=LINES[0], label=split)
                continue
            # Single batches are noisy: they stand pale behind their running mean.
            axis.plot(steps, losses, linewidth=0.6, alpha=0.35, color=LINES[0], label=split)
            axis.plot(steps, running_mean(losses, window), color=LINES[0], label=f"{split}, mean of {window} lines")
        _scale(axis, drawn)
        axis.set(xlabel="step", ylabel=unit)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_title(" · ".join([run_folder.resolve().name, *ends]))
        if drawn:
            axis.legend()
    return figure


def _scale(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis, on which late progress shows, where values allow it and lie far enough apart."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if not values or min(values) <= 0 or max(values) < 2 * min(values):
        return
    axis.set_yscale("log", base=2)
    subs = (1.0, 1.5) if max(values) > 4 * min(values) else (1.0, 1.25, 1.5, 1.75)
    axis.yaxis.set_major_locator(LogLocator(base=2, subs=subs))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:.3g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def running_mean(values: list[float], window: int) -> list[float]:
    """The mean of each value and up to ``window - 1`` before it."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(0, last - max(1, window))
    return ((total[last] - total[first]) / (last - first)).tolist()
