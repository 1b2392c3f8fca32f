"""`longstride show pattern|attention|loss`: the verbs, and the curves of metrics.jsonl for pictures and reports.

Metrics of old runs lack some of the measures.
"""

from __future__ import annotations

import argparse
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longstride.kernels import ConfigError
from longstride.launcher.files import check_new, write_new
from longstride.launcher.output import file_names, metrics_file, say
from longstride.launcher.verbs import TRUST_OPTION

MEASURES = (  # of a training line, without its loss
    "learning_rate",
    "grad_norm",
    "loss_scale",
    "tokens_per_second",
    "seconds",
    "mfu",
    "mfu_dense_equivalent",
    "peak_memory_bytes",
    "content",
)
MOST_NAME_CHARACTERS = 100  # of a split
MEAN_SHARE = 40  # a running mean covers one part in 40 of a run
_MOST_SPLITS = 8
_LEAST, _MOST = 1e-100, 1e100  # the range of numbers in a chart
LEAST_MEAN = 3  # lines under a running mean; a shorter run has none


@dataclass
class Series:
    """Finite values over ascending steps."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        """The newest value."""
        return float(self.values[-1])


@dataclass(frozen=True)
class Event:
    """An event at a step of a run."""

    step: int
    kind: str
    text: str = ""


@dataclass
class Metrics:
    """The curves and the events in a run's metrics.jsonl."""

    folder: Path
    changed: float = 0.0  # time of the newest line, in seconds since 1970
    unit: str = "bits per byte"
    train_split: str = "train"
    train: dict[str, Series] = field(default_factory=dict)  # by measure; the loss as "bits"
    evaluations: dict[str, Series] = field(default_factory=dict)  # bits by split
    events: list[Event] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)  # about lines and files that could not be read


def smoothed(series: Series, window: int) -> Series:
    """Return the running mean of each value and up to ``window - 1`` values before it."""
    total = np.concatenate([[0.0], np.cumsum(series.values)])
    last = np.arange(1, len(series) + 1)
    first = np.maximum(0, last - max(1, window))
    return Series(series.steps, (total[last] - total[first]) / (last - first))


def read_metrics(folder: Path) -> Metrics:
    """Read the curves of a run folder.

    Raises:
        ConfigError: there is no run, its metrics.jsonl cannot be read, or it has no line yet.
    """
    path, metrics = folder / file_names.METRICS, Metrics(folder)
    if not folder.is_dir():
        rule = "is a file; name the folder that contains it" if folder.exists() else "no such folder"
        raise ConfigError(f"{folder}: {rule}; such as runs/demo")
    try:
        num_lines = _read_lines(metrics)
        if not num_lines and not path.exists():
            rule = f"holds no run: it has no {file_names.METRICS}; name a folder that `longstride train` wrote"
            raise ConfigError(f"{folder}: {rule}")
        metrics.changed = path.stat().st_mtime
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not num_lines:
        raise ConfigError(f"{path}: is empty; wait for the first step")
    return metrics


