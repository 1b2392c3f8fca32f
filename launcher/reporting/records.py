"""Everything that a report shows of a run: its folder, and the results of other verbs.

Old runs lack some files. Damaged files, and verbs that fail, are reported on the page and otherwise skipped.
"""

from __future__ import annotations

import argparse
import io
import math
import re
import shlex
import tempfile
from array import array
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from longstride.data_pipelines.plain_files import JSONError, parse_json, read_plain
from longstride.kernels import ConfigError
from longstride.launcher.config import load_config, load_json_object
from longstride.launcher.output import file_names, metrics_file, mistake, say
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
LAYER_MEASURES = ("indexer_kl", "indexer_mass")  # of an evaluation: a list by layer, of which the mean is shown
MOST_EVENTS = 200  # of a run on a page
_MOST_NAME_CHARACTERS = 100  # of a split
_MOST_SPLITS = 8
_LEAST, _MOST = 1e-100, 1e100  # the range of numbers in a chart
_MOST_FILES = 1000  # read of each kind
_MOST_RECORD_BYTES = 2**24
_MOST_SAMPLES = 8  # evenly spread over the run
_MOST_SAMPLE_BYTES = 2**20
_MOST_BITS = 1e100
_MOST_PIXELS = 1600  # width of a picture
_SAMPLE = re.compile(r"step-(\d{8,18})\.(txt|png|wav)")
_INCIDENT = re.compile(r"step-\d{8,18}(-\d+)?\.json")


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


@dataclass(frozen=True)
class Sample:
    """A sample of the model in training."""

    step: int
    kind: str  # txt, png, wav
    content: bytes


@dataclass
class RunHistory:
    """All data of a run folder for a report."""

    folder: Path
    changed: float = 0.0  # time of the newest line, in seconds since 1970
    unit: str = "bits per byte"
    train_split: str = "train"
    train: dict[str, Series] = field(default_factory=dict)  # by measure; the loss as "bits"
    evaluations: dict[str, Series] = field(default_factory=dict)  # bits by split
    layers: dict[str, Series] = field(default_factory=dict)  # means over layers, by measure
    events: list[Event] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)  # about lines and files that could not be read
    config: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    positions: list[dict[str, Any]] = field(default_factory=list)  # by ``read_positions``

    def median(self, measure: str) -> float | None:
        """Return the median of a measure over the logged steps; None if no line has it."""
        series = self.train.get(measure)
        return None if series is None else float(np.median(series.values))

    def total(self, measure: str) -> float | None:
        """Estimate the sum of a measure over all steps by its mean; None if no line has it."""
        series = self.train.get(measure)
        return None if series is None else float(series.values.mean()) * self.last_step

    @property
    def last_step(self) -> int:
        """The newest step with a line."""
        curves = [*self.train.values(), *self.evaluations.values()]
        return max((int(series.steps[-1]) for series in curves if len(series)), default=0)

    @property
    def is_evaluated(self) -> bool:
        """Whether the run evaluates, as far as its configuration is known."""
        train = self.config.get("train")
        return not isinstance(train, dict) or train.get("evaluate_every", 0) is not None

    def setting(self, path: str) -> Any:
        """Return a value of the configuration by its dotted path, or None."""
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def read_curves(folder: Path) -> RunHistory:
    """Read the curves and events of a run's metrics.jsonl. Old runs lack some of the measures.

    Raises:
        ConfigError: there is no run, its metrics.jsonl cannot be read, or it has no line yet.
    """
    path, record = folder / file_names.METRICS, RunHistory(folder)
    if not folder.is_dir():
        rule = "is a file; name the folder that contains it" if folder.exists() else "no such folder"
        raise ConfigError(f"{folder}: {rule}; such as runs/demo")
    try:
        num_lines = _read_lines(record)
        if not num_lines and not path.exists():
            rule = f"holds no run: it has no {file_names.METRICS}; name a folder that `longstride train` wrote"
            raise ConfigError(f"{folder}: {rule}")
        record.changed = path.stat().st_mtime
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not num_lines:
        raise ConfigError(f"{path}: is empty; wait for the first step")
    return record


