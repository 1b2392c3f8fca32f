"""Charts of curves as SVG that needs no script, with few points, and with their values for the page's script.

Paths are drawn in a square of 1000 × 1000 that is stretched to the chart; texts and ticks around it are in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup

from longstride.launcher.reporting.records import MOST_EVENTS, Event, PageRun, Series
from longstride.launcher.reporting.template import pieces

MEAN_SHARE = 40  # a running mean covers one part in 40 of a run
COLUMNS = 480  # of pixels, shared by all curves of a chart that have many points
LEAST_COLUMNS = 60
_SIDE = 1000
_EDGE = 0.01  # free share of the width on both sides
_FINEST = 1e-6  # smallest visible difference, relative to the largest value
_FIRST_VALIDATION_COLOUR = 1  # if there is one run; evaluations of several runs have the colour of their run
_NUM_COLOURS = 12
_NUM_BINS = 64  # of positions
_LOG_FROM = 50.0  # ratio of the largest and the smallest value from which a scale may be logarithmic

_CHARTS = (  # title, unit, measure, whether it is smoothed, whether its scale is logarithmic
    ("Learning rate", "", "learning_rate", False, False),
    ("Gradient norm", "before clipping", "grad_norm", True, None),
    ("Loss scale", "fp16", "loss_scale", False, None),
    ("Throughput", "tokens a second", "tokens_per_second", True, False),
    ("Step time", "seconds", "seconds", True, False),
    ("MFU", "% of the peak, by visited tiles", "mfu", True, False),
    ("MFU of dense attention", "% of the peak, as if all pairs were computed", "mfu_dense_equivalent", True, False),
    ("Peak memory", "GiB, first process", "peak_memory_bytes", False, False),
    ("Indexer's loss", "nats, mean of layers", "indexer_kl", False, None),
    ("Indexer's choice", "% of dense attention's weights, mean of layers", "indexer_mass", False, False),
)
_FACTORS = {"mfu": 100, "mfu_dense_equivalent": 100, "peak_memory_bytes": 2**-30, "indexer_mass": 100}


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    colour: int
    series: Series
    style: str = "line"  # line; pale: behind others; dots: few values, each with a dot


@dataclass(frozen=True)
class Chart:
    """The content of a chart."""

    title: str
    unit: str
    curves: Sequence[Curve]
    marks: Sequence[Event] = ()  # dashed lines
    note: str = ""
    log_y: bool | None = False  # None: if values span a wide range
    log_x: bool = False
    wide: bool = False
    x_name: str = "step"
    legend: bool = True
    name_pale: bool = True  # in the legend


def thin(series: Series, columns: int) -> Series:
    """Keep the lowest and the highest value of each column of pixels, and the first and the last value."""
    if len(series) <= 2 * columns:
        return series
    first, last = float(series.steps[0]), float(series.steps[-1])
    column = np.minimum((series.steps - first) / max(last - first, 1) * columns, columns - 1).astype(int)
    order = np.lexsort((series.values, column))
    ends = np.flatnonzero(np.diff(column[order], append=-1))
    begins = np.concatenate([[0], ends[:-1] + 1])
    extremes = np.unique(np.concatenate([order[begins], order[ends], [0, len(series) - 1]]))
    return Series(series.steps[extremes], series.values[extremes])


def draw(chart: Chart) -> str:
    """Return the chart as a figure in HTML, or an empty text if it has no values."""
    many = sum(len(curve.series) > 2 * LEAST_COLUMNS for curve in chart.curves)
    columns = max(LEAST_COLUMNS, COLUMNS // max(1, many))
    curves = [replace(curve, series=thin(curve.series, columns)) for curve in chart.curves if len(curve.series)]
    if not curves:
        return ""
    values = np.concatenate([curve.series.values for curve in curves])
    log_y = bool(chart.log_y)
    if chart.log_y is None:
        log_y = bool(values.min() > 0 and values.max() > _LOG_FROM * values.min())
    low, high, is_cut = value_range(values, log_y)
    steps = np.concatenate([curve.series.steps for curve in curves])
    first, last = float(steps.min()), float(steps.max())
    if chart.log_x and first < last:
        first, last = first / (edge := (last / first) ** _EDGE), last * edge
    else:
        edge = max(_EDGE * (last - first), _FINEST * last, 0.01)
        first, last = first - edge, last + edge
    x, y = Scale(first, last, chart.log_x), Scale(low, high, log_y)
    notes = [chart.note] if chart.note else []
    if is_cut:
        notes.append(f"values above {number(high)} are cut off")
    if log_y:
        notes.append("logarithmic scale")
    marks = [mark for mark in chart.marks if first <= mark.step <= last]
    paths = [(f"mark {mark.kind}", f"M{x.at(mark.step):.1f} 0V{_SIDE}") for mark in marks]
    for curve in sorted(curves, key=lambda curve: curve.style != "pale"):
        points = [
            (x.at(step), min(max(_SIDE - y.at(value), -_SIDE), 2 * _SIDE))
            for step, value in zip(curve.series.steps.tolist(), curve.series.values.tolist(), strict=True)
        ]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        paths.append((f"{curve.style} run-{curve.colour}", path))
        if curve.style == "dots" or len(points) == 1:
            paths.append((f"dot run-{curve.colour}", "".join(f"M{a:.1f} {b:.1f}h0" for a, b in points)))
    named = [curve for curve in curves if chart.name_pale or curve.style != "pale"]
    legend = [(f"{curve.style} run-{curve.colour}", curve.name) for curve in named]
    legend += [(f"mark {mark.kind}", mark.kind) for mark in chart.marks]
    return pieces().chart(
        title=chart.title,
        unit=chart.unit,
        is_wide=chart.wide,
        x_name=chart.x_name,
        x_ticks=[(f"{x.at(tick) / 10:.2f}%", tick_text(tick)) for tick in x.ticks(5)],
        y_ticks=[(f"{100 - y.at(tick) / 10:.2f}%", tick_text(tick)) for tick in y.ticks(5)],
        paths=[(kind, Markup(path)) for kind, path in paths],
        legend=list(dict.fromkeys(legend)) if chart.legend else [],
        notes=notes,
        data={
            "x": [first, last, chart.log_x],
            "y": [low, high, log_y],
            "name": chart.x_name,
            "curves": [
                {
                    "name": curve.name,
                    "colour": curve.colour,
                    "style": curve.style,
                    "x": curve.series.steps.tolist(),
                    "y": [float(f"{value:.5g}") for value in curve.series.values],
                }
                for curve in curves
            ],
        },
    )


def value_range(values: np.ndarray, log: bool = False) -> tuple[float, float, bool]:
    """Return the range of a chart with some margin, and whether it leaves out higher values.

    A few values far above all others, as at the start of a run, must not flatten the others.
    """
    low, high = float(values.min()), float(values.max())
    if log:
        return low / 1.15, high * 1.15, False
    usual = float(np.quantile(values, 0.95))
    is_cut = high - low > 2.5 * (usual - low) > 0
    if is_cut:
        high = usual + 0.35 * (usual - low)
    room = max(0.05 * (high - low), _FINEST * abs(high)) if high > low else 0.1 * abs(high) or 1.0
    bottom = max(low - room, 0.0) if low >= 0 else low - room
    return bottom, high + room, is_cut


@dataclass(frozen=True)
class Scale:
    """A scale that maps values to positions from 0 to 1000."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value, from the low end."""
        if self.log:
            return _SIDE * math.log(value / self.low) / math.log(self.high / self.low)
        return _SIDE * (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Return about ``most`` round values in the range."""
        if not self.log:
            rough = (self.high - self.low) / most
            power = 10.0 ** math.floor(math.log10(rough))
            size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
            first, last = math.ceil(self.low / size - 1e-9), math.floor(self.high / size + 1e-9)
            return [round(place * size, 12) for place in range(first, last + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for parts in ((1, 2, 5), (1, 3), (1,)):
            ticks = [part * 10.0**power for power in powers for part in parts]
            ticks = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(ticks) <= most + 1:
                return ticks
        return ticks[:: -(-len(ticks) // most)]


def number(value: float) -> str:
    """Format a value with few characters: 1.2M, 350, 0.0031, 2e-5."""
    size = abs(value)
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (1e3 if prefix == "k" else limit)
            return f"{float(f'{scaled:.3g}'):,.6g}{prefix}"
    if size and size < 1e-4:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{float(f'{value:.4g}'):,.10g}"


def tick_text(value: float) -> str:
    """Format the value of a tick, with a k from the first thousand: an axis has 5k and 10k."""
    return f"{value / 1e3:.6g}k" if 1e3 <= abs(value) < 1e6 else number(value)


def smoothed(series: Series, window: int) -> Series:
    """Return the running mean of each value and up to ``window - 1`` values before it."""
    total = np.concatenate([[0.0], np.cumsum(series.values)])
    last = np.arange(1, len(series) + 1)
    first = np.maximum(0, last - max(1, window))
    return Series(series.steps, (total[last] - total[first]) / (last - first))


def running_mean(series: Series) -> Series:
    """Return the means over a fortieth of the run before each step."""
    return smoothed(series, len(series) // MEAN_SHARE)


def curves(runs: Sequence[PageRun]) -> str:
    """Draw all curves of metrics.jsonl."""
    is_alone, marks = len(runs) == 1, []
    if is_alone:
        record = runs[0].record
        marks = [Event(start["step"], "resume") for start in record.starts if start["step"] > 0]
        marks += [event for event in record.events[:MOST_EVENTS] if event.kind != "skipped"]
    charts = _losses(runs, marks)
    for title, unit, measure, is_smoothed, log in _CHARTS:
        lines = []
        for run in runs:
            series = (run.record.train | run.record.layers).get(measure)
            if series is None or (measure == "loss_scale" and (series.values == 1.0).all()):  # nothing scales the loss
                continue
            series = Series(series.steps, series.values * _FACTORS.get(measure, 1))
            label = title.lower() if is_alone else run.name
            if is_smoothed and len(series) > MEAN_SHARE:
                if is_alone:
                    lines.append(Curve("each step", run.colour, series, "pale"))
                    label = "running mean"
                series = running_mean(series)
            lines.append(Curve(label, run.colour, series))
        charts.append(Chart(title, unit, lines, marks, log_y=log, legend=not is_alone))
    figures = [figure for figure in map(draw, charts) if figure]
    num_small = sum('class="chart"' in figure for figure in figures)
    return f'<div class="charts{" four" if num_small in (4, 7, 8) else ""}">{"".join(figures)}</div>'


def _losses(runs: Sequence[PageRun], marks: list[Event]) -> list[Chart]:
    """Return one chart of the losses of a run, or a training and a validation chart of several runs."""
    unit, trained, evaluated = runs[0].record.unit, [], []
    is_alone = len(runs) == 1
    for run in runs:
        if (loss := run.record.train.get("bits")) is not None:
            mean_name, name = (f"training, {name}" if is_alone else run.name for name in ("running mean", "each step"))
            if len(loss) <= MEAN_SHARE:
                trained.append(Curve(name, run.colour, loss))
                continue
            if len(runs) <= 3:
                trained.append(Curve(name if is_alone else f"{run.name}, each step", run.colour, loss, "pale"))
            trained.append(Curve(mean_name, run.colour, running_mean(loss)))
    for run in runs:
        for place, (split, series) in enumerate(run.record.evaluations.items()):
            is_usual = split == run.record.setting("data.validation_split")
            name = split if is_alone else run.name if is_usual else f"{run.name}, {split}"
            evaluated.append(Curve(name, _FIRST_VALIDATION_COLOUR + place if is_alone else run.colour, series, "dots"))
    if is_alone:
        return [Chart("Loss", unit, [*trained, *evaluated], marks, wide=True)]
    units = {run.record.unit for run in runs}
    note = "runs of other units stand in one chart: " + ", ".join(sorted(units)) if len(units) > 1 else ""
    return [
        Chart("Validation loss", unit, evaluated, note=note, wide=True),
        Chart("Training loss", f"{unit}, running mean", trained, note=note, wide=True, name_pale=False),
    ]


def positions(runs: Sequence[PageRun], scored: list[dict[str, Any]]) -> str:
    """Draw the loss by position, which shows whether the model uses a long context."""
    named: list[tuple[str, int, dict[str, Any]]] = []
    missing = []
    for run in runs:
        record, answer = run.record, run.answers.get("positions")
        losses = [*record.positions, *([answer.content] if answer and answer.content else [])]
        named += [(run.name, run.colour, loss) for loss in losses]
        if not losses and answer is not None:
            missing.append(pieces().absent(f"{run.name}: {answer.why_not}", answer.command))
        elif not losses and not scored:
            split = "" if record.is_evaluated else f" --split {record.setting('data.train_split')}"
            command = f"longstride evaluate {record.folder}{split} --positions {record.folder / 'by-position.png'}"
            text = f"{run.name} has not been scored by position yet; this page has it after"
            missing.append(pieces().absent(text, command))
    named += [(loss["run"], len(runs) + place, loss) for place, loss in enumerate(scored)]
    lines = [
        Curve(f"{name}, step {loss['step']:,}, {loss['split']}", colour % _NUM_COLOURS, _joined(loss["bins"]))
        for name, colour, loss in named[:_NUM_COLOURS]
    ]
    unit = named[0][2]["unit"] if named else ""
    note = "each point is the mean of a bin of positions, which grows with the position"
    chart = draw(Chart("Loss by position", unit, lines, note=note, log_x=True, wide=True, x_name="position"))
    return (f'<div class="charts">{chart}</div>' if lines else "") + "".join(missing)


def _joined(bins: list[tuple[int, int, int, float]]) -> Series:
    """Join bins to larger ones that grow with the position; return the mean of each at its first position, from 1."""
    end = max(end for _, end, _, _ in bins)
    edges = np.unique(np.geomspace(1, end + 1, _NUM_BINS).astype(np.int64))
    first, _, counts, bits = np.array(bins, dtype=float).T
    place = np.searchsorted(edges, first + 1, side="right") - 1
    totals = np.bincount(place, counts, len(edges))
    sums = np.bincount(place, counts * bits, len(edges))
    has_values = totals > 0
    return Series(edges[has_values], sums[has_values] / totals[has_values])
