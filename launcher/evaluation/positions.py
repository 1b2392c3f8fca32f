"""The loss by position for `longstride evaluate --positions`: bins, picture and JSON.

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
from longstride.launcher.files import check_new, write_new
from longstride.launcher.output import metrics_file

MOST_BINS = 1024  # of positions in the JSON
DRAWN_BINS = 48
LEAST_BYTES = 1000  # in a drawn bin, for a standard error of about 0.1 bits
FEWEST_BINS = 16  # drawn even from fewer bytes


def position_edges(context: int, most: int = MOST_BINS) -> np.ndarray:
    """Return the first position of each bin, and N. Bins are single positions, or grow, at most ``most`` bins."""
    if context <= most:
        return np.arange(context + 1)
    return np.concatenate([[0], np.unique(np.geomspace(1, context, most).astype(np.int64))])


def bin_numbers(edges: np.ndarray) -> np.ndarray:
    """Return the bin of each position, (N,) int64, from the bins' edges."""
    return np.repeat(np.arange(len(edges) - 1), np.diff(edges))


def check_positions(output: Path) -> None:
    """Raise ConfigError if the picture or its JSON cannot be written. Called before scoring."""
    check_new(output, "--positions", ".png")
    numbers = output.with_suffix(".json")
    if numbers.exists():
        raise ConfigError(f"--positions={output}: {numbers} already exists and is not overwritten")


def write_positions(output: Path, sums: ExactSums, edges: np.ndarray, line: dict[str, Any], run: Path) -> None:
    """Write FILE.png and FILE.json from the sums of bins with these edges and the printed ``line``, or neither file."""
    from longstride.launcher.pictures import save_picture  # imports matplotlib, which scoring does not need

    name = metrics_file.bits_of(line)[0].replace(" ", "_")
    count = "bytes" if name == "bits_per_byte" else "tokens"
    content, bits, errors = _bits(sums)
    figures = {
        key: [None if math.isnan(value) else value for value in column.tolist()]
        for key, column in ((name, bits), ("standard_error", errors))
    }
    bins = {"first": edges[:-1].tolist(), "end": edges[1:].tolist(), count: content.tolist(), **figures}
    numbers = output.with_suffix(".json")
    figure = draw_positions(sums, edges, line, run)
    write_new(numbers, (json.dumps({"run": str(run), **line, "positions": bins}) + "\n").encode(), "--positions")
    try:
        save_picture(figure, output, "--positions")
    except BaseException:
        numbers.unlink(missing_ok=True)
        raise


def _bits(sums: ExactSums, edges: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bytes of content, bits per byte and standard errors of each bin, or of bins joined at ``edges``."""
    counts, contents = sums.counts(edges), sums.contents(edges)
    bits, errors = (
        np.array([*map(metrics_file.bits_per_byte, nats, counts, contents)])
        for nats in (sums.means(edges), sums.standard_errors(edges))
    )
    return np.array(contents), bits, errors


def draw_positions(sums: ExactSums, edges: np.ndarray, line: dict[str, Any], run: Path) -> Any:
    """Draw bits per byte over the position: the mean of each bin, with a band of two standard errors.

    Bins grow with the position, and have enough bytes for a meaningful mean. With a minimum of context, earlier
    positions occur only at the beginning of a stream; they are omitted if they have too few bytes for a bin.
    """
    from longstride.launcher.pictures import FAINT, LINES, curves, styled

    counts = np.array(sums.contents())
    least = min(LEAST_BYTES, max(1, sums.content // FEWEST_BINS))
    start = int(np.searchsorted(edges, line["min_context"]))
    start = start if counts[:start].sum() < least else 0
    joined = join_bins(counts, edges, start, least)
    content, bits, errors = _bits(sums, joined)
    bounds = edges[joined] + 1  # positions from 1, for the logarithm
    unit, mean = metrics_file.bits_of(line)
    unit = "bits per dimension" if "bits_per_dimension" in line else unit
    things = f"{unit.removeprefix('bits per ')}s".replace("dimensions", "bytes")
    with styled():
        figure, axis = curves()
        axis.stairs(bits, bounds, baseline=None, linewidth=1.6, color=LINES[0], label="mean of a bin")
        if np.isfinite(errors).any():
            low, high = np.nanmin(bits - 2 * errors), np.nanmax(bits + 2 * errors)
            margin = max((high - low) / 20, 0.01)
            axis.set_ylim(low - margin, high + margin)
            band = {"baseline": bits - 2 * errors, "fill": True, "alpha": 0.2, "color": LINES[0], "linewidth": 0}
            axis.stairs(bits + 2 * errors, bounds, label="± 2 standard errors, as of independent bytes", **band)
        axis.axhline(mean, color=FAINT, linewidth=1.0, linestyle="--", label=f"mean of all {mean:.4f}")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set(xlim=(bounds[0], bounds[-1]), xlabel="position in the context, from 1", ylabel=unit)
        context = f", at least {line['min_context']:,} earlier bytes" if line["min_context"] else ""
        title = f"{run.resolve().name}, step {line['step']}, {line['split']}: loss by position"
        size = f"{content.min():,}" if content.min() == content.max() else f"{content.min():,} to {content.max():,}"
        axis.set_title(f"{title}\n{sums.content:,} {things}{context}; {size} a bin")
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def join_bins(counts: np.ndarray, edges: np.ndarray, start: int, least: int) -> np.ndarray:
    """Return the indices of bins that begin a drawn one, from bin ``start`` on, and the number of bins.

    Drawn bins grow with the position, and have at least ``least`` bytes, unless there are fewer in all.
    """
    ends = np.unique(np.searchsorted(edges, position_edges(int(edges[-1]), DRAWN_BINS)))
    starts = [start]
    for end in ends[ends > start]:
        if counts[starts[-1] : end].sum() >= least:
            starts.append(int(end))
    if starts[-1] != len(counts):  # the rest is too small for its own bin
        starts = [*(starts[:-1] if len(starts) > 1 else starts), len(counts)]
    return np.array(starts)
