"""The curves of metrics.jsonl, for the picture of a loss and for reports. Old runs lack some of them."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from longstride.kernels import ConfigError
from longstride.launcher.output import file_names, metrics_file

MEASURES = (  # of a training line, beside its loss
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
MEAN_SHARE = 40  # a running mean covers this part of a run
_MOST_SPLITS = 8
_LEAST, _MOST = 1e-100, 1e100  # a chart has a scale for numbers between these


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
    """Something that befell a run at a step."""

    step: int
    kind: str
    text: str = ""


@dataclass
class Metrics:
    """The curves of a run, and what befell it, as its metrics.jsonl has them."""

    folder: Path
    changed: float = 0.0  # seconds since 1970: when the newest line was written
    unit: str = "bits per byte"
    train_split: str = "train"
    train: dict[str, Series] = field(default_factory=dict)  # by measure; the loss as "bits"
    evaluations: dict[str, Series] = field(default_factory=dict)  # bits by split
    events: list[Event] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)  # what could not be read


def smoothed(series: Series, window: int) -> Series:
    """Return the means of each value and up to ``window - 1`` before it."""
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
        rule = "is a file; name the folder around it" if folder.exists() else "there is no such folder"
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
        raise ConfigError(f"{path}: holds no line yet; wait for the first step")
    return metrics


def _read_lines(metrics: Metrics) -> int:
    """Fill in the curves; return the number of lines."""
    steps, columns = array("q"), {name: array("d") for name in ("bits", *MEASURES)}
    evaluations: dict[str, dict[int, float]] = {}
    num_lines, num_refused, skipped = 0, 0, 0.0
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
            more = f", and {len(texts) - 1} more" if len(texts) > 1 else ""
            replaced.append(Event(step, "data", f"damaged data was replaced: {texts[0]}{more}"))
    metrics.events += replaced
    if num_refused:
        metrics.notices.append(f"{file_names.METRICS}: lines that are no measurement were left out: {num_refused:,}")
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
    """Return a number as a float; NaN for anything else, and for what no run measures."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    if not _LEAST < abs(number) < _MOST:
        return 0.0 if abs(number) <= _LEAST else math.nan
    return number
