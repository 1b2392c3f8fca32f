"""`longstride show pattern CONFIG`, `show attention RUN|MODEL`, `show loss RUN`: the verbs, and a loss drawn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longstride.data_pipelines.plain_files import parse_json, read_plain
from longstride.kernels import ConfigError
from longstride.launcher.options import TRUST_OPTION
from longstride.launcher.output import file_names, metrics_file

MOST_METRICS_BYTES = 1 << 29  # three million lines
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
        ConfigError: there is no run, or as ``read_metrics``.
    """
    from longstride.launcher.pictures import LINES, curves, styled

    if not run_folder.is_dir():
        rule = "is a file; name the folder around it" if run_folder.exists() else "there is no such folder"
        raise ConfigError(f"{run_folder}: {rule}; such as runs/demo")
    if not (run_folder / file_names.METRICS).exists():
        rule = f"holds no run: it has no {file_names.METRICS}; name a folder that `longstride train` wrote"
        raise ConfigError(f"{run_folder}: {rule}")
    lines = read_metrics(run_folder / file_names.METRICS)
    ends: list[str] = []  # what each split ended at
    drawn: list[float] = []
    with styled():
        figure, axis = curves()
        for split in dict.fromkeys(line["split"] for line in lines):
            # A step whose loss was no number has null there.
            points = [line for line in lines if line["split"] == split and line["bits"] is not None]
            if not points:
                continue
            steps, bits = [line["step"] for line in points], [line["bits"] for line in points]
            drawn += bits
            if split != "train":
                ends.append(f"{split} {bits[-1]:.3f} at step {steps[-1]:,}")
                axis.plot(steps, bits, marker="o", markersize=4, color=LINES[1], label=split)
                continue
            window = len(bits) // MEAN_SHARE
            if window < LEAST_MEAN:
                axis.plot(steps, bits, color=LINES[0], label="train")
                continue
            # Single batches are noisy: they stand pale behind their running mean.
            axis.plot(steps, bits, linewidth=0.6, alpha=0.35, color=LINES[0], label="train")
            axis.plot(steps, running_mean(bits, window), color=LINES[0], label=f"train, mean of {window} lines")
        _scale(axis, drawn)
        axis.set(xlabel="step", ylabel=lines[-1]["unit"])
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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without a last one that a killed run left incomplete.

    Raises:
        ConfigError: the file cannot be read, holds no line yet, or a line that is no measurement.
    """
    try:
        texts = (
            read_plain(path, MOST_METRICS_BYTES, follow_links=False).decode(errors="replace").splitlines(keepends=True)
        )
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    lines = []
    for number, text in enumerate((text for text in texts if text.endswith("\n")), start=1):
        try:
            if len(text) > metrics_file.MOST_LINE_BYTES:
                raise ValueError
            line = parse_json(text)
            unit, bits = metrics_file.bits_of(line)
            if not (type(line["step"]) is int and isinstance(line["split"], str)) or isinstance(bits, str | bool):
                raise TypeError
            bits = None if bits is None else float(bits)
            lines.append({"step": line["step"], "split": line["split"], "unit": unit, "bits": bits})
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}: line {number}: must be an object with step, split, bits_per_byte") from None
    if not lines:
        raise ConfigError(f"{path}: holds no line yet; wait for the first step")
    return lines


def running_mean(values: list[float], window: int) -> list[float]:
    """The mean of each value and up to ``window - 1`` before it."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(0, last - max(1, window))
    return ((total[last] - total[first]) / (last - first)).tolist()
