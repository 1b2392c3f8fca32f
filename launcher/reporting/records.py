"""Reads a run folder for its report. Old runs lack some of it, and damaged files are reported and left out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longstride.data_pipelines.plain_files import JSONError, parse_json, read_plain
from longstride.kernels import ConfigError
from longstride.launcher.config import load_json_object
from longstride.launcher.drawing import MOST_NAME_CHARACTERS, Event, Metrics, read_metrics
from longstride.launcher.output import file_names

MOST_EVENTS = 200  # that a page lists of a run
_MOST_FILES = 1000  # of a kind that are opened
_MOST_RECORD_BYTES = 2**24
_MOST_SAMPLE_BYTES = 2**20
_MOST_BITS = 1e100
_SAMPLE = re.compile(r"step-(\d{8,18})\.(txt|png|wav)")
_INCIDENT = re.compile(r"step-\d{8,18}(-\d+)?\.json")


@dataclass(frozen=True)
class Sample:
    """What the model made in training."""

    step: int
    kind: str  # txt, png, wav
    content: bytes


@dataclass
class RunRecord(Metrics):
    """All that a report shows of a run."""

    config: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    positions: list[dict[str, Any]] = field(default_factory=list)  # as `evaluate --positions` writes them

    def median(self, measure: str) -> float | None:
        """Return the median of a measure over the steps that have a line; None where none has it."""
        series = self.train.get(measure)
        return None if series is None else float(np.median(series.values))

    def total(self, measure: str) -> float | None:
        """Return a measure summed over all steps, by its mean; None where no line has it."""
        series = self.train.get(measure)
        return None if series is None else float(series.values.mean()) * self.last_step

    @property
    def last_step(self) -> int:
        """The newest step that has a line."""
        every = [*self.train.values(), *self.evaluations.values()]
        return max((int(series.steps[-1]) for series in every if len(series)), default=0)

    @property
    def is_evaluated(self) -> bool:
        """Whether it evaluates, as far as its configuration tells."""
        train = self.config.get("train")
        return not isinstance(train, dict) or train.get("evaluate_every", 0) is not None

    def setting(self, path: str) -> Any:
        """Return a value of the configuration by its dotted path; None where there is none."""
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def read_run(folder: Path) -> RunRecord:
    """Read a run folder.

    Raises:
        ConfigError: there is no run, or it has no line yet.
    """
    record = RunRecord(**vars(read_metrics(folder)))
    try:
        record.config = load_json_object(folder / file_names.CONFIG)
    except ConfigError as error:
        record.notices += str(error).splitlines()
    _read_incidents(record)
    _read_starts(record)
    _read_samples(record)
    for path in sorted(folder.glob("*.json"))[:_MOST_FILES]:
        if path.name not in (file_names.CONFIG, file_names.DATA):
            positions = read_positions(path, follow_links=False)
            record.positions += [positions] if positions else []
    record.events.sort(key=lambda event: event.step)
    return record


def read_positions(path: Path, *, follow_links: bool = True) -> dict[str, Any] | None:
    """Read the loss by position that `longstride evaluate --positions` wrote; None where the file has none."""
    try:
        content = parse_json(read_plain(path, _MOST_RECORD_BYTES, follow_links=follow_links))
        positions = content["positions"]
        name = next(name for name in ("bits_per_byte", "bits_per_pixel") if name in positions)
        counts = positions["bytes" if name == "bits_per_byte" else "tokens"]
        rows = zip(positions["first"], positions["end"], counts, positions[name], strict=True)
        bins = [(int(first), int(end), int(count), float(bits)) for first, end, count, bits in rows if bits is not None]
        are_good = all(
            0 <= first < end <= 2**31 and 0 < count < 2**62 and abs(bits) < _MOST_BITS
            for first, end, count, bits in bins
        )
        step, split = int(content["step"]), str(content["split"])[:MOST_NAME_CHARACTERS]
    except (OSError, JSONError, KeyError, TypeError, ValueError, OverflowError, StopIteration):
        return None
    described = {
        "run": Path(str(content.get("run", path))).name[:MOST_NAME_CHARACTERS],
        "step": step,
        "split": split,
        "unit": name.replace("_", " "),
        "bins": bins,
    }
    return described if bins and are_good else None


def _read_incidents(record: RunRecord) -> None:
    """Read the steps that a guard refused, by the files that it left; they say more than the steps' lines."""
    folder = record.folder / file_names.GUARDS
    listed_events: set[tuple[int, str]] = set()  # by lines as well
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
        listed_events.add((step, outcome))
        incidents.append(Event(step, "guard", text))
    lines = [each for each in record.events if each.kind != "guard" or (each.step, each.text) not in listed_events]
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
    files = [
        (int(match[1]), match[2], path)
        for path in (record.folder / file_names.SAMPLES).glob("step-*")
        if (match := _SAMPLE.fullmatch(path.name))
    ]
    for step, kind, path in thinned(sorted(files, key=lambda each: each[:2])):
        try:
            record.samples.append(Sample(step, kind, read_plain(path, _MOST_SAMPLE_BYTES, follow_links=False)))
        except OSError as error:
            record.notices.append(f"{file_names.SAMPLES}/{path.name}: cannot be shown: {error.strerror}")


def thinned(items: list[Any], most: int = 8) -> list[Any]:
    """Keep at most so many, evenly spread from the first to the last."""
    if len(items) <= most:
        return items
    return [items[each] for each in np.linspace(0, len(items) - 1, most).round().astype(int)]
