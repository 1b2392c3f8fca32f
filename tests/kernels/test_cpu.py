"""The CPU backend alone: its threads, its slabs, and the chunks it works by."""

import itertools
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels import selected_attention, sparse_attention
from longstride.kernels.backends import empty_like_rows
from longstride.kernels.backends.cpu import attention as cpu
from longstride.kernels.backends.cpu import selected, slabs
from longstride.kernels.backends.cpu.chunks import MAX_PAIRS, Chunks, chunked
from longstride.kernels.patterns import Block, Column, Dense, Fixed, Local, Pattern, Strided, Summary
from longstride.kernels.plan import view
from longstride.kernels.selections import Part, Selection, recent_members
from tests.harness.backends import MIXES
from tests.harness.oracles import (
    Shape,
    assert_within_precision,
    attention_and_gradients,
    check_against_reference,
    make_inputs,
)


def _name(pattern: Pattern) -> str:
    return str(pattern).replace(" ", "")


def _attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | list[Pattern]) -> tuple[Tensor, Tensor]:
    found = sparse_attention(q, k, v, pattern, backend="cpu", return_lse=True)
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", [Dense(), Local(50), Strided(64), Fixed(64, 3)], ids=_name)
def test_cpu_hands_what_reads_everything_to_torch(
    pattern: Pattern, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either order of memory, with a gradient that has strides of 0, and under autocast."""
    monkeypatch.setattr(cpu, "run_pieces", None)  # nothing is computed here
    shape = Shape(2, 3, 50, 16, 16)
    inputs = make_inputs(shape, dtype)
    check_against_reference("cpu", pattern, dtype, shape, inputs=inputs)
    for tensors in (inputs[:3], [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]]):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, lse = _attend(q, k, v, pattern)
        assert out.dtype == dtype and out.stride() == empty_like_rows(v).stride() and lse.is_contiguous()
        ones = torch.ones_like(out)
        found, wanted = (
            torch.autograd.grad(out, (q, k, v), x, retain_graph=True)
            for x in (ones[:1, :1, :1, :1].expand_as(out), ones)
        )
        for one, other, x in zip(found, wanted, (q, k, v), strict=True):
            assert torch.equal(one, other) and one.stride() == empty_like_rows(x).stride()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out"])
def test_torch_hides_nothing_that_is_not_finite(which: str, value: float) -> None:
    inputs = make_inputs(Shape(2, 2, 50, 16, 16), torch.float32)
    spoilt = inputs._replace(**{which: getattr(inputs, which).clone()})
    getattr(spoilt, which)[0, :, 33, 3] = value
    whole, found = (attention_and_gradients(lambda q, k, v: _attend(q, k, v, Dense()), x) for x in (inputs, spoilt))
    for name in ("out", "lse", "dq"):
        assert torch.equal(found[name][1], whole[name][1]), name
        if name == "dq" or which in ("q", "k") or (which == "v" and name == "out"):
            lost = found[name][0, :, 33] if math.isnan(value) else found[name][0]  # an inf may leave a weight of 0
            assert not lost.isfinite().all(), name


@pytest.mark.parametrize("slab", [1, 5_000])
@pytest.mark.parametrize("pattern", [Local(40), Strided(16), Fixed(16, 3)], ids=_name)
def test_cpu_is_right_in_slabs_of_any_size(pattern: Pattern, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SCORES_IN_WORK", slab)
    check_against_reference("cpu", pattern, torch.float32, Shape(2, 3, 257, 16, 16), grad_lse=True)


@pytest.mark.parametrize("has_products", [False, True])
@pytest.mark.parametrize("pattern", [Local(1), Local(40), Strided(16), Fixed(16, 3), Summary(8, 2)], ids=_name)
def test_cpu_multiplies_bf16_with_and_without_instructions(
    pattern: Pattern, has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this machine has; heads lie beside each other and not, in whole and in several slabs."""
    monkeypatch.setattr(slabs, "has_bf16_products", lambda: has_products)
    monkeypatch.setattr(slabs, "SCORES_IN_WORK", 30_000)
    for heads in (1, 2):
        shape = Shape(2, heads, 256, 32, 32)
        inputs = make_inputs(shape, torch.bfloat16, grad_lse=True)
        behind = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:4]]
        check_against_reference("cpu", pattern, torch.bfloat16, shape, inputs=inputs)
        inputs = inputs._replace(q=behind[0], k=behind[1], v=behind[2], grad_out=behind[3])
        check_against_reference("cpu", pattern, torch.bfloat16, shape, inputs=inputs)


