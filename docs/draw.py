"""Draws the pictures of README.md and docs/. Run ``python docs/draw.py``; a test checks that they are up to date.

- ``docs/pictures/rooms.svg``: the packages, from the imports of every file.
- ``docs/pictures/patterns.svg``: the mask and the cost of some patterns, from benchmarks/results/.
- ``docs/pictures/dilated.svg``: the mask of the pattern in docs/tour.md, from its code there.
- ``docs/pictures/align.svg``: the pixels that a column reads, for each ``align``.

The script also updates the line numbers of the stops in docs/tour.md.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import torch  # noqa: E402  the path comes first

from longstride.kernels.patterns import Column, Pattern, pattern_from_json  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
TOUR = ROOT / "docs" / "tour.md"
TOP_PACKAGES = {"launcher": "#dbe9f6", "sparse_model": "#e3f1de", "kernels": "#fbe5cf", "data_pipelines": "#eee3f3"}
INK, FAINT = "#24292f", "#8b949e"
FONT = "font-family='system-ui, sans-serif'"
BOX_WIDTH, BOX_HEIGHT, GAP, LAYER = 118, 34, 14, 66  # pixels

SHOWN = 32  # positions of a drawn pattern
STRIDE, SUMMARY = 8, 2
CELL = 5  # pixels of a pair
CONTEXT, HEAD_WIDTH = 12_288, 64  # of the measurement that stands below a pattern
DRAWN = {
    "dense": {"type": "dense"},
    "local": {"type": "local", "window": STRIDE},
    "strided merged": {"type": "strided", "stride": STRIDE},
    "fixed merged": {"type": "fixed", "stride": STRIDE, "summary": SUMMARY},
}


def main() -> None:
    """Write all pictures, and the line numbers of the tour."""
    PICTURES.mkdir(exist_ok=True)
    for name, drawing in drawings().items():
        (PICTURES / name).write_text(drawing)
    TOUR.write_text(re.sub(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)(?:#L\d+)?\)", _with_line, TOUR.read_text()))


def drawings() -> dict[str, str]:
    """Return the contents of all pictures by file name."""
    dilated = mask_drawing(pattern_of_the_tour()(window=5, dilation=4))
    packages = packages_drawing(imports_of_packages())
    return {
        "rooms.svg": packages,
        "patterns.svg": patterns_drawing(),
        "dilated.svg": dilated,
        "align.svg": alignment_drawing(),
    }


def pattern_of_the_tour() -> Any:
    """Return the pattern class in docs/tour.md."""
    (code,) = re.findall(r"```python\n(.*?)```", TOUR.read_text(), flags=re.DOTALL)
    module = ModuleType("tour")
    sys.modules["tour"] = module  # where dataclasses looks for it
    exec(compile(code, str(TOUR), "exec"), vars(module))
    return module.Dilated


def _with_line(stop: re.Match[str]) -> str:
    """Return the link of a stop with the line at which its class or function begins."""
    name, path = stop.group(1), stop.group(2)
    lines = (ROOT / path).read_text().splitlines()
    pattern = re.compile(rf"\s*(def|class) {name.split('.')[-1]}\b")
    begin = next((i for i, line in enumerate(lines) if re.match(rf"class {name.split('.')[0]}\b", line)), 0)
    number = next(i for i, line in enumerate(lines[begin:], begin + 1) if pattern.match(line))
    return f"[`{name}`](../{path}#L{number})"


def imports_of_packages() -> dict[str, set[str]]:
    """Return what every package or top-level file imports, by names such as ``launcher/data``."""
    arrows: dict[str, set[str]] = {}
    for top in TOP_PACKAGES:
        for path in sorted((ROOT / top).rglob("*.py")):
            package = _package(("longstride", *path.relative_to(ROOT).with_suffix("").parts))
            if package is None:
                continue
            arrows.setdefault(package, set())
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    targets = {_package((*node.module.split("."), alias.name)) for alias in node.names}
                    arrows[package] |= {target for target in targets if target not in (None, package)}
    return arrows


def _package(parts: tuple[str, ...]) -> str | None:
    """Return the package of a full module name, or None if it is not ours. sparse_model and kernels are one each."""
    if parts[0] != "longstride" or len(parts) < 2 or parts[1] not in TOP_PACKAGES:
        return None
    if parts[1] in ("sparse_model", "kernels"):
        return parts[1]
    inside = ROOT / parts[1] / parts[2] if len(parts) > 2 else None
    if inside is None or parts[2] == "__init__" or not (inside.is_dir() or inside.with_suffix(".py").exists()):
        return None
    return f"{parts[1]}/{parts[2]}"


def packages_drawing(arrows: dict[str, set[str]]) -> str:
    """Draw the packages in layers, each above all that it imports, without arrows that follow from others."""
    reached: dict[str, set[str]] = defaultdict(set)
    layer: dict[str, int] = {}
    for package in TopologicalSorter(arrows).static_order():
        layer[package] = max((layer[below] + 1 for below in arrows[package]), default=0)
        reached[package] = arrows[package].union(*(reached[below] for below in arrows[package]))
    drawn = {
        package: {below for below in targets if not any(below in reached[other] for other in targets)}
        for package, targets in arrows.items()
    }
    layers = [
        sorted(package for package in layer if layer[package] == level) for level in range(max(layer.values()) + 1)
    ]
    places = _arranged(layers, drawn)
    width = max(len(packages) for packages in layers) * (BOX_WIDTH + GAP) + GAP
    height = len(layers) * LAYER + GAP
    lines = []
    for package, targets in sorted(drawn.items()):
        x, y = places[package]
        for below in sorted(targets):
            to_x, to_y = places[below]
            lines.append(
                f"<path d='M{x:.0f} {y + BOX_HEIGHT / 2:.0f} C{x:.0f} {y + LAYER * 0.7:.0f} {to_x:.0f} "
                f"{to_y - LAYER * 0.7:.0f} {to_x:.0f} {to_y - BOX_HEIGHT / 2 - 5:.0f}' fill='none' stroke='{FAINT}' "
                "marker-end='url(#head)'/>"
            )
    for package, (x, y) in sorted(places.items()):
        top, _, inside = package.partition("/")
        files = len(list((ROOT / package).rglob("*.py"))) if (ROOT / package).is_dir() else 0
        lines.append(
            f"<rect x='{x - BOX_WIDTH / 2:.0f}' y='{y - BOX_HEIGHT / 2:.0f}' width='{BOX_WIDTH}' height='{BOX_HEIGHT}' "
            f"rx='5' fill='{TOP_PACKAGES[top]}' stroke='{INK}'/>"
        )
        text = f"{inside or top}" + ("" if files else ".py")
        below = f"{top}, {files} files" if files else top
        lines += [_text(x, y - 2, 13, text), _text(x, y + 11, 9, below)]
    head = (
        f"<marker id='head' viewBox='0 0 8 8' refX='6' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0 0L8 4L0 8z' fill='{FAINT}'/></marker>"
    )
    return _svg(width, height, [f"<defs>{head}</defs>", *lines])


def _arranged(layers: list[list[str]], arrows: dict[str, set[str]]) -> dict[str, tuple[float, float]]:
    """Return the centre of every box. Each layer is sorted by the positions of neighbours, a few times."""
    width = max(len(packages) for packages in layers) * (BOX_WIDTH + GAP)
    neighbours: dict[str, set[str]] = defaultdict(set)
    for package, targets in arrows.items():
        neighbours[package] |= targets
        for target in targets:
            neighbours[target].add(package)
    places: dict[str, tuple[float, float]] = {}
    for turn in range(12):
        for level, packages in enumerate(layers):
            if turn:
                packages.sort(key=lambda package: fmean([places[n][0] for n in sorted(neighbours[package])] or [0]))
            step = width / len(packages)
            y = (len(layers) - level - 0.5) * LAYER + GAP / 2
            places |= {package: (GAP / 2 + step * (number + 0.5), y) for number, package in enumerate(packages)}
    return places


def patterns_drawing() -> str:
    """Draw four patterns as matrices, with density and speed at a context of 12,288."""
    (path,) = sorted((ROOT / "benchmarks" / "results").glob("attention-amd-epyc.json"))
    measured = json.loads(path.read_text())
    side, lines = SHOWN * CELL, []
    for number, (name, settings) in enumerate(DRAWN.items()):
        left = GAP + number * (side + 2 * GAP)
        lines += _mask_lines(pattern_from_json(settings), left)
        speed, density = _cost(measured, name)
        middle, below = left + side // 2, GAP + side
        cost = "torch's own: 1×" if name == "dense" else f"{speed:.1f}× as fast"
        captions = ((16, 13, name), (33, 11, f"{density:.1%} of the pairs"), (48, 11, cost))
        lines += [_text(middle, below + down, size, words) for down, size, words in captions]
    return _svg(len(DRAWN) * (side + 2 * GAP), side + 2 * GAP + 44, lines)


def mask_drawing(pattern: Pattern) -> str:
    """Draw one pattern as a matrix, queries down and keys across."""
    side = SHOWN * CELL + 2 * GAP
    return _svg(side, side, _mask_lines(pattern, GAP))


def _mask_lines(pattern: Pattern, left: int) -> list[str]:
    positions, side = torch.arange(SHOWN), SHOWN * CELL
    pairs = pattern.mask(positions[:, None], positions[None, :]).nonzero().tolist()
    cell = f"h{CELL - 1}v{CELL - 1}h-{CELL - 1}z"
    cells = "".join(f"M{left + key * CELL} {GAP + query * CELL}{cell}" for query, key in pairs)
    frame = f"width='{side}' height='{side}' fill='#f6f8fa' stroke='{FAINT}' stroke-width='0.5'"
    return [f"<rect x='{left}' y='{GAP}' {frame}/>", f"<path fill='#0969da' d='{cells}'/>"]


def alignment_drawing() -> str:
    """Draw a small grey picture for each ``align``: the pixel to predict, and the pixels that a column then reads."""
    rows, width, side = 5, 8, 20
    query = 3 * width + 4
    lines = []
    for number, align in enumerate(("row", "target")):
        left = GAP + number * (width * side + 3 * GAP)
        keys = Column(width, align).mask(torch.tensor(query), torch.arange(rows * width)).nonzero().flatten()
        read = {int(key) - 1 for key in keys}  # row j holds token j - 1
        for token in range(rows * width):
            colour = "#cf222e" if token == query else "#0969da" if token in read else "#d0d7de"
            x, y = left + token % width * side, GAP + token // width * side
            fill = "white" if token > query else colour
            box = f"width='{side - 2}' height='{side - 2}' fill='{fill}' stroke='{FAINT}' stroke-width='0.5'"
            lines.append(f"<rect x='{x}' y='{y}' {box}/>")
        lines.append(_text(left + width * side / 2, GAP + rows * side + 18, 13, f"align: {align}"))
    return _svg(2 * (width * side + GAP) + 3 * GAP, rows * side + 2 * GAP + 18, lines)


def _cost(measured: dict, name: str) -> tuple[float, float]:
    """Return a pattern's speed-up over PyTorch's dense causal attention, both passes, and its density."""
    (timing,) = (
        timing
        for timing in measured["timings"]
        if (timing["pattern"], timing["context"], timing["head_width"], timing["dtype"], timing["stride"])
        == (name, CONTEXT, HEAD_WIDTH, "float32", 128)
    )
    return timing["ratio_to_dense"]["both"], timing["density"]


def _text(x: float, y: float, size: int, words: str) -> str:
    return f"<text x='{x:.0f}' y='{y:.0f}' text-anchor='middle' font-size='{size}' fill='{INK}'>{words}</text>"


def _svg(width: int, height: int, lines: list[str]) -> str:
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
            f"viewBox='0 0 {width} {height}' {FONT}>",
            f"<rect width='{width}' height='{height}' fill='white'/>",
            *lines,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main()