def _read_lines(record: RunHistory) -> int:
    """Fill in the curves and events; return the number of lines."""
    steps, columns = array("q"), {name: array("d") for name in ("bits", *MEASURES)}
    evaluations: dict[str, dict[int, float]] = {}
    means: dict[str, dict[int, float]] = {name: {} for name in LAYER_MEASURES}
    num_lines, num_refused, skipped, longest = 0, 0, 0.0, 0.0
    replaced: list[Event] = []
    for line in metrics_file.read_lines(record.folder):
        if not line:
            num_refused += 1
            continue
        num_lines += 1
        step, split = line["step"], line["split"][:_MOST_NAME_CHARACTERS]
        record.unit, bits = metrics_file.bits_of(line)
        if not metrics_file.is_step(line):
            if len(evaluations) < _MOST_SPLITS or split in evaluations:
                evaluations.setdefault(split, {})[step] = _number(bits)
            for name in LAYER_MEASURES:
                if isinstance(values := line.get(name), list):
                    finite = [value for value in map(_number, values) if math.isfinite(value)]
                    means[name][step] = sum(finite) / len(finite) if finite else math.nan
            continue
        record.train_split = split
        steps.append(step)
        columns["bits"].append(_number(bits))
        line["content"] = metrics_file.content_of(line)
        for name in MEASURES:
            columns[name].append(_number(line.get(name)))
        if (context := _number(line.get("context"))) > longest:
            if longest:
                record.events.append(Event(step, "stage", f"contexts of {context:,.0f} from this step on"))
            longest = context
        count = _number(line.get("skipped_steps"))
        if count > skipped and "guard" not in line:
            text = "gradients overflowed; the step was dropped and the loss scale halved"
            if count - skipped > 1:
                text = f"{int(count - skipped)} steps since the line before"
            record.events.append(Event(step, "skipped", text))
        skipped = count if math.isfinite(count) else skipped
        if "guard" in line:
            record.events.append(Event(step, "guard", str(line["guard"])))
        if isinstance(texts := line.get("substitutions"), list) and texts:
            others = f", and {len(texts) - 1} more" if len(texts) > 1 else ""
            replaced.append(Event(step, "data", f"damaged data was replaced: {texts[0]}{others}"))
    record.events += replaced
    if num_refused:
        record.notices.append(f"{file_names.METRICS}: lines without a measurement were left out: {num_refused:,}")
    order = np.argsort(np.asarray(steps), kind="stable")
    for name, column in columns.items():
        values = np.asarray(column)[order]
        if (finite := np.isfinite(values)).any():
            record.train[name] = Series(np.asarray(steps)[order][finite], values[finite])
    for curves, by_name in ((record.evaluations, evaluations), (record.layers, means)):
        for name, by_step in by_name.items():
            pairs = sorted((step, value) for step, value in by_step.items() if math.isfinite(value))
            if pairs:
                curves[name] = Series(*(np.asarray(column) for column in zip(*pairs, strict=True)))
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


def read_run(folder: Path) -> RunHistory:
    """Read a run folder.

    Raises:
        ConfigError: there is no run, or it has no line yet.
    """
    record = read_curves(folder)
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
    """Read the loss by position that `longstride evaluate --positions` wrote; None for any other file."""
    try:
        content = parse_json(read_plain(path, _MOST_RECORD_BYTES, follow_links=follow_links))
        positions = content["positions"]
        name = next(name for name in map(metrics_file.bits_name, metrics_file.LOSS_UNITS) if name in positions)
        counts = positions["bytes" if name == "bits_per_byte" else "tokens"]
        rows = zip(positions["first"], positions["end"], counts, positions[name], strict=True)
        bins = [(int(first), int(end), int(count), float(bits)) for first, end, count, bits in rows if bits is not None]
        are_good = all(
            0 <= first < end <= 2**31 and 0 < count < 2**62 and abs(bits) < _MOST_BITS
            for first, end, count, bits in bins
        )
        step, split = int(content["step"]), str(content["split"])[:_MOST_NAME_CHARACTERS]
    except (OSError, JSONError, KeyError, TypeError, ValueError, OverflowError, StopIteration):
        return None
    if not bins or not are_good:
        return None
    run = Path(str(content.get("run", path))).name[:_MOST_NAME_CHARACTERS]
    return {"run": run, "step": step, "split": split, "unit": name.replace("_", " "), "bins": bins}


def _read_incidents(record: RunHistory) -> None:
    """Read the files of steps that a guard rejected; they replace the events from the lines of metrics.jsonl."""
    folder = record.folder / file_names.GUARDS
    outcomes: set[tuple[int, str]] = set()
    incidents = []
    for path in sorted(path for path in folder.glob("*.json") if _INCIDENT.fullmatch(path.name))[:_MOST_FILES]:
        try:
            incident = load_json_object(path, follow_links=False)
            step, outcome = int(incident["step"]), f"{incident['outcome']}: {incident['reason']}"
            back = incident.get("rewound_to")
            text = outcome if back is None else f"{outcome}; back to step {int(back):,}"
        except (ConfigError, KeyError, TypeError, ValueError):
            record.notices.append(f"{file_names.GUARDS}/{path.name}: cannot be read")
            continue
        outcomes.add((step, outcome))
        incidents.append(Event(step, "guard", text))
    lines = [event for event in record.events if event.kind != "guard" or (event.step, event.text) not in outcomes]
    record.events = lines + incidents


def _read_starts(record: RunHistory) -> None:
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
            record.notices.append(f"{file_names.STARTS}: a line that does not record a start was left out")


