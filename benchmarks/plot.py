"""The picture beside a result file: how many times faster than dense attention, by context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import NAMES

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
    lines = {}
    for panel_row, ((width, dtype), rows) in zip(panels, sorted(kinds.items()), strict=True):
        for axes, phase in zip(panel_row, PHASES_SHOWN, strict=True):
            for name in NAMES:
                points = sorted(
                    (row["context"], row["stride"], row["ratio_to_dense"][phase])
                    for row in rows
                    if row["pattern"] == name and row["ratio_to_dense"][phase] is not None
                )
                if points:
                    x, _, y = zip(*points, strict=True)
                    (lines[name],) = axes.plot(x, y, marker="o", markersize=4, color=colours[name], label=name)
            decorate(axes, contexts)
            axes.set_title(f"{phase}, head width {width}, {dtype}", fontsize=10)
        panel_row[0].set_ylabel("times faster than dense")
    for axes in panels[-1]:
        axes.set_xlabel("context (positions)")
    figure.suptitle(f"{found['device']}, torch {found['torch']}, {found['date']}", fontsize=11)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def decorate(axes: Any, contexts: list[int]) -> None:
    """Log axes with plain numbers, and a line where nothing is won."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts], rotation=30, ha="right", fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}×"))
    axes.set_xlim(contexts[0] / 1.4, contexts[-1] * 1.4)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.grid(True, which="major", alpha=0.3)
