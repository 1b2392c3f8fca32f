"""`longstride evaluate --positions FILE.png`: the loss against the position in the context, which tells whether a model
makes use of a long one (Child et al. 2019, section 7.2 and table 3).

Letters: N positions of a context.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from longstride.kernels import ConfigError
from longstride.launcher.evaluation.exact_sums import ExactSums
from longstride.launcher.output import metrics_file

MOST_BINS = 1024
DRAWN_BINS = 48


def position_edges(context: int, most: int = MOST_BINS) -> np.ndarray:
    """The first position of each bin, and N: every position by itself, or bins that grow with it, at most ``most``."""
    if context <= most:
        return np.arange(context + 1)
    return np.concatenate([[0], np.unique(np.geomspace(1, context, most).astype(np.int64))])


def bin_numbers(edges: np.ndarray) -> np.ndarray:
    """The bin of each position, (N,) int64, from the bins' edges."""
    return np.repeat(np.arange(len(edges) - 1), np.diff(edges))


def check_positions(output: Path) -> None:
    """Raise ConfigError where the picture, or the JSON beside it, cannot be written: told before anything is scored."""
    from longstride.launcher.pictures import check_output  # with matplotlib, which a score does without

    check_output(output, "--positions")
    beside = output.with_suffix(".json")
    if beside.exists():
        raise ConfigError(f"--positions={output}: {beside} beside it exists already; nothing is overwritten")


def write_positions(output: Path, sums: ExactSums, edges: np.ndarray, line: dict[str, Any], run: Path) -> None:
    """Write FILE.png and FILE.json, of sums by the bins that ``edges`` separate and the printed ``line``.

    Raises:
        ConfigError: a file cannot be written.
    """
    from longstride.launcher.pictures import save_picture

    means = [None if math.isnan(mean) else metrics_file.bits_per_byte(mean) for mean in sums.means()]
    bins = {"first": edges[:-1].tolist(), "end": edges[1:].tolist(), "bytes": sums.counts(), "bits_per_byte": means}
    beside = output.with_suffix(".json")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(json.dumps({"run": str(run), **line, "positions": bins}) + "\n")
    except OSError as error:
        raise ConfigError(f"--positions={output}: {beside} cannot be written: {error.strerror}") from None
    save_picture(draw_positions(sums, edges, line, run), output, "--positions")


def draw_positions(sums: ExactSums, edges: np.ndarray, line: dict[str, Any], run: Path) -> Any:
    """Bits per byte over the position, the mean of a bin each; bins grow with the position."""
    from longstride.launcher.pictures import plt

    starts = np.searchsorted(edges, position_edges(int(edges[-1]), DRAWN_BINS))
    joined = np.unique(starts)
    bits = np.array([metrics_file.bits_per_byte(mean) for mean in sums.means(joined)])
    bounds = edges[joined] + 1  # positions from 1 on: a logarithm has no place for 0
    figure, axis = plt.subplots(figsize=(7, 4.2))
    unit = "bits per dimension" if "bits_per_dimension" in line else "bits per byte"
    axis.stairs(bits, bounds, baseline=None, linewidth=1.6)
    axis.axhline(
        line["bits_per_byte"], color="0.5", linewidth=0.8, linestyle="--", label=f"mean {line['bits_per_byte']:.4f}"
    )
    axis.set_xscale("log", base=2)
    axis.set_xlim(1, bounds[-1])
    axis.set_xlabel("position in the context, from 1")
    axis.set_ylabel(unit)
    seen = f", at least {line['min_context']:,} earlier bytes" if line["min_context"] else ""
    title = f"{run.resolve().name}, step {line['step']}, {line['split']}: loss by position"
    axis.set_title(f"{title}\n{line['tokens']:,} bytes; mean of each bin{seen}", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    return figure
