"""Sums without rounding, in any order and on any number of ranks."""

import math

import numpy as np
import pytest
import torch

from longstride.launcher.evaluation.exact_sums import ExactSums
from longstride.launcher.ranks.processes import Ranks

FLOATS = np.finfo(np.float32)
EXTREMES = np.array(
    [FLOATS.max, -FLOATS.max, FLOATS.tiny, FLOATS.smallest_subnormal, -0.0, 0.0, 1.0, 1e-8, -3e30, 3e30, 5.5],
    dtype=np.float32,
)


def drawn(count: int, seed: int = 0) -> np.ndarray:
    """Numbers of every magnitude, and of every number of bits."""
    generator = np.random.default_rng(seed)
    return np.ldexp(generator.standard_normal(count), generator.integers(-140, 120, count)).astype(np.float32)


def mean_of(*pieces: np.ndarray) -> float:
    sums = ExactSums()
    for piece in pieces:
        sums.add(piece)
    return sums.mean()


@pytest.mark.parametrize("values", [EXTREMES, drawn(3000), np.array([1 / 3], dtype=np.float32)], ids=len)
def test_mean_is_that_of_a_sum_rounded_once(values: np.ndarray) -> None:
    assert mean_of(values) == math.fsum(values.tolist()) / len(values)


def test_order_and_pieces_do_not_matter() -> None:
    values = drawn(5000, seed=1)
    whole = mean_of(values)
    assert whole == mean_of(values[::-1].copy()) == mean_of(*np.array_split(values, 7))
    # which a sum in float64 does not have
    assert len({float(values.astype(np.float64)[order].sum()) for order in (slice(None), slice(None, None, -1))}) == 2


def test_bins_hold_their_own_sums_and_join() -> None:
    values, bins = drawn(4000, seed=2), np.random.default_rng(3).integers(0, 9, 4000)
    bins[bins == 4] = 5
    sums = ExactSums(10)
    for part in np.array_split(np.arange(4000), 3):
        sums.add(values[part], bins[part])
    own = [values[bins == number].tolist() for number in range(10)]
    assert sums.counts() == list(map(len, own)) and sums.count == 4000
    for mean, numbers in zip(sums.means(), own, strict=True):
        assert mean == math.fsum(numbers) / len(numbers) if numbers else math.isnan(mean)
    edges = np.array([0, 1, 6, 10])
    joined = [own[0], [x for each in own[1:6] for x in each], [x for each in own[6:] for x in each]]
    assert sums.means(edges) == [math.fsum(numbers) / len(numbers) for numbers in joined]
    assert sums.mean() == math.fsum(values.tolist()) / 4000


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_bin_alone(bad: float) -> None:
    sums = ExactSums(2)
    sums.add(np.array([1, bad, 3], dtype=np.float32), np.array([0, 1, 0]))
    assert math.isnan(sums.mean()) and sums.means()[0] == 2 and math.isnan(sums.means()[1])


def test_one_rank_gathers_its_own() -> None:
    sums = ExactSums()
    sums.add(np.ones(3, dtype=np.float32))
    sums.gather(Ranks(), torch.device("cpu"))
    assert (sums.count, sums.mean()) == (3, 1.0)


def test_standard_errors_are_those_of_the_numbers() -> None:
    values = np.random.default_rng(3).exponential(size=600).astype(np.float32)
    bins = np.arange(600) % 6
    sums = ExactSums(6, squares=True)
    sums.add(values[:200], bins[:200])
    sums.add(values[200:], bins[200:])
    wanted = [values[bins == each].std(ddof=1, dtype=np.float64) / 10 for each in range(6)]
    assert sums.standard_errors() == pytest.approx(wanted, rel=1e-5)
    (joined,) = sums.standard_errors(np.array([0, 6]))
    assert joined == pytest.approx(values.std(ddof=1, dtype=np.float64) / math.sqrt(600), rel=1e-5)
    assert all(map(math.isnan, ExactSums(2).standard_errors()))
