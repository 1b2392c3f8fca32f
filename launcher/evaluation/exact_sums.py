"""Sums of fp32 numbers without any rounding, so that neither the order nor the ranks that add them up matter.

A number is an integer of 24 bits times a power of two. Integers of one power add up in 64 bits without loss, and there
are only so many powers: a sum takes 2 KiB however many numbers it has.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

from longstride.launcher.ranks import Ranks

_MANTISSA_BITS = 24
_LEAST = -148  # of the exponents that frexp gives for fp32, subnormal numbers included
_POWERS = 128 - _LEAST + 1
# The columns behind them: how many numbers, how many that are not finite, and how many of content.
_COUNT, _UNBOUNDED, _CONTENT = _POWERS, _POWERS + 1, _POWERS + 2
_MOST_AT_ONCE = 2**29  # whose integers bincount adds in float64 without loss; a power holds 2**39 numbers in all


class ExactSums:
    """One sum for each of ``num_bins`` bins; with ``squares`` those of the squares too, for standard errors."""

    def __init__(self, num_bins: int = 1, *, squares: bool = False) -> None:
        self._table = np.zeros((num_bins, _POWERS + 3), dtype=np.int64)
        self._squares = ExactSums(num_bins) if squares else None

    def add(self, values: np.ndarray, bins: np.ndarray | None = None, content: np.ndarray | None = None) -> None:
        """Add (n,) float32 numbers, each to its bin, (n,) integers; all to the first one where there are no bins.

        ``content``: (n,) bool, which of them are of the data and not of separators; None: all are.
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
        self._table += table
        if self._squares is not None:
            with np.errstate(over="ignore"):
                self._squares.add(np.square(values), bins)

    def gather(self, ranks: Ranks, device: torch.device) -> None:
        """Make these the sums over all ranks. All ranks must call."""
        self._table = ranks.sum_int64(torch.from_numpy(self._table), device).numpy()
        if self._squares is not None:
            self._squares.gather(ranks, device)

    @property
    def count(self) -> int:
        """How many numbers there are, in all bins."""
        return int(self._table[:, _COUNT].sum())

    def mean(self) -> float:
        """The sum over all bins, rounded once, over the count; NaN where a number was not finite or there is none."""
        return _mean(self._table.sum(0))

    @property
    def content(self) -> int:
        """How many numbers of content there are, in all bins."""
        return int(self._table[:, _CONTENT].sum())

    def counts(self, edges: np.ndarray | None = None) -> list[int]:
        """The count of each bin, or of each run of bins between ``edges``."""
        return self._joined(edges)[:, _COUNT].tolist()

    def contents(self, edges: np.ndarray | None = None) -> list[int]:
        """How many numbers of content each bin has, or each run of bins between ``edges``."""
        return self._joined(edges)[:, _CONTENT].tolist()

    def means(self, edges: np.ndarray | None = None) -> list[float]:
        """The mean of each bin, or of each run of bins between ``edges``, as ``mean`` has it."""
        return [_mean(row) for row in self._joined(edges)]

    def standard_errors(self, edges: np.ndarray | None = None) -> list[float]:
        """Of each of the ``means``, as if all numbers were independent; NaN for fewer than two, or without squares."""
        counts, means = self.counts(edges), self.means(edges)
        if self._squares is None:
            return [float("nan")] * len(counts)
        squares = self._squares.means(edges)
        return [
            math.sqrt(max(square - mean * mean, 0.0) / (count - 1)) if count > 1 else float("nan")
            for count, mean, square in zip(counts, means, squares, strict=True)
        ]

    def _joined(self, edges: np.ndarray | None) -> np.ndarray:
        return self._table if edges is None else np.add.reduceat(self._table, edges[:-1])


def _mean(row: np.ndarray) -> float:
    if row[_UNBOUNDED] or not row[_COUNT]:
        return float("nan")
    total = sum(int(integer) << power for power, integer in enumerate(row[:_POWERS]) if integer)
    return float(Fraction(total, 1 << (_MANTISSA_BITS - _LEAST))) / int(row[_COUNT])
