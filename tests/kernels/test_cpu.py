"""The CPU backend against fp64, its gradients, its sizes, and the chunks it works by."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from longstride.kernels import sparse_attention
from longstride.kernels.attention import head_patterns
from longstride.kernels.backends.cpu import attention as cpu
from longstride.kernels.backends.cpu.chunks import MAX_PAIRS, Chunks, chunked
from longstride.kernels.patterns import Block, Column, Dense, Fixed, Local, Pattern, PatternPart, Strided, Summary
from longstride.kernels.plan import view
from tests.harness.oracles import Shape, check_against_reference, example_patterns, make_inputs

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MIXES: tuple[list[Pattern], ...] = (
    [Local(11), Column(8), Fixed(8, 2)],
    [Column(8), Local(11), Column(8)],
    [Fixed(8, 2, 3), Summary(9, 2, 3), Strided(8)],
)


def _name(pattern: Pattern) -> str:
    return str(pattern).replace(" ", "")


def _parts() -> list[PatternPart]:
    return [part for pattern in example_patterns() for head in range(3) for part in pattern.for_head(head).parts()]


def _attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | list[Pattern]) -> tuple[Tensor, Tensor]:
    found = sparse_attention(q, k, v, pattern, backend="cpu", return_lse=True)
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("width", [16, 24, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", example_patterns(), ids=_name)
def test_cpu_is_as_precise_as_dense(pattern: Pattern, dtype: torch.dtype, width: int) -> None:
    # With one key a query softmax's own backward is exactly 0, as no backward from a stored logsumexp can be: a
    # gradient of the logsumexp would hide from the oracle that there is no error to compare with.
    grad_lse = pattern != Local(1)
    for context in (72, 101):  # 72 is a multiple of both strides, 101 of none
        check_against_reference("cpu", pattern, dtype, Shape(2, 3, context, width, width), grad_lse=grad_lse)


@pytest.mark.parametrize("context", [1, 2, 7, 8, 9, 63, 200])
@pytest.mark.parametrize("pattern", example_patterns(), ids=_name)
def test_cpu_takes_any_context(pattern: Pattern, context: int) -> None:
    check_against_reference("cpu", pattern, torch.float64, Shape(1, 3, context, 16, 16), grad_lse=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_cpu_takes_one_pattern_per_head(mix: list[Pattern], dtype: torch.dtype) -> None:
    check_against_reference("cpu", mix, dtype, Shape(2, 3, 75, 16, 24), grad_lse=True)


@pytest.mark.parametrize("value_width", [1, 16, 40])
@pytest.mark.parametrize("pattern", example_patterns(), ids=_name)
def test_cpu_takes_values_of_another_width(pattern: Pattern, value_width: int) -> None:
    check_against_reference("cpu", pattern, torch.float32, Shape(2, 3, 65, 32, value_width), scale=0.3)


@pytest.mark.parametrize("pattern", example_patterns(), ids=_name)
def test_cpu_takes_inputs_that_are_not_contiguous(pattern: Pattern) -> None:
    inputs = make_inputs(Shape(2, 3, 70, 16, 16), torch.float32)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:4]]
    wide = [torch.stack([x, x], -1).flatten(-2)[..., ::2] for x in inputs[:4]]
    for strange in (apart, wide):
        assert not any(x.is_contiguous() for x in strange)
        check_against_reference(
            "cpu",
            pattern,
            torch.float32,
            Shape(2, 3, 70, 16, 16),
            inputs=inputs._replace(q=strange[0], k=strange[1], v=strange[2], grad_out=strange[3]),
        )


@pytest.mark.parametrize("pattern", example_patterns(), ids=_name)
def test_cpu_passes_gradcheck(pattern: Pattern) -> None:
    inputs = make_inputs(Shape(1, 3, 19, 3, 2), torch.float64)
    leaves = [x.requires_grad_() for x in inputs[:3]]

    def seeing(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _attend(q, k, v, pattern)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    assert torch.autograd.gradcheck(seeing, leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", [Summary(8, 2), Summary(64, 4), Summary(9, 2, 3)], ids=_name)
def test_cpu_gives_blind_rows_zeros(pattern: Pattern, dtype: torch.dtype) -> None:
    context = 70
    inputs = make_inputs(Shape(2, 3, context, 16, 16), dtype)
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    out, lse = _attend(q, k, v, pattern)
    position = torch.arange(context)
    for head, resolved in enumerate(head_patterns(pattern, 3)):
        blind = ~resolved.mask(position[:, None], position[None]).any(-1)
        assert blind.any()
        assert (out[:, head, blind] == 0).all()
        assert (lse[:, head, blind] == -math.inf).all()
        assert lse[:, head, ~blind].isfinite().all()
        # Whatever gradient arrives at such a row is of no consequence.
        grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.grad_out, torch.ones_like(lse)), retain_graph=True)
        assert all(grad.isfinite().all() for grad in grads)
        assert (grads[0][:, head, blind] == 0).all()


@pytest.mark.parametrize("pattern", example_patterns(), ids=_name)
def test_cpu_reads_no_later_position(pattern: Pattern) -> None:
    inputs = make_inputs(Shape(1, 3, 80, 16, 16), torch.float32)
    out, lse = _attend(*inputs[:3], pattern)
    for first in (1, 40, 79):
        changed = [x.clone() for x in inputs[:3]]
        for x in changed:
            x[:, :, first:] += 1.0
        later_out, later_lse = _attend(*changed, pattern)
        assert torch.equal(out[:, :, :first], later_out[:, :, :first])
        assert torch.equal(lse[:, :, :first], later_lse[:, :, :first])


def test_cpu_passes_on_what_is_not_finite() -> None:
    inputs = make_inputs(Shape(1, 1, 64, 16, 16), torch.float32)
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    out, _ = _attend(q, k, v, Strided(8))
    grad_out = inputs.grad_out.clone()
    grad_out[0, 0, 50, 3] = math.inf
    assert not all(grad.isfinite().all() for grad in torch.autograd.grad(out, (q, k, v), grad_out))
    with torch.no_grad():
        q[0, 0, 20, 0] = math.nan
    assert _attend(q, k, v, Strided(8))[0][0, 0, 20].isnan().all()


def test_cpu_says_why_not() -> None:
    x = torch.empty(1, 1, 4, 16, device="meta")
    assert "CPU tensors" in str(cpu.why_not(x, x, x))
    x = torch.empty(1, 1, 4, 16)
    assert cpu.why_not(x, x, x) is None


@pytest.mark.parametrize("slab", [1, 5_000])
@pytest.mark.parametrize("pattern", [Local(40), Strided(16), Fixed(16, 3)], ids=_name)
def test_cpu_is_right_in_slabs_of_any_size(pattern: Pattern, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SCORES_IN_WORK", slab)
    check_against_reference("cpu", pattern, torch.float32, Shape(2, 3, 257, 16, 16), grad_lse=True)


@pytest.mark.parametrize("patterns", [[Strided(8)] * 3, *MIXES], ids=str)
def test_cpu_heads_that_take_turns_give_the_same(patterns: list[Pattern], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for limit in (cpu.VALUES_IN_COPIES, 1):
        monkeypatch.setattr(cpu, "VALUES_IN_COPIES", limit)
        inputs = make_inputs(Shape(1, 3, 72, 16, 16), torch.float32)
        q, k, v = (x.requires_grad_() for x in inputs[:3])
        out, lse = _attend(q, k, v, patterns)
        found.append([out, lse, *torch.autograd.grad(out, (q, k, v), inputs.grad_out)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)  # not bit for bit: products of fewer heads may add up in another order


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("batch", [1, 2, 5])  # fewer groups than threads, as many, and more
@pytest.mark.parametrize("pattern", [Local(40), Strided(16), Fixed(16, 3)], ids=_name)
def test_cpu_shares_work_among_threads(pattern: Pattern, batch: int) -> None:
    check_against_reference("cpu", pattern, torch.float32, Shape(batch, 2, 130, 16, 16), grad_lse=True)
    assert torch.get_num_threads() == 3
    q, k, v = make_inputs(Shape(batch, 2, 130, 16, 16), torch.float32)[:3]
    wanted = _attend(q, k, v, pattern)[0]
    with torch.inference_mode():
        assert torch.equal(_attend(q, k, v, pattern)[0], wanted)


@pytest.mark.usefixtures("three_threads")
def test_cpu_ends_when_a_thread_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    set_num_threads = torch.set_num_threads

    def fails_once(number: int) -> None:
        if number == 1:
            monkeypatch.undo()
            raise RuntimeError("no thread")
        set_num_threads(number)

    monkeypatch.setattr(torch, "set_num_threads", fails_once)
    q, k, v = make_inputs(Shape(2, 2, 40, 16, 16), torch.float32)[:3]
    with pytest.raises(RuntimeError, match=r"^no thread$"):
        _attend(q, k, v, Local(8))
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("context", [1, 40, 96, 101])
@pytest.mark.parametrize("part", _parts(), ids=str)
def test_chunks_cover_every_pair_once(part: PatternPart, context: int) -> None:
    chunks = chunked(part, context)
    seen = torch.zeros(context, chunks.num_keys, dtype=torch.int64)
    rows_seen = torch.zeros(context, dtype=torch.int64)
    for batch in chunks.batches:
        allowed = torch.ones(batch.rows, batch.width, dtype=torch.int64)
        for edge in batch.edges:
            allowed[:, edge.first : edge.last] = edge.bias == 0
        assert batch.has_blind_rows == bool((allowed.sum(1) == 0).any())
        for i in range(batch.count):
            row, key = batch.row + i * batch.row_step, batch.key + i * batch.key_step
            seen[row : row + batch.rows, key : key + batch.width] += allowed
            rows_seen[row : row + batch.rows] += 1
    natural = torch.arange(context) if chunks.columns is None else chunks.columns(torch.arange(context))
    q = natural if chunks.query_order is None else chunks.query_order
    k = natural if chunks.key_order is None else chunks.key_order
    assert torch.equal(seen, part.mask(q[:, None], k[None]).long())
    assert chunks.has_all_rows == bool((rows_seen == 1).all())
    assert int(rows_seen.max()) <= 1


@pytest.mark.parametrize("pattern", [Column(128), Strided(128)], ids=str)
def test_columns_of_a_long_context_are_read_in_place(pattern: Pattern) -> None:
    """Bringing them into order, and the results back, took a quarter of the time."""
    *_, column = _chunks(pattern, 12_288)
    assert column.columns is not None and column.query_order is column.key_order is column.query_inverse is None


def _chunks(pattern: Pattern, context: int) -> list[Chunks]:
    return [chunked(part, context) for part in pattern.parts()]


@pytest.mark.parametrize(
    ("pattern", "waste"),
    [
        (Local(128), 2),
        (Column(128), 2),
        (Block(128), 2),
        (Summary(128, 8), 1.2),
        (Strided(128), 2),
        (Fixed(128, 8), 1.5),
    ],
    ids=str,
)
def test_chunks_do_little_more_than_the_pattern_asks(pattern: Pattern, waste: float) -> None:
    context = 12_288
    asked = sum(
        int((intervals.high - intervals.low).sum())
        for intervals in (view(part, context, "queries").intervals for part in pattern.parts())
    )
    assert sum(chunks.num_pairs() for chunks in _chunks(pattern, context)) <= waste * asked


@pytest.mark.parametrize(
    "pattern", [Local(256), Block(256), Column(1024), Strided(256), Summary(256, 8), Dense()], ids=str
)
def test_chunks_stay_small_in_a_long_context(pattern: Pattern) -> None:
    for chunks in _chunks(pattern, 65_536):
        assert max(batch.rows * batch.width for batch in chunks.batches) <= MAX_PAIRS
        biases = {id(edge.bias): edge.bias.numel() for batch in chunks.batches for edge in batch.edges}
        assert sum(biases.values()) <= MAX_PAIRS
