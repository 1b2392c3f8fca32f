"""The Triton backend, in the interpreter where there is no card, against fp64."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from longstride.kernels import ConfigError, sparse_attention
from longstride.kernels.backends import triton as backend
from longstride.kernels.backends.triton import call, configurations
from longstride.kernels.backends.triton.call import boxes, describable
from longstride.kernels.backends.triton.packing import Shape as Shape_
from longstride.kernels.backends.triton.packing import groups
from longstride.kernels.patterns import Block, Column, Dense, Fixed, Local, Pattern, Strided, Summary
from longstride.kernels.plan import Side
from tests.harness.oracles import (
    Inputs,
    Shape,
    attention_and_gradients,
    check_against_reference,
    exact,
    example_patterns,
    make_inputs,
)

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [*HALVES, torch.float32]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


in_the_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="fp64 runs in the interpreter alone")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that small contexts have full, partial, ragged and absent ones."""
    use_tiles(monkeypatch, (16, 16), closed=16)


def use_tiles(
    monkeypatch: pytest.MonkeyPatch, edges: tuple[int, int], closed: int | None, described: bool = False
) -> None:
    """Have the interpreter use these edges, and serve closed runs of up to ``closed`` rows at once, or not at all."""
    row = configurations.same_for_all(*edges, 1, 1)
    row = configurations.described(row) if described else row
    if closed is not None:
        row = row._replace(closed=configurations.squares((closed, 1, 1.0)))
    monkeypatch.setitem(configurations.ARCHITECTURES, "interpreter", {configurations.Widest(8, 256): row})


@pytest.mark.parametrize("context", [53, 72])  # orders and intervals as vectors, and in closed form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", example_patterns(), ids=str)
def test_triton_is_within_precision(pattern: Pattern, dtype: torch.dtype, context: int) -> None:
    check_against_reference("triton", pattern, dtype, Shape(1, 2, context, 24, 16), device=DEVICE)


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


