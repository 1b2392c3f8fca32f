"""The packed layouts of a launch."""

from __future__ import annotations

import time

import pytest
import torch

from kernels.backends.triton.packing import FIELDS, passes
from kernels.patterns import Column, Dense, Fixed, Local, Pattern, Strided, Summary

CPU = torch.device("cpu")


def test_passes_are_built_once() -> None:
    heads = (Strided(8), Strided(8))
    assert passes(heads, 40, 16, 16, "queries", CPU) is passes(heads, 40, 16, 16, "queries", CPU)


@pytest.mark.parametrize(
    "heads, num_passes, num_layouts",
    [
        ((Dense(),) * 8, 1, 1),
        ((Strided(8),) * 8, 2, 1),
        ((Local(8), Column(8), Fixed(8, 2)), 2, 3),
        (tuple(Summary(8, 2, num_summaries=3).for_head(h) for h in range(6)), 1, 3),
    ],
    ids=str,
)
def test_passes_share_the_layouts_of_equal_heads(heads: tuple[Pattern, ...], num_passes: int, num_layouts: int) -> None:
    packed = passes(heads, 40, 16, 16, "queries", CPU)
    assert len(packed) == num_passes
    assert packed[-1].table.shape == (num_layouts, len(FIELDS))
    assert packed[-1].layout_of.shape == (len(heads),)


def test_passes_end_with_the_part_that_reads_every_key() -> None:
    first, last = passes((Fixed(8, 2), Local(8)), 40, 16, 16, "keys", CPU)
    assert not first.covers and last.covers
    assert not last.rows_ordered and not last.columns_ordered  # block and local alike are natural
    num_rows = first.table[:, FIELDS.index("num_rows")].tolist()
    assert num_rows == [10, 0]  # the summary keys of fixed; local has no part here


def test_passes_of_a_million_positions_are_small() -> None:
    began = time.perf_counter()
    packed = passes((Strided(1024),) * 16, 1 << 20, 128, 64, "queries", CPU)
    assert sum(one.num_bytes() for one in packed) <= 16 * 2**20
    assert time.perf_counter() - began < 30  # a guard against N^2, not a measurement
