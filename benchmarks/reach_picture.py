"""The picture of `benchmarks/reach.py`: bits per scored byte against the cost of a step, as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 420, 340  # pixels of a panel
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 44  # margins
INK, LINE = "#24292f", "#d8dee4"
WINDOW, OTHER, DENSE = "#57606a", "#c2410c", "#1d4ed8"  # colours of points
FONT = "font-family='system-ui, sans-serif'"
TICKS = 7
LETTER, LABEL_HEIGHT = 6.2, 12  # pixels of a label


class Point(NamedTuple):
    """A pattern: the milliseconds of a step, and the bits per byte of each seed."""

    name: str
    cost: float
    bits: Sequence[float]


def picture(panels: Mapping[str, Sequence[Point]]) -> str:
    """Draw a panel for each title, side by side."""
    width = WIDTH * len(panels)
    drawn = "".join(
        f"<g transform='translate({number * WIDTH} 0)'>\n{panel(title, points)}</g>\n"
        for number, (title, points) in enumerate(panels.items())
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{HEIGHT}' "
        f"viewBox='0 0 {width} {HEIGHT}' {FONT} font-size='11' fill='{INK}'>\n"
        f"<rect width='{width}' height='{HEIGHT}' fill='white'/>\n{drawn}</svg>\n"
    )


def panel(title: str, points: Sequence[Point]) -> str:
    """Draw one task: a point for each pattern, with a bar from the best seed to the worst; windows are joined."""
    costs, bits = [point.cost for point in points], [bit for point in points for bit in point.bits]
    least, most = 0.8 * min(costs), 1.1 * max(costs)
    x = scale(least, most, LEFT, WIDTH - RIGHT)
    slack = 0.08 * (max(bits) - min(bits) or 1)
    low, high = min(bits) - slack, max(bits) + slack
    y = scale(low, high, HEIGHT - BOTTOM, TOP)
    lines = [f"<text x='{LEFT}' y='18' font-size='13' font-weight='600'>{title}</text>"]
    for value in ticks(low, high):
        lines.append(f"<path d='M{LEFT} {y(value):.1f} H{WIDTH - RIGHT}' stroke='{LINE}'/>")
        lines.append(f"<text x='{LEFT - 6}' y='{y(value) + 4:.1f}' text-anchor='end'>{value:.2f}</text>")
    for value in ticks(least, most):
        lines.append(f"<text x='{x(value):.1f}' y='{HEIGHT - BOTTOM + 16}' text-anchor='middle'>{value:.0f}</text>")
    axis = f"y='{HEIGHT - 8}' text-anchor='middle'"
    lines.append(f"<text x='{(LEFT + WIDTH - RIGHT) / 2:.0f}' {axis}>milliseconds of a step at full length</text>")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f"transform='translate(13 {middle:.0f}) rotate(-90)' text-anchor='middle'"
    lines.append(f"<text {turned}>bits per scored byte, held out</text>")
    windows = sorted((point for point in points if is_window(point)), key=lambda point: point.cost)
    path = " L".join(f"{x(point.cost):.1f} {y(statistics.fmean(point.bits)):.1f}" for point in windows)
    lines.append(f"<path d='M{path}' fill='none' stroke='{WINDOW}' stroke-dasharray='3 3'/>" if path else "")
    # Left, right and height of points and labels.
    taken = [(x(point.cost) - 4, x(point.cost) + 4, y(statistics.fmean(point.bits))) for point in points]
    for point in sorted(points, key=lambda point: statistics.fmean(point.bits)):
        colour = WINDOW if is_window(point) else DENSE if point.name == "dense" else OTHER
        at, mean = x(point.cost), y(statistics.fmean(point.bits))
        lines.append(
            f"<path d='M{at:.1f} {y(min(point.bits)):.1f} V{y(max(point.bits)):.1f}' stroke='{colour}'/>"
            f"<circle cx='{at:.1f}' cy='{mean:.1f}' r='4' fill='{colour}'/>"
        )
        lines.append(label(point.name, at, mean, colour, taken))
    return "\n".join(filter(None, lines)) + "\n"


def label(name: str, at: float, height: float, colour: str, taken: list[tuple[float, float, float]]) -> str:
    """Write a name next to its point, right or left of it, at the nearest height where nothing else is."""
    size = LETTER * len(name)

    def is_free(left: float, place: float) -> bool:
        inside = left > LEFT and left + size < WIDTH and TOP < place < HEIGHT - BOTTOM
        return inside and not any(
            left < right and start < left + size and abs(place - other) < LABEL_HEIGHT for start, right, other in taken
        )

    places = [
        (left, height + offset)
        for offset in sorted(range(-8 * LABEL_HEIGHT, 8 * LABEL_HEIGHT), key=abs)
        for left in (at + 8, at - 8 - size)
    ]
    left, place = next((place for place in places if is_free(*place)), places[0])
    taken.append((left, left + size, place))
    anchor, edge = ("start", left) if left > at else ("end", left + size)
    return f"<text x='{edge:.1f}' y='{place + 4:.1f}' text-anchor='{anchor}' fill='{colour}'>{name}</text>"


def is_window(point: Point) -> bool:
    """Whether the pattern is a plain window."""
    return point.name.startswith("window")


def scale(first: float, last: float, start: float, end: float) -> Callable[[float], float]:
    """Return the function from values to pixels."""
    return lambda value: start + (value - first) / (last - first) * (end - start)


def ticks(low: float, high: float) -> list[float]:
    """Return round values between two."""
    raw = (high - low) / TICKS
    power = 10.0 ** len(str(int(1 / raw))) if raw < 1 else 1.0
    step = next(unit / power * factor for factor in (1, 10, 100) for unit in (1, 2, 5) if unit / power * factor >= raw)
    first = -(-low // step)
    return [step * (first + number) for number in range(int(high / step - first) + 1)]
