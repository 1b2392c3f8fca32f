"""The Triton backend alone: its tiles, passes and slices, in the interpreter where there is no card."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from longstride.kernels import ConfigError, num_pairs, sparse_attention
from longstride.kernels.backends import triton as backend
from longstride.kernels.backends.triton import configurations, launch_plan
from longstride.kernels.backends.triton.packing import groups
from longstride.kernels.patterns import Block, Column, Dense, Fixed, Local, Pattern, Strided, Summary
from longstride.kernels.plan import edge_of
from tests.harness.backends import DEVICES, WITH_TRITON, repeats, use_tiles
from tests.harness.oracles import (
    Shape,
    check_against_reference,
)

pytestmark = WITH_TRITON

CLOSED: tuple[Pattern | list[Pattern], ...] = (
    Column(8),
    Block(8),
    Block(24),
    Strided(6),
    Fixed(8, 2),
    [Block(12), Fixed(8, 2)],
    [Column(6), Strided(8)],
    [Column(6), Local(5)],
)


# By default each pattern with runs at once, in tiles that several fit or one, and every second one without.
WAYS = [
    pytest.param(pattern, closed, grad_lse, marks=() if is_default and grad_lse else pytest.mark.campaign)
    for i, pattern in enumerate(CLOSED)
    for closed, is_default in ((None, i % 2 == 0), (16, i % 2 == 1), (32, i % 2 == 0))
    for grad_lse in (False, True)
]


@pytest.mark.parametrize("pattern, closed, grad_lse", WAYS, ids=str)
def test_triton_serves_runs_that_stand_alone(
    pattern: Pattern | list[Pattern], closed: int | None, grad_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one kernel for all gradients where a run fits its tile, by the others where not; several runs in a tile."""
    use_tiles(monkeypatch, (16, 16), closed)
    shape = Shape(1, 2, 72, 16, 24)
    check_against_reference("triton", pattern, torch.float16, shape, grad_lse=grad_lse, device=DEVICES["triton"])


@pytest.mark.parametrize("context, edge, served", [(72, 16, True), (72, 8, False), (73, 16, False)])
def test_closed_runs_are_served_at_once_where_they_fit(context: int, edge: int, served: bool) -> None:
    candidates = configurations.squares((edge, 1, 1.0))
    for heads in ((Block(12),), (Column(6), Fixed(12, 2))):
        assert (configurations.closed_choice(candidates, heads, context) is not None) == served
    assert configurations.closed_choice(candidates, (Block(12), Local(3)), context) is None


@pytest.mark.parametrize(
    "heads, served",
    [
        ((Block(12),), [True]),
        ((Strided(6),), [False, True]),  # the column, after the window
        ((Fixed(12, 2),), [False]),  # a block and summaries in one pass
        ((Column(6), Block(12)), [True]),
        ((Column(6), Local(3)), [False]),
        ((Block(24),), [False]),
    ],
    ids=str,
)
def test_passes_with_nothing_but_closed_runs_take_their_own_forward_kernel(
    heads: tuple[Pattern, ...], served: list[bool]
) -> None:
    large, squares = (configurations.Configuration(16, 16, 1, 1),), configurations.squares((16, 1, 1.0))
    choices = configurations.choose(large, groups(heads, 72, "queries", "all"), "queries", squares)
    assert [choice.closed for choice in choices] == served


@pytest.mark.parametrize(
    "pattern",
    [
        Fixed(8, 2),
        Strided(8),
        *(pytest.param(Summary(8, 2, include_self=own), marks=pytest.mark.campaign) for own in (False, True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("context", [pytest.param(64, marks=pytest.mark.campaign), 43])
def test_triton_splits_passes_over_keys(pattern: Pattern, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of few tiles of queries, or none, whose sums are added up in order: what few keys cost a large card."""
    monkeypatch.setattr(launch_plan.Planner, "num_slices", lambda *_: 4)
    for heads in (pattern, [pattern, Local(9)]):
        check_against_reference("triton", heads, torch.bfloat16, Shape(1, 2, context, 16, 24), device=DEVICES["triton"])


@pytest.mark.parametrize(
    "pattern, edges",
    [
        pytest.param(pattern, edges, marks=repeats(i + j))
        for i, pattern in enumerate((Column(8), Block(24), Strided(8), Fixed(24, 3), Local(40)))
        for j, edges in enumerate(((16, 32), (32, 16), (64, 64)))
    ],
    ids=str,
)
def test_triton_tiles_may_have_any_edges(
    pattern: Pattern, edges: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of 9 and blocks of 24 leave some rows of a tile unused."""
    use_tiles(monkeypatch, edges, closed=None)
    check_against_reference(
        "triton", pattern, torch.float16, Shape(1, 2, 72, 16, 16), grad_lse=True, device=DEVICES["triton"]
    )


def test_triton_says_why_it_cannot_run() -> None:
    wide = torch.empty(1, 1, 4, 300)
    with pytest.raises(ConfigError, match="300 exceeds 256"):
        sparse_attention(wide, wide, wide, Dense(), backend="triton")
    meta = torch.empty(1, 1, 4, 16, device="meta")
    assert "no kernels for meta" in str(backend.why_not(meta, meta, meta))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card needs no interpreter")
def test_triton_asks_for_the_interpreter_on_the_cpu() -> None:
    program = "import torch, longstride.kernels.backends.triton as t\nq = torch.empty(1, 1, 4, 16)\n"
    program += "print(t.why_not(q, q, q))"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=_without_interpreter()
    )
    assert "set TRITON_INTERPRET=1" in said.stdout


def test_triton_is_not_imported_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    q = torch.empty(1, 1, 4, 16)
    assert backend.why_not(q, q, q) == "triton is not installed"


def _without_interpreter() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.parametrize("pattern", [Local(16), Strided(8), Fixed(16, 4), Dense()], ids=repr)
def test_visited_pairs_are_the_tiles_of_the_forward_passes(pattern: Pattern) -> None:
    """Counted anew, from the bounds of each tile of rows: all columns from the first that one reads to the last."""
    context, like = 96, torch.empty(0, 16, device=DEVICES["triton"])
    rows = like.new_empty(1, 1, context, 16)
    made = launch_plan.Planner((rows, rows, rows), (pattern,))
    visited = 0
    for group, choice in zip(
        groups((pattern,), context, "queries", "all"), made.choices("forward", "all"), strict=True
    ):
        rows_of_tile, columns_of_tile = choice.configuration.tile_sizes("queries")
        for one in group[0]:
            if choice.closed:  # a square for the runs that fit into it
                visited += -(-one.num_rows // edge_of(one, columns_of_tile)) * columns_of_tile**2
                continue
            edge = edge_of(one, rows_of_tile) if choice.aligned else rows_of_tile
            for first in range(0, one.num_rows, edge):
                last = min(first + edge, one.num_rows) - 1
                width = int(one.intervals.high[last]) - int(one.intervals.low[first])
                visited += -(-max(0, width) // columns_of_tile) * columns_of_tile * rows_of_tile
    found = num_pairs(pattern, context, like, "triton")
    assert found == visited >= num_pairs(pattern, context)