@pytest.mark.parametrize("patterns", [[Strided(8)] * 3, *MIXES], ids=str)
def test_cpu_heads_that_take_turns_give_the_same(patterns: list[Pattern], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for limit in (slabs.VALUES_IN_WORK, 1):
        monkeypatch.setattr(slabs, "VALUES_IN_WORK", limit)
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
def test_each_thread_of_the_cpu_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products spread over further threads would be slower, and have other bits from time to time."""
    part_forward, seen = cpu._part_forward, []

    def part(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        time.sleep(0.05)  # the thread that asked has had its time to go on
        seen.append((threading.get_ident(), torch.get_num_threads()))
        return part_forward(*args, **kwargs)

    monkeypatch.setattr(cpu, "_part_forward", part)
    _attend(*make_inputs(Shape(2, 2, 40, 16, 16), torch.float32)[:3], Local(8))
    assert len({thread for thread, _ in seen}) == 3
    assert {number for _, number in seen} == {1}


@pytest.mark.usefixtures("three_threads")
def test_an_error_in_one_thread_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    part_forward = cpu._part_forward

    def fails_once(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if next(calls) == 1:
            raise RuntimeError("no room")
        return part_forward(*args, **kwargs)

    monkeypatch.setattr(cpu, "_part_forward", fails_once)
    with pytest.raises(RuntimeError, match=r"^no room$"):
        _attend(*make_inputs(Shape(2, 2, 40, 16, 16), torch.float32)[:3], Local(8))
    assert torch.get_num_threads() == 3


def test_chunks_are_aligned() -> None:
    (chunks,) = _chunks(Local(128), 1_024)
    assert all(batch.width % 16 == 0 for batch in chunks.batches)


@pytest.mark.parametrize("pattern", [Column(128), Strided(128), Strided(128, align="target")], ids=str)
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


def _routed(batch: int, heads: int, context: int, clusters: int, window: int | None) -> Part:
    generator = torch.Generator().manual_seed(0)
    return recent_members(torch.randint(clusters, (batch, heads, context), generator=generator), window=window)


@pytest.mark.usefixtures("three_threads")
def test_selections_are_right_on_any_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads go to threads, each of which works alone. As many threads give the same bits again; others round anew."""
    slab_forward, seen = selected.slab_forward, set()

    def watched(*args: Any) -> None:
        time.sleep(0.02)
        seen.add((threading.get_ident(), torch.get_num_threads()))
        slab_forward(*args)

    monkeypatch.setattr(selected, "slab_forward", watched)
    inputs = make_inputs(Shape(2, 3, 130, 16, 16), torch.float32, grad_lse=True)
    parts = (_routed(2, 3, 130, 4, 20), _routed(2, 3, 130, 3, 20))

    def results() -> dict[str, Tensor]:
        selection = Selection(parts, 20, disjoint=False)
        return attention_and_gradients(
            lambda q, k, v: selected_attention(q, k, v, selection, backend="cpu", return_lse=True), inputs
        )

    found = [results(), results()]
    assert len({thread for thread, _ in seen}) >= 3 and {number for _, number in seen} == {1}
    assert all(torch.equal(found[1][name], wanted) for name, wanted in found[0].items())
    torch.set_num_threads(1)
    for each in (found[0], results()):
        assert_within_precision(each, inputs, Selection(parts, 20, disjoint=False))


@pytest.mark.parametrize(
    ("clusters", "window", "waste"), [(1, None, 1.2), (1, 128, 2), (20, None, 2), (111, 128, 2), (12_288, 128, 32)]
)
def test_chunks_of_selections_do_little_more_than_is_asked(clusters: int, window: int | None, waste: float) -> None:
    """Of clusters of a position or two, 16 rows by up to 32 columns for each 16 positions."""
    part = _routed(1, 2, 12_288, clusters, window)
    alike = selected._cut(part, 12_288, False).chunks
    assert all(one.rows * one.width <= MAX_PAIRS for one in alike)
    assert sum(one.rows * one.width * len(one.start) for one in alike) <= waste * int((part.high - part.low).sum())
