"""Sums of fp32 numbers without rounding, so that they do not depend on order or ranks.

A number is an integer of 24 bits times a power of two. Integers of one power add up exactly in 64 bits, and there are
few powers: a sum takes 2 KiB for any count of numbers.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

from longstride.launcher.ranks import Ranks

_MANTISSA_BITS = 24
_LEAST = -148  # smallest exponent from frexp for fp32, including subnormal numbers
_POWERS = 128 - _LEAST + 1
# Columns after the powers: counts of numbers, of those not finite, of those of content, and of right predictions.
_COUNT, _UNBOUNDED, _CONTENT, _HITS = range(_POWERS, _POWERS + 4)
_MOST_AT_ONCE = 2**29  # bincount adds so many integers exactly in float64; a power holds 2**39 numbers in total


class ExactSums:
    """One sum for each of ``num_bins`` bins; with ``squares`` also of squares, for standard errors."""

    def __init__(self, num_bins: int = 1, *, squares: bool = False) -> None:
        self._table = np.zeros((num_bins, _POWERS + 4), dtype=np.int64)
        self._squares = ExactSums(num_bins) if squares else None

    def add(
        self,
        values: np.ndarray,
        bins: np.ndarray | None = None,
        content: np.ndarray | None = None,
        hits: np.ndarray | None = None,
    ) -> None:
        """Add (n,) float32 numbers, each to its bin, (n,) integers; None: all to the first bin.

        ``content``, (n,) bool, says which belong to the data instead of separators; None: all. ``hits``, (n,) bool,
        says which belong to right predictions; None: nothing says it.
        """
        assert values.dtype == np.float32 and values.size < _MOST_AT_ONCE
        rows = np.zeros(values.size, dtype=np.int64) if bins is None else bins.astype(np.int64)
        finite = np.isfinite(values)
        mantissas, exponents = np.frexp(np.where(finite, values, np.float32(0)))
        powers = rows * self._table.shape[1] + (exponents - _LEAST)
        # A weight is an integer below 2**24 in float64, and so is every sum of fewer than 2**29 of them below 2**53.
        sums = np.bincount(powers, np.ldexp(mantissas.astype(np.float64), _MANTISSA_BITS), self._table.size)
        table = sums.astype(np.int64).reshape(self._table.shape)
        table[:, _COUNT] = np.bincount(rows, minlength=len(table))
        table[:, _UNBOUNDED] = np.bincount(rows[~finite], minlength=len(table))
        table[:, _CONTENT] = np.bincount(rows if content is None else rows[content], minlength=len(table))
        if hits is not None:
            table[:, _HITS] = np.bincount(rows[hits], minlength=len(table))
        self._table += table
        if self._squares is not None:
            with np.errstate(over="ignore"):
                self._squares.add(np.square(values), bins)

    def gather(self, ranks: Ranks, device: torch.device) -> None:
        """Replace these sums by those over all ranks. All ranks must call."""
        self._table = ranks.sum_int64(torch.from_numpy(self._table), device).numpy()
        if self._squares is not None:
            self._squares.gather(ranks, device)

    @property
    def count(self) -> int:
        """The count of numbers in all bins."""
        return int(self._table[:, _COUNT].sum())

    def mean(self) -> float:
        """Return the sum over all bins, rounded once, divided by the count; NaN if not finite or empty."""
        return _mean(self._table.sum(0))

    @property
    def content(self) -> int:
        """The count of numbers of content in all bins."""
        return int(self._table[:, _CONTENT].sum())

    @property
    def hits(self) -> int:
        """The count of right predictions in all bins."""
        return int(self._table[:, _HITS].sum())

    def counts(self, edges: np.ndarray | None = None) -> list[int]:
        """Return the count of each bin, or of each run of bins between ``edges``."""
        return self._join_bins(edges)[:, _COUNT].tolist()

    def contents(self, edges: np.ndarray | None = None) -> list[int]:
        """Return the count of numbers of content in each bin, or in each run of bins between ``edges``."""
        return self._join_bins(edges)[:, _CONTENT].tolist()

    def means(self, edges: np.ndarray | None = None) -> list[float]:
        """Return the mean of each bin, or of each run of bins between ``edges``, see ``mean``."""
        return [_mean(row) for row in self._join_bins(edges)]

    def standard_errors(self, edges: np.ndarray | None = None) -> list[float]:
        """Return the standard errors of ``means``, assuming independent numbers.

        NaN for fewer than two numbers, or without squares.
        """
        counts, means = self.counts(edges), self.means(edges)
        if self._squares is None:
            return [float("nan")] * len(counts)
        squares = self._squares.means(edges)
        return [
            math.sqrt(max(square - mean * mean, 0.0) / (count - 1)) if count > 1 else float("nan")
            for count, mean, square in zip(counts, means, squares, strict=True)
        ]

    def _join_bins(self, edges: np.ndarray | None) -> np.ndarray:
        return self._table if edges is None else np.add.reduceat(self._table, edges[:-1])


def _mean(row: np.ndarray) -> float:
    if row[_UNBOUNDED] or not row[_COUNT]:
        return float("nan")
    total = sum(int(integer) << power for power, integer in enumerate(row[:_POWERS]) if integer)
    return float(Fraction(total, 1 << (_MANTISSA_BITS - _LEAST))) / int(row[_COUNT])
