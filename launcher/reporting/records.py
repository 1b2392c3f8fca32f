"""What a run folder tells of its run. Old runs lack some of it, and damaged files are told and left out."""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longstride.data_pipelines.plain_files import JSONError, parse_json, read_plain
from longstride.kernels import ConfigError
from longstride.launcher.config import load_json_object
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
MOST_EVENTS = 200  # that a page lists of a run
_MOST_NAME_CHARACTERS = 100  # of a split
_MOST_FILES = 1000  # of a kind that are opened
_MOST_RECORD_BYTES = 2**24
_MOST_SAMPLE_BYTES = 2**20
_LEAST, _MOST = 1e-100, 1e100  # of a number
_SAMPLE = re.compile(r"step-(\d{8,18})\.(txt|png|wav)")
_INCIDENT = re.compile(r"step-\d{8,18}(-\d+)?\.json")


@dataclass
class Series:
    """Values over steps, in the order of the steps; all finite."""

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
    text: str


@dataclass(frozen=True)
class Sample:
    """What the model made in training."""

    step: int
    kind: str  # txt, png, wav
    content: bytes


@dataclass
class RunRecord:
    """All that a report shows of a run."""

    folder: Path
    changed: float = 0.0  # seconds since 1970: when its newest line was written
    unit: str = "bits per byte"
    train: dict[str, Series] = field(default_factory=dict)  # by measure; the loss as "bits"
    evaluations: dict[str, Series] = field(default_factory=dict)  # bits by split
    config: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    positions: list[dict[str, Any]] = field(default_factory=list)  # as `evaluate --positions` writes them
    notices: list[str] = field(default_factory=list)  # what could not be read

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.resolve().name

    @property
    def train_is_plain(self) -> bool:
        """Whether nothing scales the loss, so that its scale is 1 throughout."""
        scales = self.train.get("loss_scale")
        return scales is None or bool((scales.values == 1.0).all())

    @property
    def last_step(self) -> int:
        """The newest that has a line."""
        every = [*self.train.values(), *self.evaluations.values()]
        return max((int(series.steps[-1]) for series in every if len(series)), default=0)

    @property
    def is_evaluated(self) -> bool:
        """Whether it evaluates, as far as its configuration tells."""
        train = self.config.get("train")
        return not isinstance(train, dict) or train.get("evaluate_every", 0) is not None

    def setting(self, path: str) -> Any:
        """A value of the configuration by its dotted path; None where there is none."""
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def read_run(folder: Path) -> RunRecord:
    """Reads a run folder.

    Raises:
        ConfigError: there is no run, or it has no line yet.
    """
    if not folder.is_dir():
        rule = "is a file; name the folder around it" if folder.exists() else "there is no such folder"
        raise ConfigError(f"{folder}: {rule}; such as runs/demo")
    record = RunRecord(folder)
    try:
        _read_metrics(record)
        record.changed = (folder / file_names.METRICS).stat().st_mtime
    except OSError as error:
        raise ConfigError(f"{folder / file_names.METRICS}: cannot be read: {error.strerror}") from None
    try:
        record.config = load_json_object(folder / file_names.CONFIG)
    except ConfigError as error:
        record.notices += str(error).splitlines()
    _read_incidents(record)
    _read_starts(record)
    _read_samples(record)
    for path in sorted(folder.glob("*.json"))[:_MOST_FILES]:
        if path.name not in (file_names.CONFIG, file_names.DATA) and (
            found := read_positions(path, follow_links=False)
        ):
            record.positions.append(found)
    record.events.sort(key=lambda event: event.step)
    return record


def read_positions(path: Path, *, follow_links: bool = True) -> dict[str, Any] | None:
    """The loss by position that `longstride evaluate --positions` has written; None where the file has none."""
    try:
        content = parse_json(read_plain(path, _MOST_RECORD_BYTES, follow_links=follow_links))
        positions = content["positions"]
        name = next(name for name in ("bits_per_byte", "bits_per_pixel") if name in positions)
        counts = positions["bytes" if name == "bits_per_byte" else "tokens"]
        rows = zip(positions["first"], positions["end"], counts, positions[name], strict=True)
        bins = [(int(first), int(end), int(count), float(bits)) for first, end, count, bits in rows if bits is not None]
        good = all(
            0 <= first < end <= 2**31 and 0 < count < 2**62 and abs(bits) < _MOST for first, end, count, bits in bins
        )
        step, split = int(content["step"]), str(content["split"])[:_MOST_NAME_CHARACTERS]
    except (OSError, JSONError, KeyError, TypeError, ValueError, OverflowError, StopIteration):
        return None
    described = {
        "run": Path(str(content.get("run", path))).name[:_MOST_NAME_CHARACTERS],
        "step": step,
        "split": split,
        "unit": name.replace("_", " "),
        "bins": bins,
    }
    return described if bins and good else None