@pytest.mark.parametrize("grad_lse", [pytest.param(False, marks=pytest.mark.campaign), True])
@pytest.mark.parametrize("closed", [None, 16, 32])
@pytest.mark.parametrize("pattern", CLOSED, ids=str)
def test_triton_serves_runs_that_stand_alone(
    pattern: Pattern | list[Pattern], closed: int | None, grad_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one kernel for all gradients where a run fits its tile, by the others where not; several runs in a tile."""
    use_tiles(monkeypatch, (16, 16), closed)
    shape = Shape(1, 2, 72, 16, 24)
    check_against_reference("triton", pattern, torch.float16, shape, grad_lse=grad_lse, device=DEVICE)


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
    check_against_reference("triton", pattern, torch.float16, Shape(1, 2, context, 48, 16), device=DEVICE)


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


@pytest.mark.parametrize("context, edge, served", [(72, 16, True), (72, 8, False), (73, 16, False)])
def test_closed_runs_are_served_at_once_where_they_fit(context: int, edge: int, served: bool) -> None:
    candidates = configurations.squares((edge, 1, 1.0))
    for heads in ((Block(12),), (Column(6), Fixed(12, 2))):
        assert (configurations.closed_choice(candidates, heads, context) is not None) == served
    assert configurations.closed_choice(candidates, (Block(12), Local(3)), context) is None


@pytest.mark.parametrize("width, value_width", [(16, 24), (64, 64), (96, 40), (128, 128), (256, 256)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_serves_every_width(width: int, value_width: int, dtype: torch.dtype) -> None:
    check_against_reference(
        "triton", Strided(8), dtype, Shape(1, 1, 37, width, value_width), grad_lse=True, device=DEVICE
    )


# Each width and each type at least once by default; test_triton_serves_every_width has them all, of one pattern.
DEFAULT_WIDTHS = [(16, torch.bfloat16), (64, torch.float16), (64, torch.float32), (128, torch.bfloat16)]
OTHER_WIDTHS = [(w, d) for w in (16, 64, 128, 256) for d in DTYPES if (w, d) not in DEFAULT_WIDTHS]


@pytest.mark.parametrize(
    ("width", "dtype"),
    [*DEFAULT_WIDTHS, *(pytest.param(*each, marks=pytest.mark.campaign) for each in OTHER_WIDTHS)],
    ids=str,
)
@pytest.mark.parametrize("pattern", example_patterns(), ids=str)
def test_triton_serves_every_pattern_dtype_and_width(
    pattern: Pattern, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiles(monkeypatch, (32, 32), closed=32)
    check_against_reference("triton", pattern, dtype, Shape(1, 1, 72, width, width), device=DEVICE)


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 64])
@pytest.mark.parametrize("pattern", [Dense(), Column(4), Fixed(4, 1)], ids=str)
def test_triton_serves_ragged_contexts(pattern: Pattern, context: int) -> None:
    batch = 2 if context > 2 else 24  # enough rows for a mean error
    check_against_reference(
        "triton", pattern, torch.float16, Shape(batch, 1, context, 16, 16), seed=context, device=DEVICE
    )


@pytest.mark.parametrize(
    "patterns",
    [
        [Local(20), Column(3), Fixed(8, 2)],
        [Fixed(8, 2), Strided(8), Summary(8, 2, include_self=True)],
        [Summary(8, 2, num_summaries=3), Dense(), Summary(8, 2, num_summaries=3)],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_heads_may_differ(patterns: list[Pattern], dtype: torch.dtype) -> None:
    check_against_reference("triton", patterns, dtype, Shape(2, 3, 45, 16, 16), grad_lse=True, device=DEVICE)


@pytest.mark.parametrize(
    "pattern",
    [
        Fixed(8, 2),
        Strided(8),
        *(pytest.param(Summary(8, 2, include_self=own), marks=pytest.mark.campaign) for own in (False, True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("context", [64, 75])
def test_triton_splits_passes_over_keys(pattern: Pattern, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of one tile of queries, whose sums are added up in order: what few keys cost a large card."""
    monkeypatch.setattr(configurations, "SHORTEST_SLICE", 1)
    monkeypatch.setattr(call, "num_processors", lambda device: 64)
    for heads in (pattern, [pattern, Local(9)]):
        check_against_reference("triton", heads, torch.bfloat16, Shape(1, 2, context, 16, 24), device=DEVICE)


@pytest.mark.parametrize("edges", [(16, 32), (32, 16), (64, 64)])
@pytest.mark.parametrize("pattern", [Column(8), Block(24), Strided(8), Fixed(24, 3), Local(40)], ids=str)
def test_triton_tiles_may_have_any_edges(
    pattern: Pattern, edges: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of 9 and blocks of 24 leave some rows of a tile unused."""
    use_tiles(monkeypatch, edges, closed=None)
    check_against_reference("triton", pattern, torch.float16, Shape(1, 2, 72, 16, 16), grad_lse=True, device=DEVICE)


@pytest.mark.parametrize("scale", [0.5, 2.0, -0.3, 0.0])
def test_triton_takes_any_scale(scale: float) -> None:
    check_against_reference("triton", Fixed(8, 2), torch.float16, Shape(1, 2, 33, 16, 16), scale=scale, device=DEVICE)


@pytest.mark.parametrize("pattern", [Strided(4), Fixed(4, 1), Summary(4, 1)], ids=str)
@in_the_interpreter
def test_triton_gradient_passes_gradcheck(pattern: Pattern) -> None:
    inputs = make_inputs(Shape(1, 1, 17, 3, 2), torch.float64)
    leaves = [t.clone().requires_grad_() for t in inputs[:3]]
    sees = pattern.mask(torch.arange(17)[:, None], torch.arange(17)[None, :]).any(1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = sparse_attention(q, k, v, pattern, backend="triton", return_lse=True)
        return out, lse[..., sees]  # elsewhere -inf, which has no difference quotient

    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


@in_the_interpreter
def test_triton_agrees_with_fp64_in_fp64() -> None:
    inputs = make_inputs(Shape(1, 2, 40, 24, 16), torch.float64, grad_lse=True)
    found = _run(inputs, Strided(8))
    for name, wanted in exact(inputs, Strided(8)).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-12)


def test_triton_rows_without_keys_are_zero() -> None:
    inputs = make_inputs(Shape(1, 2, 40, 16, 16), torch.float16, grad_lse=True)
    assert inputs.grad_lse is not None
    inputs.grad_lse[:, :, :6] = float("nan")  # as a merge of two -inf hands back
    found = _run(inputs, Summary(8, 2))
    assert torch.equal(found["out"][:, :, :6], torch.zeros(1, 2, 6, 16, dtype=torch.float16))
    assert bool((found["lse"][:, :, :6] == float("-inf")).all())
    assert torch.equal(found["dq"][:, :, :6], torch.zeros(1, 2, 6, 16, dtype=torch.float16))
    assert all(bool(found[name].isfinite().all()) for name in ("out", "dq", "dk", "dv"))
    untouched = [i for i in range(40) if i % 8 < 6]  # keys that no query reads
    assert not found["dk"][:, :, untouched].any() and not found["dv"][:, :, untouched].any()


def test_triton_reads_any_strides() -> None:
    shape = Shape(2, 2, 20, 24, 16)
    plain = make_inputs(shape, torch.float32)
    packed = torch.cat([plain.q, plain.k, plain.v], -1).transpose(1, 2).contiguous().transpose(1, 2)
    q, k, v = packed.split([24, 24, 16], -1)  # heads behind positions, widths side by side
    columns_apart = plain.grad_out.transpose(-1, -2).contiguous().transpose(-1, -2)
    strided = Inputs(q, k, v, columns_apart, None)
    assert not any(t.is_contiguous() for t in strided[:4])
    for pattern in (Fixed(8, 2), Column(8)):
        found, wanted = _run(strided, pattern), _run(plain, pattern)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_triton_takes_an_expanded_gradient() -> None:
    leaves = [t.to(DEVICE).requires_grad_() for t in make_inputs(Shape(1, 1, 20, 16, 16), torch.float32)[:3]]
    found = torch.autograd.grad(sparse_attention(*leaves, Local(4), backend="triton").sum(), leaves)
    wanted = torch.autograd.grad(sparse_attention(*leaves, Local(4), backend="reference").sum(), leaves)
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w)


@pytest.mark.parametrize("pattern", [Strided(8), Fixed(8, 2)], ids=str)
def test_triton_gives_the_same_bits_twice(pattern: Pattern) -> None:
    inputs = make_inputs(Shape(1, 2, 50, 16, 16), torch.bfloat16, grad_lse=True)
    first, second = _run(inputs, pattern), _run(inputs, pattern)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_triton_lets_overflow_through(which: int, value: float) -> None:
    inputs = make_inputs(Shape(1, 1, 40, 16, 16), torch.float16)
    inputs[which][0, 0, 9] = value
    found = _run(inputs, Strided(8))
    assert any(not bool(found[name].isfinite().all()) for name in ("dq", "dk", "dv"))
    if which < 3:
        assert not bool(found["out"][0, 0, 9].isfinite().all())
        assert bool(found["out"][0, 0, :8].isfinite().all()) or which == 2  # 0 x inf in a tile is not masked away


@pytest.mark.parametrize("exponent", [0, 8, 16])
def test_triton_gradients_survive_a_loss_scale(exponent: int) -> None:
    plain = make_inputs(Shape(1, 1, 40, 64, 64), torch.float16)
    scaled = plain._replace(grad_out=plain.grad_out * 2.0**-16 * 2.0**exponent)
    check_against_reference("triton", Local(16), torch.float16, Shape(1, 1, 40, 64, 64), inputs=scaled, device=DEVICE)


@pytest.mark.parametrize("pattern", example_patterns(), ids=str)
def test_triton_later_positions_change_nothing_earlier(pattern: Pattern) -> None:
    changed = 23  # inside a tile, a block and a window
    inputs = [t.to(DEVICE) for t in make_inputs(Shape(1, 3, 40, 16, 16), torch.float32)[:3]]
    before = sparse_attention(*inputs, pattern, backend="triton", return_lse=True)
    for tensor in inputs:
        tensor[:, :, changed:] += 1
    after = sparse_attention(*inputs, pattern, backend="triton", return_lse=True)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[:, :, :changed], other[:, :, :changed])
        assert not torch.equal(one[:, :, changed:], other[:, :, changed:])


@pytest.mark.parametrize(
    "pattern", [Local(2**31 - 1), Local(2**62), Block(2**31), Column(2**40), Fixed(2**31, 2), Strided(2**33)], ids=str
)
def test_triton_serves_sizes_far_beyond_the_context(pattern: Pattern) -> None:
    check_against_reference("triton", pattern, torch.float32, Shape(1, 1, 40, 16, 16), device=DEVICE)


def test_triton_serves_no_heads_at_all() -> None:
    out, lse = backend.forward(*(torch.empty(0, 2, 8, 16, device=DEVICE) for _ in range(3)), (Dense(), Dense()), 1.0)
    assert out.shape == (0, 2, 8, 16) and lse.shape == (0, 2, 8)


def test_triton_says_why_it_cannot_run() -> None:
    wide = torch.empty(1, 1, 4, 300)
    with pytest.raises(ConfigError, match="300 exceeds 256"):
        sparse_attention(wide, wide, wide, Dense(), backend="triton")
    meta = torch.empty(1, 1, 4, 16, device="meta")
    assert "no kernels for meta" in str(backend.why_not(meta, meta, meta))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card needs no interpreter")
def test_triton_asks_for_the_interpreter_on_the_cpu() -> None:
    program = (
        "import torch, longstride.kernels.backends.triton as t\nq = torch.empty(1, 1, 4, 16)\nprint(t.why_not(q, q, q))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=_without_interpreter()
    )
    assert "set TRITON_INTERPRET=1" in said.stdout


def test_triton_is_not_imported_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    q = torch.empty(1, 1, 4, 16)
    assert backend.why_not(q, q, q) == "triton is not installed"


def _run(inputs: Inputs, pattern: Pattern) -> dict[str, torch.Tensor]:
    return attention_and_gradients(
        lambda q, k, v: sparse_attention(q, k, v, pattern, backend="triton", return_lse=True), inputs, DEVICE
    )


def _without_interpreter() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
