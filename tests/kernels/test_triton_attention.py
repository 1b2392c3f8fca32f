"""The Triton backend alone: its tiles, passes and slices, in the interpreter where there is no card."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from longstride.kernels import ConfigError, num_pairs, selected_attention, sparse_attention
from longstride.kernels.attention import head_patterns
from longstride.kernels.backends import triton as backend
from longstride.kernels.backends.triton import call, configurations, launch, selected
from longstride.kernels.backends.triton.call import boxes, describable
from longstride.kernels.backends.triton.packing import Shape as Shape_
from longstride.kernels.backends.triton.packing import groups
from longstride.kernels.patterns import BigBird, Block, Column, Dense, Fixed, Local, Pattern, Strided, Summary
from longstride.kernels.plan import Side, edge_of
from longstride.kernels.selections import Selection, recent_members
from tests.harness.backends import DEVICES, WITH_TRITON, repeats, use_tiles
from tests.harness.oracles import (
    Inputs,
    Shape,
    allowed_by,
    check_against_reference,
    exact,
    heads_to_see,
    make_inputs,
)
from tests.kernels.test_selections import selections
from tests.kernels.test_triton_selections import on_device

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


# Each kind of edges and of context once by default.
DEFAULT_TILES = [((16, 16), 64), ((32, 16), 53)]
OTHER_TILES = [((16, 16), 53), ((32, 16), 64), ((16, 32), 64), ((16, 32), 53)]


@pytest.mark.parametrize(
    ("edges", "context"), [*DEFAULT_TILES, *(pytest.param(*each, marks=pytest.mark.campaign) for each in OTHER_TILES)]
)
@pytest.mark.parametrize(
    "pattern",
    [Local(11), Column(2), Column(4), Summary(8, 2), Fixed(16, 4), Strided(4), Fixed(8, 2, num_summaries=2)],
    ids=str,
)
def test_triton_reads_tiles_through_descriptors(
    pattern: Pattern, context: int, edges: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiles(monkeypatch, edges, closed=None, described=True)
    # A width that is padded; the interpreter of triton 3.5 counts a stride's alignment in elements.
    shape = Shape(1, heads_to_see(pattern), context, 48, 16)
    check_against_reference("triton", pattern, torch.float16, shape, device=DEVICES["triton"])


@pytest.mark.parametrize(
    "pattern, context, side_by_side, served",
    [
        (Local(11), 53, True, True),
        (Local(40), 64, False, True),
        pytest.param(Dense(), 64, True, True, marks=pytest.mark.campaign),
        pytest.param([Block(24), Local(9)], 75, False, True, marks=pytest.mark.campaign),
        (Fixed(8, 2), 64, False, False),
    ],
    ids=str,
)
def test_warps_that_specialise_compute_the_same(
    pattern: Pattern | list[Pattern], context: int, side_by_side: bool, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the interpreter, where one warp does all of it; what does not fit goes to the ordinary kernel."""
    use_tiles(monkeypatch, (32, 16), closed=None, specialized=True)
    given, asked = launch.specialized_forward, []
    monkeypatch.setattr(launch, "specialized_forward", lambda *args: asked.append(given(*args)) or asked[-1])
    shape = Shape(2, 2, context, 32, 16, key_heads=1 if side_by_side else None)
    inputs = make_inputs(shape, torch.float16)
    if side_by_side:
        inputs = Inputs(*(x if x is None else x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
    check_against_reference("triton", pattern, torch.float16, shape, inputs=inputs, device=DEVICES["triton"])
    assert asked == [served]


def test_heads_may_lie_apart_or_side_by_side_for_descriptors_of_two_axes() -> None:
    tensor = torch.arange(2 * 3 * 5 * 16.0).view(2, 3, 5, 16)
    side_by_side = torch.arange(2 * 5 * 9 * 16.0).view(2, 5, 9, 16).transpose(1, 2)[:, 3:6]  # k of rows of q, k and v
    for one in (tensor, side_by_side):
        flat = call.flat_of(one)
        assert flat is not None
        plane = one.as_strided((flat.rows, flat.columns), (one.stride(2), 1))
        for batch in range(2):
            for head in range(3):
                row, column = batch * flat.row_of_batch + head * flat.row_of_head, head * flat.column_of_head
                assert torch.equal(plane[row : row + 5, column : column + 16], one[batch, head])
    assert call.flat_of(tensor.transpose(2, 3)) is None and call.flat_of(tensor[:, :, :1].expand(-1, -1, 5, -1)) is None


ROUNDS = Selection(
    tuple(recent_members(torch.arange(75).mul(step).remainder(4).expand(1, 1, 75), window=9) for step in (1, 3)),
    9,
    disjoint=False,
)


@pytest.mark.parametrize(
    "reads, context, ways",
    [
        pytest.param(Local(11), 75, {}, id="one pass"),
        pytest.param(Local(11), 64, {"described": True}, id="by descriptors"),
        pytest.param(Local(11), 75, {"specialized": True}, id="by warps that specialise"),
        pytest.param(Fixed(16, 4), 64, {"described": True}, id="two segments"),
        pytest.param(Strided(8), 64, {}, id="resumed"),
        pytest.param(Summary(8, 2), 75, {}, id="rows without keys"),
        pytest.param(BigBird(4, 2, 1, 2), 75, {}, id="stairs, resumed lists"),
        pytest.param(ROUNDS, 75, {}, id="overlapping parts"),
    ],
)
def test_what_is_not_finite_reaches_no_row_that_does_not_read_it(
    reads: Pattern | Selection, context: int, ways: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of q, k or v of each batch entry but the first is poisoned; all others hold the same numbers."""
    use_tiles(monkeypatch, (32, 16), closed=None, **ways)
    nan, inf = float("nan"), float("inf")
    poisons = [("q", nan), ("q", inf), ("k", nan), ("k", -inf), ("v", nan), ("v", inf)]
    one = make_inputs(Shape(1, 1, context, 16, 16), torch.float16)
    tensors = {name: x.repeat(1 + len(poisons), 1, 1, 1) for name, x in zip("qkv", one[:3], strict=True)}
    row = context // 3
    for entry, (name, value) in enumerate(poisons, 1):
        tensors[name][entry, 0, row, 5] = value
    on_card = (x.to(DEVICES["triton"]) for x in tensors.values())
    if isinstance(reads, Selection):
        parts = (part._replace(**_expanded(part._asdict(), 1 + len(poisons))) for part in reads.parts)
        there = Selection(tuple(parts), reads.span, reads.disjoint)
        out, lse = (x.cpu() for x in selected_attention(*on_card, there, backend="triton", return_lse=True))
    else:
        out, lse = (x.cpu() for x in sparse_attention(*on_card, reads, backend="triton", return_lse=True))
    allowed = allowed_by(reads, 1, context).view(context, context)
    assert out[0].isfinite().all()
    for entry, (name, _) in enumerate(poisons, 1):
        readers = torch.arange(context) == row if name == "q" else allowed[:, row]
        assert torch.equal(out[entry, 0, ~readers], out[0, 0, ~readers]), (name, "crossed")
        same_lse = ~readers if name != "v" else torch.ones_like(readers)
        assert torch.equal(lse[entry, 0, same_lse], lse[0, 0, same_lse]), (name, "crossed into lse")
        for reader in readers.nonzero().flatten().tolist():
            keys = allowed[reader]
            q, k, v = (x[entry, 0].double() for x in tensors.values())
            wanted = torch.softmax(q[reader] @ k[keys].T / 4, 0) @ v[keys]
            assert not (out[entry, 0, reader].isfinite() & ~wanted.isfinite()).any(), (name, reader)


def _expanded(part: dict[str, Tensor | None], batch: int) -> dict[str, Tensor | None]:
    """The orders and bounds of a part for so many contexts, where the kernels run."""
    return {name: x if x is None else x.to(DEVICES["triton"]).expand(batch, *x.shape[1:]) for name, x in part.items()}


def test_descriptors_serve_every_order_of_whole_blocks() -> None:
    def shapes(pattern: Pattern, context: int, rows: Side) -> list[Shape_]:
        passes = range(len(groups((pattern,), context, rows, "all")))
        found = (boxes((pattern,), context, rows, "all", number, 32, 16, True) for number in passes)
        return [box.shape for one in found for box in one]

    natural, column, blocks, addresses = Shape_.NATURAL, Shape_.COLUMN, Shape_.BLOCKS, Shape_.ADDRESSES
    assert shapes(Local(9), 64, "queries") == shapes(Summary(8, 2), 64, "keys") == [natural]
    assert shapes(Column(2), 64, "queries") == shapes(Column(2), 64, "keys") == [column]
    assert shapes(Summary(8, 2), 64, "queries") == [blocks]
    assert shapes(Fixed(8, 2), 64, "queries") == [natural, blocks]
    assert shapes(Column(8), 64, "queries") == [addresses]  # four columns in a tile of rows
    assert shapes(Column(2), 63, "queries") == shapes(Summary(8, 3), 64, "queries") == [addresses]


def test_tensors_that_are_not_aligned_are_read_by_addresses() -> None:
    whole = torch.empty(2, 2, 32, 24, dtype=torch.float16)
    assert (
        describable(whole) and not describable(whole, whole[..., 1:9]) and not describable(whole[..., :12].contiguous())
    )
    assert not describable(whole[:, :1].expand(2, 5, 32, 24)) and not describable(whole[:, :, :1].expand_as(whole))


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
    choices = configurations.chosen(large, heads, 72, "queries", "all", squares)
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
@pytest.mark.parametrize("context", [pytest.param(64, marks=pytest.mark.campaign), 75])
def test_triton_splits_passes_over_keys(pattern: Pattern, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of few tiles of queries, or none, whose sums are added up in order: what few keys cost a large card."""
    monkeypatch.setattr(call.Call, "num_slices", lambda *_: 4)
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


# Each way once: closed runs with other parts and alone, segments, sources, slices, descriptors, lists, overlaps.
POISONED = [
    ([Column(6), Strided(8)] * 2, 32, False),
    ([Block(8), Column(8)] * 2, 16, False),
    (Fixed(8, 3), None, False),
    ([Local(11), Summary(8, 2)] * 2, None, True),
    ([Column(4), Fixed(16, 4)] * 2, None, True),
    ("any orders", None, False),
    ("rounds", None, False),
]


@pytest.mark.parametrize(
    "reads, closed, described, value",
    [
        pytest.param(*case, value, marks=repeats(i + j))
        for i, case in enumerate(POISONED)
        for j, value in enumerate((float("nan"), float("inf")))
    ],
    ids=str,
)
def test_what_is_not_finite_reaches_the_gradients_of_its_readers_alone(
    reads: Pattern | list[Pattern] | str,
    closed: int | None,
    described: bool,
    value: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One row of q in the first head, of k in the second, of v in the third, of the output's gradient in the last."""
    from longstride.kernels.backends.triton.launch import backward, selected_backward

    heads, context, row = 4, 64, 19
    use_tiles(monkeypatch, (16, 32), closed, described)
    for kind in (call.Call, selected.SelectedCall):
        monkeypatch.setattr(kind, "num_slices", lambda *_: 2)
    chosen = selections(1, heads, context)[reads] if isinstance(reads, str) else reads
    inputs = make_inputs(Shape(1, heads, context, 16, 32), torch.float32)
    wanted = exact(inputs, chosen)
    allowed = allowed_by(chosen, heads, context).expand(1, heads, context, context)[0]

    q, k, v, grad_out = (t.clone() for t in inputs[:4])
    out, lse = wanted["out"].float(), wanted["lse"].float()
    for head, tensor in enumerate((q, k, v, grad_out)):
        tensor[0, head, row] = value
    readers = [allowed[head, :, row] if head in (1, 2) else torch.arange(context) == row for head in range(heads)]
    for head in range(3):  # what a forward pass would have made of them
        out[0, head, readers[head]] = float("nan")
        if head < 2:
            lse[0, head, readers[head]] = float("nan")
    queries = torch.stack([own & allowed[head].any(-1) for head, own in enumerate(readers)])
    keys = (allowed & queries[..., None]).any(-2)
    values = keys & (torch.arange(heads) != 2)[:, None]  # weights do not depend on values

    tensors = [t.to(DEVICES["triton"]) for t in (q, k, v, out, lse)]
    if isinstance(chosen, Selection):
        found = selected_backward(grad_out.to(DEVICES["triton"]), None, *tensors, on_device(chosen), 16**-0.5)
    else:
        found = backward(grad_out.to(DEVICES["triton"]), None, *tensors, head_patterns(chosen, heads), 16**-0.5)
    for name, gradient, touched in zip(("dq", "dk", "dv"), found, (queries, keys, values), strict=True):
        gradient = gradient[0].cpu()
        assert torch.equal(~gradient.isfinite().all(-1), touched), name
        torch.testing.assert_close(gradient[~touched], wanted[name][0][~touched].float())


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
    made = call.Call(rows, rows, (pattern,))
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