def _read_samples(record: RunHistory) -> None:
    files = [
        (int(match[1]), match[2], path)
        for path in (record.folder / file_names.SAMPLES).glob("step-*")
        if (match := _SAMPLE.fullmatch(path.name))
    ]
    files.sort(key=lambda file: file[:2])
    if len(files) > _MOST_SAMPLES:
        files = [files[index] for index in np.linspace(0, len(files) - 1, _MOST_SAMPLES).round().astype(int)]
    for step, kind, path in files:
        try:
            record.samples.append(Sample(step, kind, read_plain(path, _MOST_SAMPLE_BYTES, follow_links=False)))
        except OSError as error:
            record.notices.append(f"{file_names.SAMPLES}/{path.name}: cannot be shown: {error.strerror}")


@dataclass
class Answer:
    """The result of a verb, or the reason for none; ``command`` is the command line for people."""

    command: str
    content: Any = None
    why_not: str = ""


@dataclass(frozen=True)
class PageRun:
    """A run on the page: its name and colour, its data, and the results of verbs."""

    name: str
    colour: int
    record: RunHistory
    answers: dict[str, Answer]  # of the verbs that were called: plan, pattern, attention, positions


def ask_all(record: RunHistory, *, by_position: bool, trusted: bool) -> dict[str, Answer]:
    """Call the verbs one after the other."""
    folder, config = record.folder, record.folder / file_names.CONFIG
    trust = [TRUST_OPTION] if trusted else []
    device = ["--device", kind] if (kind := _device_of(record)) else []
    pattern = ["show", "pattern", config, "--output", "pattern.png"]
    attention = ["show", "attention", folder, "--output", "attention.png", *trust]
    calls: dict[str, tuple[list[Any], Callable[[], Any]]] = {
        "plan": (["plan", config, "--processes", processes_of(record), *device, "--json"], lambda: plan_of(record)),
        "pattern": (pattern, lambda: _draw("pattern", config)),
        "attention": (attention, lambda: _draw("attention", folder, trusted)),
    }
    if by_position:
        words = ["evaluate", folder, "--positions", "positions.png", *trust]
        calls["positions"] = words, lambda: _positions_of(folder, trusted)
    say(f"{folder}: asking for {', '.join(calls)}")
    return {name: _ask(*call) for name, call in calls.items()}


def _ask(words: list[Any], work: Callable[[], Any]) -> Answer:
    answer = Answer(shlex.join(["longstride", *map(str, words)]))
    try:
        answer.content = work()
    except Exception as error:  # of any library that a verb uses
        answer.why_not = (mistake(error) or f"{type(error).__name__}: {error}").partition("\n")[0]
    return answer


def plan_of(record: RunHistory) -> dict[str, Any]:
    """Return the plan of a run, for its last number of processes and kind of device."""
    from longstride.launcher.planning import plan_run

    return plan_run(load_config(record.folder / file_names.CONFIG), processes_of(record), _device_of(record))


def _draw(what: str, source: Path, trusted: bool = False) -> bytes:
    """Draw the pattern or the attention of a run; return a PNG with few pixels and colours: a page has many."""
    from longstride.launcher.drawing import attention, pattern
    from longstride.launcher.pictures import picture_of

    if what == "pattern":
        content = picture_of(pattern.draw_pattern(source))
    else:
        content = picture_of(attention.draw_attention(source, trusted=trusted))
    with Image.open(io.BytesIO(content)) as drawing:
        picture = drawing.convert("RGB")
    if picture.width > _MOST_PIXELS:
        size = _MOST_PIXELS, round(picture.height * _MOST_PIXELS / picture.width)
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    output = io.BytesIO()
    picture.quantize(192, dither=Image.Dither.NONE).save(output, "PNG", optimize=True)
    return min(content, output.getvalue(), key=len)


def _positions_of(run: Path, trusted: bool) -> dict[str, Any] | None:
    """Score the validation split of a run by position."""
    from longstride.launcher.evaluation import evaluate
    from longstride.launcher.models import TRAINED

    defaults = dict.fromkeys(("step", "split", "data", "batch", "precision"))
    with tempfile.TemporaryDirectory(prefix="longstride-report-") as folder:
        picture = Path(folder) / "positions.png"
        options = {"run": run, "positions": picture, "trust_checkpoint": trusted, "weights": TRAINED}
        arguments = argparse.Namespace(**defaults, **options, min_context=0, sequence_parallel=1)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as lines:
            try:
                evaluate.run(arguments)
            except SystemExit:  # after a line about a mistake that only one of several ranks may have met
                raise ValueError(lines.getvalue().rpartition("error: ")[2].strip()) from None
        return read_positions(picture.with_suffix(".json"))


def processes_of(record: RunHistory) -> int:
    """Return the last number of processes of a run, as far as it is known."""
    count = record.starts[-1].get("processes") if record.starts else None
    return count if isinstance(count, int) and 0 < count < 2**20 else record.setting("train.sequence_parallel") or 1


def _device_of(record: RunHistory) -> str | None:
    """Return the last kind of device of a run, as far as it is known."""
    kind = record.starts[-1].get("device_type") if record.starts else None
    return kind if kind in ("cpu", "cuda") else None
