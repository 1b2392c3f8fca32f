"""Pictures of verbs: drawn by matplotlib without a screen, in one style, and written to new files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no screen

from matplotlib import pyplot as plt

from longstride.launcher.files import write_new

DOTS_PER_INCH = 160
INK, FAINT = "#24292f", "#8c959f"  # of text, and of axes
# Colours of lines, which people with colour blindness can distinguish too (Okabe & Ito 2008).
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "figure.titlesize": 10,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.grid": False,
    "grid.color": "#d0d7de",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "hatch.linewidth": 0.6,
    "axes.prop_cycle": plt.cycler(color=LINES),
}


@contextmanager
def styled() -> Iterator[None]:
    """Set the style of all pictures while a figure is drawn. Also a decorator."""
    with plt.rc_context(_STYLE):
        yield


def curves(size: tuple[float, float] = (6.4, 3.8)) -> tuple[Any, Any]:
    """Create a figure with one panel of curves: (figure, axis), with a grid and without a frame on top and right."""
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    axis.grid(visible=True)
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def save_picture(figure: Any, output: Path, option: str = "--output") -> None:
    """Write a figure to a new file, and free its memory; raise ConfigError if the file cannot be written."""
    write_new(output, picture_of(figure), option)


def picture_of(figure: Any) -> bytes:
    """Return a figure as a PNG file, and free its memory."""
    picture = io.BytesIO()
    with styled():
        figure.savefig(picture, format="png", dpi=DOTS_PER_INCH)
    plt.close(figure)
    return picture.getvalue()