def _read_metrics(record: RunRecord) -> None:
    """The curves, and what lines tell beside their numbers."""
    steps, columns = array("q"), {name: array("d") for name in ("bits", *MEASURES)}
    evaluations: dict[str, dict[int, float]] = {}
    passed_over, lines, skipped = 0, 0, 0.0
    replaced: list[tuple[int, list[str]]] = []
    for line in metrics_file.read_lines(record.folder):
        if not line:
            passed_over += 1
            continue
        step, split = line["step"], line["split"][:_MOST_NAME_CHARACTERS]
        record.unit, bits = metrics_file.bits_of(line)
        lines += 1
        if not metrics_file.is_step(line):
            if len(evaluations) < 8 or split in evaluations:
                evaluations.setdefault(split, {})[step] = _number(bits)
            continue
        steps.append(step)
        columns["bits"].append(_number(bits))
        line["content"] = metrics_file.content_of(line)
        for name in MEASURES:
            columns[name].append(_number(line.get(name)))
        count = _number(line.get("skipped_steps"))
        if count > skipped and "guard" not in line:
            many = int(count - skipped)
            text = "gradients overflowed; the step was dropped and the loss scale halved"
            record.events.append(Event(step, "skipped", text if many == 1 else f"{many} steps since the line before"))
        skipped = count if math.isfinite(count) else skipped
        if "guard" in line:
            record.events.append(Event(step, "guard", str(line["guard"])))
        if isinstance(line.get("substitutions"), list) and line["substitutions"]:
            replaced.append((step, [str(each) for each in line["substitutions"]]))
    if not lines and not (record.folder / file_names.METRICS).exists():
        rule = f"holds no run: it has no {file_names.METRICS}; name a folder that `longstride train` wrote"
        raise ConfigError(f"{record.folder}: {rule}")
    if not lines:
        raise ConfigError(f"{record.folder / file_names.METRICS}: holds no line yet; wait for the first step")
    if passed_over:
        record.notices.append(f"{file_names.METRICS}: lines that are no measurement were left out: {passed_over:,}")
    for step, texts in replaced:
        more = f", and {len(texts) - 1} more" if len(texts) > 1 else ""
        record.events.append(Event(step, "data", f"damaged data was replaced: {texts[0]}{more}"))
    order = np.argsort(np.asarray(steps), kind="stable")
    ordered = np.asarray(steps)[order]
    for name, column in columns.items():
        values = np.asarray(column)[order]
        here = np.isfinite(values)
        if here.any():
            record.train[name] = Series(ordered[here], values[here])
    for split, values_by_step in evaluations.items():
        pairs = sorted((step, bits) for step, bits in values_by_step.items() if math.isfinite(bits))
        if pairs:
            record.evaluations[split] = Series(*(np.asarray(column) for column in zip(*pairs, strict=True)))


def _number(value: object) -> float:
    """A number as a float; anything else, and what no run measures, as nan."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    if not _LEAST < abs(number) < _MOST:  # what no chart has a scale for
        return 0.0 if abs(number) <= _LEAST else math.nan
    return number


def _read_incidents(record: RunRecord) -> None:
    """The steps that a guard refused, by the files that it left; they tell more than the lines of the same steps."""
    folder = record.folder / file_names.GUARDS
    told: set[tuple[int, str]] = set()  # by lines as well
    incidents = []
    for path in sorted(each for each in folder.glob("*.json") if _INCIDENT.fullmatch(each.name))[:_MOST_FILES]:
        try:
            incident = load_json_object(path, follow_links=False)
            step, outcome = int(incident["step"]), f"{incident['outcome']}: {incident['reason']}"
            back = incident.get("rewound_to")
            text = outcome if back is None else f"{outcome}; back to step {int(back):,}"
        except (ConfigError, KeyError, TypeError, ValueError):
            record.notices.append(f"{file_names.GUARDS}/{path.name}: cannot be read")
            continue
        told.add((step, outcome))
        incidents.append(Event(step, "guard", text))
    lines = [each for each in record.events if each.kind != "guard" or (each.step, each.text) not in told]
    record.events = lines + incidents


def _read_starts(record: RunRecord) -> None:
    path = record.folder / file_names.STARTS
    try:
        texts = read_plain(path, _MOST_RECORD_BYTES, follow_links=False).splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        record.notices.append(f"{file_names.STARTS}: cannot be read: {error.strerror}")
        return
    for text in filter(None, texts):
        try:
            start = parse_json(text)
            record.starts.append({**start, "step": int(start["step"])})
        except (JSONError, KeyError, TypeError, ValueError):
            record.notices.append(f"{file_names.STARTS}: a line that is no start was left out")


def _read_samples(record: RunRecord) -> None:
    found = [
        (int(match[1]), match[2], path)
        for path in (record.folder / file_names.SAMPLES).glob("step-*")
        if (match := _SAMPLE.fullmatch(path.name))
    ]
    for step, kind, path in thinned(sorted(found, key=lambda each: each[:2])):
        try:
            record.samples.append(Sample(step, kind, read_plain(path, _MOST_SAMPLE_BYTES, follow_links=False)))
        except OSError as error:
            record.notices.append(f"{file_names.SAMPLES}/{path.name}: cannot be shown: {error.strerror}")


def thinned(items: list[Any], most: int = 8) -> list[Any]:
    """At most so many, evenly spread from the first to the last."""
    if len(items) <= most:
        return items
    return [items[each] for each in np.linspace(0, len(items) - 1, most).round().astype(int)]