def _read_lines(metrics: Metrics) -> int:
    """Fill in the curves and events; return the number of lines."""
    steps, columns = array("q"), {name: array("d") for name in ("bits", *MEASURES)}
    evaluations: dict[str, dict[int, float]] = {}
    num_lines, num_refused, skipped, longest = 0, 0, 0.0, 0.0
    replaced: list[Event] = []
    for line in metrics_file.read_lines(metrics.folder):
        if not line:
            num_refused += 1
            continue
        num_lines += 1
        step, split = line["step"], line["split"][:MOST_NAME_CHARACTERS]
        metrics.unit, bits = metrics_file.bits_of(line)
        if not metrics_file.is_step(line):
            if len(evaluations) < _MOST_SPLITS or split in evaluations:
                evaluations.setdefault(split, {})[step] = _number(bits)
            continue
        metrics.train_split = split
        steps.append(step)
        columns["bits"].append(_number(bits))
        line["content"] = metrics_file.content_of(line)
        for name in MEASURES:
            columns[name].append(_number(line.get(name)))
        if (context := _number(line.get("context"))) > longest:
            if longest:
                metrics.events.append(Event(step, "stage", f"contexts of {context:,.0f} from this step on"))
            longest = context
        count = _number(line.get("skipped_steps"))
        if count > skipped and "guard" not in line:
            text = "gradients overflowed; the step was dropped and the loss scale halved"
            if count - skipped > 1:
                text = f"{int(count - skipped)} steps since the line before"
            metrics.events.append(Event(step, "skipped", text))
        skipped = count if math.isfinite(count) else skipped
        if "guard" in line:
            metrics.events.append(Event(step, "guard", str(line["guard"])))
        if isinstance(texts := line.get("substitutions"), list) and texts:
            others = f", and {len(texts) - 1} more" if len(texts) > 1 else ""
            replaced.append(Event(step, "data", f"damaged data was replaced: {texts[0]}{others}"))
    metrics.events += replaced
    if num_refused:
        metrics.notices.append(f"{file_names.METRICS}: lines without a measurement were left out: {num_refused:,}")
    order = np.argsort(np.asarray(steps), kind="stable")
    for name, column in columns.items():
        values = np.asarray(column)[order]
        if (finite := np.isfinite(values)).any():
            metrics.train[name] = Series(np.asarray(steps)[order][finite], values[finite])
    for split, by_step in evaluations.items():
        pairs = sorted((step, bits) for step, bits in by_step.items() if math.isfinite(bits))
        if pairs:
            metrics.evaluations[split] = Series(*(np.asarray(column) for column in zip(*pairs, strict=True)))
    return num_lines


def _number(value: object) -> float:
    """Return a number as a float; NaN for anything else, and for numbers outside of the range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    if not _LEAST < abs(number) < _MOST:
        return 0.0 if abs(number) <= _LEAST else math.nan
    return number


def run_pattern(arguments: argparse.Namespace) -> int:
    """Run `show pattern`; return its exit code."""
    source, query = arguments.source, arguments.query
    if arguments.output is None and arguments.html is None:
        raise ConfigError("--output: is missing; such as --output pattern.png, or --html pattern.html for a page")
    if arguments.trust_checkpoint and arguments.text is None:
        raise ConfigError(f"{TRUST_OPTION}: only --text FILE reads a checkpoint; leave it out")
    if arguments.html is not None and arguments.text is not None:
        raise ConfigError(f"--text={arguments.text}: a page has no text; draw --output FILE.png, and leave out --html")
    from longstride.launcher.drawing.pattern import draw_pattern
    from longstride.launcher.drawing.pattern_page import pattern_page

    for option, output, suffix in (("--output", arguments.output, ".png"), ("--html", arguments.html, ".html")):
        if output is not None:
            check_new(output, option, suffix)
    if arguments.html is not None:
        write_new(arguments.html, pattern_page(source, query).encode(), "--html")
        print(arguments.html)
    if arguments.output is not None:
        trusted = arguments.trust_checkpoint
        _save(arguments.output, lambda: draw_pattern(source, query, arguments.text, trusted=trusted))
    return 0


def _save(output: Path, draw: Callable[[], Any]) -> int:
    """Draw a figure into a new file, print its path, and return the exit code."""
    from longstride.launcher.pictures import save_picture

    check_new(output, "--output", ".png")
    save_picture(draw(), output)
    print(output)
    return 0


def run_attention(arguments: argparse.Namespace) -> int:
    """Run `show attention`; return its exit code."""
    from longstride.launcher.drawing.attention import draw_attention

    names = ("source", "step", "context_number", "head", "weights", "data", "text")
    options = {name: getattr(arguments, name) for name in names}
    queries, trusted = arguments.query, arguments.trust_checkpoint
    return _save(arguments.output, lambda: draw_attention(**options, queries=queries, trusted=trusted))


def run_loss(arguments: argparse.Namespace) -> int:
    """Run `show loss`; return its exit code."""
    return _save(arguments.output, lambda: draw_loss(arguments.source))


def draw_loss(run_folder: Path) -> Any:
    """Draw the bits per byte over the steps of a run, training and held-out.

    Raises:
        ConfigError: there is no run, or its metrics.jsonl cannot be read or holds no line yet.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    from longstride.launcher.pictures import LINES, curves, styled

    metrics = read_metrics(run_folder)
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
