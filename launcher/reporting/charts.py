"""Curves as SVG that needs no script: any width, thin enough for a page, with their values beside for whoever hovers.

Paths live in a square of 1000 × 1000 that is stretched to the chart; words and ticks stand around it in pixels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from longstride.launcher.reporting.records import Series

COLUMNS = 480  # of pixels, over all curves of a chart that have many points
LEAST_COLUMNS = 60
MEAN_SHARE = 40  # a smoothed curve is the mean over this part of a run, up to each step
_SIDE = 1000
_EDGE = 0.01  # of the width, left free at both sides
_FINEST = 1e-6  # of the largest value: a chart shows no smaller differences
_LOG_FROM = 50.0  # times that the largest value is the smallest, from which a scale may be logarithmic


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    colour: int
    series: Series
    style: str = "line"  # line; pale: behind others; dots: few values, each with a dot; steps: means of ranges


@dataclass(frozen=True)
class Mark:
    """A step at which something befell a run: a dashed line."""

    step: int
    kind: str


@dataclass(frozen=True)
class Chart:
    """What a chart shows."""

    title: str
    unit: str
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    note: str = ""
    log_y: bool | None = False  # None: where values span much
    log_x: bool = False
    wide: bool = False
    x_name: str = "step"
    legend: bool = True
    name_pale: bool = True  # in the legend


def smoothed(series: Series) -> Series:
    """The mean of each value and those of the fortieth of the run before it."""
    window = max(1, len(series) // MEAN_SHARE)
    total = np.concatenate([[0.0], np.cumsum(series.values)])
    last = np.arange(1, len(series) + 1)
    first = np.maximum(0, last - window)
    return Series(series.steps, (total[last] - total[first]) / (last - first))


def thin(series: Series, columns: int) -> Series:
    """The lowest and the highest value of each column of pixels, in their order; the first and the last stay."""
    if len(series) <= 2 * columns:
        return series
    first, last = float(series.steps[0]), float(series.steps[-1])
    column = np.minimum((series.steps - first) / max(last - first, 1) * columns, columns - 1).astype(int)
    order = np.lexsort((series.values, column))
    ends = np.flatnonzero(np.diff(column[order], append=-1))
    begins = np.concatenate([[0], ends[:-1] + 1])
    kept = np.unique(np.concatenate([order[begins], order[ends], [0, len(series) - 1]]))
    return Series(series.steps[kept], series.values[kept])


def draw(chart: Chart) -> str:
    """The chart as a figure of HTML; empty where it has no values."""
    many = sum(len(curve.series) > 2 * LEAST_COLUMNS for curve in chart.curves)
    columns = max(LEAST_COLUMNS, COLUMNS // max(1, many))
    curves = [
        Curve(each.name, each.colour, thin(each.series, columns), each.style)
        for each in chart.curves
        if len(each.series)
    ]
    if not curves:
        return ""
    values = np.concatenate([each.series.values for each in curves])
    log_y = bool(chart.log_y)
    if chart.log_y is None:
        log_y = bool(values.min() > 0 and values.max() > _LOG_FROM * values.min())
    low, high, cut = value_range(values, log_y)
    steps = np.concatenate([each.series.steps for each in curves])
    left, right = float(steps.min()), float(steps.max())
    if chart.log_x and left < right:
        left, right = left / (edge := (right / left) ** _EDGE), right * edge
    else:
        edge = max(_EDGE * (right - left), _FINEST * right, 0.01)
        left, right = left - edge, right + edge
    x, y = Scale(left, right, chart.log_x), Scale(low, high, log_y)
    notes = [chart.note] if chart.note else []
    if cut:
        notes.append(f"values above {number(high)} are cut off")
    if log_y:
        notes.append("logarithmic scale")
    paths = [
        f'<path class="mark {mark.kind}" d="M{x.at(mark.step):.1f} 0V{_SIDE}"/>'
        for mark in chart.marks
        if left <= mark.step <= right
    ]
    paths += [_path(each, x, y) for each in sorted(curves, key=lambda each: each.style != "pale")]
    data = {
        "x": [left, right, chart.log_x],
        "y": [low, high, log_y],
        "name": chart.x_name,
        "curves": [
            {
                "name": each.name,
                "colour": each.colour,
                "style": each.style,
                "x": [int(step) for step in each.series.steps],
                "y": [float(f"{value:.5g}") for value in each.series.values],
            }
            for each in curves
        ],
    }
    title = f"{escape(chart.title)} <span>{escape(chart.unit)}</span><small>by {escape(chart.x_name)}</small>"
    return (
        f'<figure class="chart{" wide" if chart.wide else ""}"><figcaption>{title}</figcaption>'
        f'<div class="frame"><svg class="axes" role="img" aria-label="{escape(chart.title)}">'
        f'<g class="y">{_ticks_y(y)}</g><g class="x">{_ticks_x(x)}</g>'
        f'<svg class="plot" viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none">{"".join(paths)}</svg></svg></div>'
        f"{_legend(chart)}"
        f"{'<p class=note>' + escape('; '.join(notes)) + '</p>' if notes else ''}"
        f'<script type="application/json">{in_script(data)}</script></figure>'
    )


def value_range(values: np.ndarray, log: bool = False) -> tuple[float, float, bool]:
    """The lowest and highest value that a chart shows, with some room; and whether some lie above it.

    A few values far above all others, as at the start of a run, do not press the others flat.
    """
    if log:
        low, high = float(values.min()), float(values.max())
        return low / 1.15, high * 1.15, False
    low, high = float(values.min()), float(values.max())
    usual = float(np.quantile(values, 0.95))
    cut = high - low > 2.5 * (usual - low) > 0
    if cut:
        high = usual + 0.35 * (usual - low)
    room = max(0.05 * (high - low), _FINEST * abs(high)) if high > low else 0.1 * abs(high) or 1.0
    bottom = max(low - room, 0.0) if low >= 0 else low - room
    return bottom, high + room, cut


@dataclass(frozen=True)
class Scale:
    """Where a value lies between 0 and 1000."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Its place from the low end."""
        if self.log:
            return _SIDE * math.log(value / self.low) / math.log(self.high / self.low)
        return _SIDE * (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Round values inside, at most so many."""
        if self.log:
            return _log_ticks(self.low, self.high, most)
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        size = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
        first = math.ceil(self.low / size - 1e-9)
        return [round(place * size, 12) for place in range(first, math.floor(self.high / size + 1e-9) + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for parts in ((1, 2, 5), (1, 3), (1,)):
        ticks = [part * 10.0**power for power in powers for part in parts if low <= part * 10.0**power <= high]
        if len(ticks) <= most + 1:
            return ticks
    return ticks[:: -(-len(ticks) // most)]


def number(value: float) -> str:
    """A value in a few characters, as ticks have it: 1.2M, 350, 0.0031, 2e-5."""
    size = abs(value)
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (1e3 if prefix == "k" else limit)
            return f"{float(f'{scaled:.3g}'):,.6g}{prefix}"
    if size and size < 1e-4:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{float(f'{value:.4g}'):,.10g}"


def in_script(content: Any) -> str:
    """JSON that no text in it can end the script element of."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _path(curve: Curve, x: Scale, y: Scale) -> str:
    points = [
        (x.at(step), min(max(_SIDE - y.at(value), -_SIDE), 2 * _SIDE))
        for step, value in zip(curve.series.steps.tolist(), curve.series.values.tolist(), strict=True)
    ]
    line = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    drawn = f'<path class="{curve.style} run-{curve.colour}" d="{line}"/>'
    if curve.style == "dots" or len(points) == 1:
        dots = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in points)
        drawn += f'<path class="dot run-{curve.colour}" d="{dots}"/>'
    return drawn


