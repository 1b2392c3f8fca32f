"""`longstride evaluate`: bits per byte over a complete split, the same for any number of ranks."""

from longstride.launcher.evaluation.evaluate import evaluate_split
from longstride.launcher.evaluation.exact_sums import ExactSums
