"""The picture beside a result file: how many times faster than dense attention, by context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.attention.cases import NAMES, stride_of

PHASES_SHOWN = ("forward", "backward", "both")


def plot(found: dict[str, Any], path: Path) -> bool:
    """A panel for each head width, dtype and phase, a line a pattern; False where there is no ratio to draw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in found["timings"]:
        if row["ratio_to_dense"]["forward"] is not None:
            kinds.setdefault((row["head_width"], row["dtype"]), []).append(row)
    if not kinds:
        return False
    contexts = sorted({row["context"] for rows in kinds.values() for row in rows})
    figure, panels = plt.subplots(
        len(kinds),
        len(PHASES_SHOWN),
        figsize=(4.2 * len(PHASES_SHOWN), 0.9 + 3.6 * len(kinds)),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    colours = dict(zip(NAMES, plt.get_cmap("tab10").colors, strict=False))
    shown: dict[str, Any] = {}
    for panel_row, ((width, dtype), rows) in zip(panels, sorted(kinds.items()), strict=True):
        for axes, phase in zip(panel_row, PHASES_SHOWN, strict=True):
            for name in NAMES:
                shown |= draw(axes, [row for row in rows if row["pattern"] == name], phase, colours[name])
            decorate(axes, contexts)
            axes.set_title(f"{phase}, head width {width}, {dtype}", fontsize=10)
        panel_row[0].set_ylabel("times faster than dense")
    for axes in panels[-1]:
        axes.set_xlabel("context (positions)")
    figure.suptitle(f"{found['device']}, torch {found['torch']}, {found['date']}", fontsize=11)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def draw(axes: Any, rows: list[dict[str, Any]], phase: str, colour: Any) -> dict[str, Any]:
    """One pattern's line; a stride other than the usual one of its context is a star beside the line."""
    drawn = {}
    for usual, style in ((False, {"marker": "*", "linestyle": "none"}), (True, {"marker": "o", "markersize": 4})):
        points = sorted(
            (row["context"], row["ratio_to_dense"][phase])
            for row in rows
            if row["ratio_to_dense"][phase] is not None and (row["stride"] == stride_of(row["context"])) == usual
        )
        if points:
            (drawn[rows[0]["pattern"]],) = axes.plot(*zip(*points, strict=True), color=colour, **style)
    return drawn


def decorate(axes: Any, contexts: list[int]) -> None:
    """Log axes with plain numbers, and a line where nothing is won."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts], rotation=30, ha="right", fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}×"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: f"{y:g}×" if f"{y:e}"[0] in "25" else ""))
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.set_xlim(contexts[0] / 1.4, contexts[-1] * 1.4)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.grid(True, which="major", alpha=0.3)
