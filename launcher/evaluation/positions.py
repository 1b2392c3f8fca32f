"""The loss by the position in the context, of `longstride evaluate --positions`: its bins, its picture, its numbers.

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

MOST_BINS = 1024  # of positions in the JSON
DRAWN_BINS = 48
LEAST_BYTES = 1000  # of a drawn bin: some 0.1 bits of standard error
FEWEST_BINS = 16  # are drawn of fewer bytes all the same


def position_edges(context: int, most: int = MOST_BINS) -> np.ndarray:
    """The first position of each bin, and N: every position by itself, or bins that grow with it, at most ``most``."""
    if context <= most:
        return np.arange(context + 1)
    return np.concatenate([[0], np.unique(np.geomspace(1, context, most).astype(np.int64))])


def bin_numbers(edges: np.ndarray) -> np.ndarray:
    """The bin of each position, (N,) int64, from the bins' edges."""
    return np.repeat(np.arange(len(edges) - 1), np.diff(edges))


def check_positions(output: Path) -> None:
    """Raise ConfigError where the picture, or the JSON beside it, cannot be written. Comes before any score."""
    from longstride.launcher.pictures import check_output  # with matplotlib, which a score does without

    check_output(output, "--positions")
    beside = output.with_suffix(".json")
    if beside.exists():
        raise ConfigError(f"--positions={output}: {beside} beside it exists already; nothing is overwritten")


def write_positions(output: Path, sums: ExactSums, edges: np.ndarray, line: dict[str, Any], run: Path) -> None:
    """Write FILE.png and FILE.json, of sums by the bins that ``edges`` separate and the printed ``line``.

    Raises:
        ConfigError: a file cannot be written; then neither is there.
    """
    from longstride.launcher.pictures import save_content, save_picture

    name = metrics_file.bits_of(line)[0].replace(" ", "_")
    count = "bytes" if name == "bits_per_byte" else "tokens"
    content, bits, errors = _bits(sums)
    figures = {
        key: [None if math.isnan(each) else each for each in column.tolist()]
        for key, column in ((name, bits), ("standard_error", errors))
    }
    bins = {"first": edges[:-1].tolist(), "end": edges[1:].tolist(), count: content.tolist(), **figures}
    beside = output.with_suffix(".json")
    figure = draw_positions(sums, edges, line, run)
    save_content((json.dumps({"run": str(run), **line, "positions": bins}) + "\n").encode(), beside, "--positions")
    try:
        save_picture(figure, output, "--positions")
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _bits(sums: ExactSums, edges: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bytes of content, bits per byte and their standard errors, (bins,) each; of bins joined at ``edges``."""
    counts, contents = sums.counts(edges), sums.contents(edges)
    bits, errors = (
        np.array([*map(metrics_file.bits_per_byte, nats, counts, contents)])
        for nats in (sums.means(edges), sums.standard_errors(edges))
    )
    return np.array(contents), bits, errors


def draw_positions(sums: ExactSums, edges: np.ndarray, line: dict[str, Any], run: Path) -> Any:
    """Bits per byte over the position, the mean of a bin each with a band of two standard errors.

    Bins grow with the position, and have bytes enough for a mean that says something. What only the first bytes of a
    stream have of a minimum of context is left out where it is no more than one of them.
    """
    from longstride.launcher.pictures import FAINT, LINES, curves, styled

    counts = np.array(sums.contents())
    least = min(LEAST_BYTES, max(1, sums.content // FEWEST_BINS))
    start = int(np.searchsorted(edges, line["min_context"]))
    start = start if counts[:start].sum() < least else 0
    joined = joined_bins(counts, edges, start, least)
    inside, bits, errors = _bits(sums, joined)
    bounds = edges[joined] + 1  # positions from 1 on: a logarithm has no place for 0
    unit, mean = metrics_file.bits_of(line)
    unit = "bits per dimension" if "bits_per_dimension" in line else unit
    things = "pixels" if unit == "bits per pixel" else "bytes"
    with styled():
        figure, axis = curves()
        axis.stairs(bits, bounds, baseline=None, linewidth=1.6, color=LINES[0], label="mean of a bin")
        if np.isfinite(errors).any():
            low, high = np.nanmin(bits - 2 * errors), np.nanmax(bits + 2 * errors)
            room = max((high - low) / 20, 0.01)
            axis.set_ylim(low - room, high + room)
            band = {"baseline": bits - 2 * errors, "fill": True, "alpha": 0.2, "color": LINES[0], "linewidth": 0}
            axis.stairs(bits + 2 * errors, bounds, label="± 2 standard errors, as of independent bytes", **band)
        axis.axhline(mean, color=FAINT, linewidth=1.0, linestyle="--", label=f"mean of all {mean:.4f}")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set(xlim=(bounds[0], bounds[-1]), xlabel="position in the context, from 1", ylabel=unit)
        context = f", at least {line['min_context']:,} earlier bytes" if line["min_context"] else ""
        title = f"{run.resolve().name}, step {line['step']}, {line['split']}: loss by position"
        each = f"{inside.min():,}" if inside.min() == inside.max() else f"{inside.min():,} to {inside.max():,}"
        axis.set_title(f"{title}\n{sums.content:,} {things}{context}; {each} a bin")
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def joined_bins(counts: np.ndarray, edges: np.ndarray, start: int, least: int) -> np.ndarray:
    """Which of the bins with ``counts`` begin a drawn one, from bin ``start`` on, and their number at the end.

    Drawn bins grow with the position, and hold ``least`` bytes or more where all have as many.
    """
    wanted = np.unique(np.searchsorted(edges, position_edges(int(edges[-1]), DRAWN_BINS)))
    found = [start]
    for end in wanted[wanted > start]:
        if counts[found[-1] : end].sum() >= least:
            found.append(int(end))
    if found[-1] != len(counts):  # too few are left for a bin of their own
        found = [*(found[:-1] if len(found) > 1 else found), len(counts)]
    return np.array(found)
