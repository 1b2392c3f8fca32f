"""Bits per byte over a whole split, the same for any number of ranks: `longstride evaluate`."""

from longstride.launcher.evaluation.evaluate import evaluate_split
from longstride.launcher.evaluation.exact_sums import ExactSums
