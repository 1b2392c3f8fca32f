"""What a launch reads: passes, segments, closed forms as integers, and the sources of a workspace."""

import numpy as np
import pytest
import torch

from longstride.kernels.backends.triton.configurations import (
    Configuration,
    balanced_slices,
    choose,
    makespan,
    num_slices,
    slices_of,
)
from longstride.kernels.backends.triton.packing import (
    FIELDS,
    UNREACHED,
    Form,
    divisor,
    groups,
    pack,
    row_edge,
)
from longstride.kernels.patterns import Block, Column, Dense, Fixed, Local, Pattern, Strided, Summary
from longstride.kernels.plan import tiles, view

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "heads, by_query, by_key",
    [
        ((Dense(),) * 8, [1], 1),
        ((Fixed(8, 2),) * 2, [2], 2),  # block and summary keys share their queries, not their keys
        ((Strided(8),) * 2, [1, 1], 2),
        ((Local(8), Column(8), Fixed(8, 2)), [2], 2),
        ((Strided(8), Fixed(8, 2)), [1, 2], 2),
        ((Summary(8, 2, include_self=True),), [2], 2),
    ],
    ids=str,
)
def test_parts_of_one_order_of_rows_share_a_pass(heads: tuple[Pattern, ...], by_query: list[int], by_key: int) -> None:
    passes = groups(heads, 40, "queries", "all")
    assert [len(group[0]) for group in passes] == by_query
    assert len(groups(heads, 40, "keys", "all")) == by_key
    one = pack(groups(heads, 40, "queries", "all")[0], 16, True, CPU)
    assert one.table.shape == (len(heads), by_query[0], len(FIELDS))


def test_whole_blocks_are_read_by_closed_forms_alone() -> None:
    plain = (Dense(), Local(9), Column(8), Block(8), Summary(8, 2), Strided(8), Fixed(8, 2))
    for pattern in (*plain, Strided(8, align="target")):
        forms = {Form.NATURAL, Form.FOLDED} if pattern in plain else {Form.NATURAL, Form.FOLDED, Form.SHIFTED}
        for number in range(len(groups((pattern,), 40, "queries", "all"))):
            one = pack(groups((pattern,), 40, "queries", "all")[number], 16, True, CPU)
            assert one.num_bytes() == 4 * (len(one.columns) * len(FIELDS) + 1), pattern
            assert {one.rows, *one.columns, *one.bounds} <= forms


@pytest.mark.parametrize("period", [1, 2, 3, 5, 24, 96, 127, 128, 1000, 12_288, 1_048_576, UNREACHED])
def test_a_division_is_a_multiplication(period: int) -> None:
    generator = torch.Generator().manual_seed(period)
    rows = torch.randint(2**31, (1000,), generator=generator).tolist()
    _, magic, bits = divisor(period)
    assert 0 < magic < 2**32
    for row in [*rows, 0, period - 1, period, 2**31 - 1, 2**31 - 1 - 2**31 % period]:
        assert (2 * row * magic >> 32) >> bits == row // period


LARGE, SMALL = Configuration(64, 64, 4, 2), Configuration(16, 16, 1, 2, 0.5)


@pytest.mark.parametrize(
    "pattern, context, wanted",
    [(Local(512), 4096, LARGE), (Dense(), 4096, LARGE), (Column(128), 3072, SMALL), (Local(8), 4096, SMALL)],
    ids=str,
)
def test_short_runs_take_small_tiles(pattern: Pattern, context: int, wanted: Configuration) -> None:
    (choice,) = choose((LARGE, SMALL), groups((pattern,), context, "queries", "all"), "queries")
    assert choice.configuration == wanted


@pytest.mark.parametrize("rows, aligned", [(24, True), (96, False), (136, False), (1024, True)])
def test_tiles_end_with_closed_runs_where_that_computes_less(rows: int, aligned: bool) -> None:
    (choice,) = choose((LARGE,), groups((Block(rows),), rows * 32, "queries", "all"), "queries")
    assert choice.aligned == aligned
    sizes = {
        kept: tiles(view(Block(rows), rows * 32, "queries"), 64, 64, row_edge(group, 64, kept)).num_pairs()
        for kept in (True, False)
        for group in [(view(Block(rows), rows * 32, "queries"),)]
    }
    assert choice.pairs == min(sizes.values())


def test_a_pass_is_split_where_its_programs_would_leave_a_card_idle() -> None:
    assert num_slices(num_programs=12, longest=96, num_processors=132) == 22
    assert num_slices(num_programs=12, longest=20, num_processors=132) == 5  # slices of four tiles at least
    assert num_slices(num_programs=1000, longest=96, num_processors=132) == 1
    assert num_slices(num_programs=0, longest=0, num_processors=132) == 1


def test_programs_are_split_where_that_evens_out_the_last_wave() -> None:
    few, whole = np.full(12, 96), np.full(264, 96)
    assert balanced_slices(few, 132, extra=4) == 11  # every place has one
    assert balanced_slices(np.full(12, 20), 132, extra=4) == 5  # slices of four visits at least
    assert balanced_slices(whole, 132, extra=4) == balanced_slices(np.zeros(9, np.int64), 132, extra=4) == 1
    assert balanced_slices(np.repeat(whole, 100), 132, extra=4) == 1
    # What is longest begins first: the longest alone may take as long as all others together.
    uneven = np.array([64] + [8] * 8)
    assert makespan(uneven, 2) == 64 < makespan(uneven[::-1], 2) == 96
    assert balanced_slices(uneven, 4, extra=1) == 2


def test_summary_keys_are_split_by_how_many_queries_read_them() -> None:
    """Six tiles of 16 blocks a head, visited by 190 tiles of queries down to 30: of one context, not of eight."""
    heads = (Fixed(128, 8),) * 8
    wide = Configuration(64, 128, 8, 2)
    passes = groups(heads, 12288, "keys", "all")
    (summaries, _) = choose((wide,), passes, "keys")
    slices = [slices_of(summaries, passes[0], batch, processors=132) for batch in (1, 8)]
    assert slices == [4, 1]