def _ticks_y(y: Scale) -> str:
    lines = []
    for value in y.ticks(5):
        place = f"{100 - y.at(value) / 10:.2f}%"
        lines.append(f'<line x1="0" x2="100%" y1="{place}" y2="{place}"/>')
        lines.append(f'<text x="-6" y="{place}" dy="4">{number(value)}</text>')
    return "".join(lines)


def _ticks_x(x: Scale) -> str:
    lines = []
    for value in x.ticks(5):
        place = f"{x.at(value) / 10:.2f}%"
        lines.append(f'<line x1="{place}" x2="{place}" y1="100%" y2="100%"/>')
        lines.append(f'<text x="{place}" y="100%" dy="17">{number(value)}</text>')
    return "".join(lines)


def _legend(chart: Chart) -> str:
    """Whose line is whose, where there is more than one."""
    if not chart.legend:
        return ""
    shown = [each for each in chart.curves if len(each.series) and (chart.name_pale or each.style != "pale")]
    named = dict.fromkeys((each.name, each.colour, each.style) for each in shown)
    keys = [f'<li><i class="{style} run-{colour}"></i>{escape(name)}</li>' for name, colour, style in named]
    kinds = dict.fromkeys(mark.kind for mark in chart.marks)
    keys += [f'<li><i class="mark {kind}"></i>{escape(kind)}</li>' for kind in kinds]
    return f'<ul class="legend">{"".join(keys)}</ul>' if len(keys) > 1 else ""
