"""Many queries of one cache that is written row by row: against attention over the whole context."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longstride.kernels import CachedAttention, attend_one, plan, sparse_attention
from longstride.kernels.backends.cpu import decode as cpu_decode
from longstride.kernels.patterns import Dense, Fixed, Pattern, Strided, Summary
from tests.harness.oracles import Inputs, Shape, example_patterns, make_inputs
from tests.kernels.test_decoding import LISTS


def empty_rows(inputs: Inputs, by_position: bool = True) -> list[Tensor]:
    """Caches for all rows, none written: head by head or position by position in memory."""
    rows = [torch.full_like(x, float("nan")) for x in (inputs.k, inputs.v)]
    return [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in rows] if by_position else rows


def walk(attend: CachedAttention, inputs: Inputs, first: int) -> Tensor:
    """Writes row after row and attends from each, (B, H, ·, Dv)."""
    found = []
    for position in range(first, inputs.q.shape[2]):
        attend.k[:, :, position] = inputs.k[:, :, position]
        attend.v[:, :, position] = inputs.v[:, :, position]
        found.append(attend(inputs.q[:, :, position], position))
    return torch.stack(found, 2)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("patterns", [*([p] * 3 for p in example_patterns()), *LISTS], ids=str)
def test_a_cache_that_is_written_row_by_row(patterns: list[Pattern], by_position: bool) -> None:
    """From the start, from the middle on with other rows, and anew after what lay before was changed."""
    shape = Shape(2, len(patterns), 72, 8, 12)
    inputs, other = (make_inputs(shape, torch.float64, seed=seed) for seed in (1, 2))
    attend = CachedAttention(*empty_rows(inputs, by_position), patterns, backend="cpu")

    def check_rows(first: int, rows: Inputs, whole: Inputs) -> None:
        wanted = sparse_attention(*whole[:3], patterns, backend="reference")[:, :, first:]
        torch.testing.assert_close(walk(attend, rows, first), wanted, rtol=1e-12, atol=1e-12)

    check_rows(0, inputs, inputs)
    mixed = inputs._replace(
        **{name: torch.cat([getattr(inputs, name)[:, :, :20], getattr(other, name)[:, :, 20:]], 2) for name in "qkv"}
    )
    check_rows(20, other, mixed)
    attend.k[:, :, :60], attend.v[:, :, :60] = inputs.k[:, :, :60], inputs.v[:, :, :60]
    attend.forget()
    check_rows(60, inputs, inputs)


@pytest.mark.parametrize("most_gathered", [5, 4096])
@pytest.mark.parametrize("most_alone", [0, 1 << 16])
def test_limits_decide_about_speed_alone(most_gathered: int, most_alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_decode, "MOST_GATHERED", most_gathered)
    monkeypatch.setattr(cpu_decode, "MOST_SINGLE_THREADED", most_alone)
    cpu_decode.query_reads.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    inputs = make_inputs(Shape(2, 2, 40, 8, 12), torch.float64)
    try:
        for pattern in (Strided(8), Fixed(8, 2), Dense()):
            wanted = sparse_attention(*inputs[:3], pattern, backend="reference")
            found = walk(CachedAttention(*empty_rows(inputs), pattern), inputs, 0)
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    finally:
        torch.set_num_threads(before)
        cpu_decode.query_reads.cache_clear()


def test_a_default_device_is_none_of_a_caches_business() -> None:
    inputs = make_inputs(Shape(1, 2, 72, 16, 16), torch.float32)
    attends = [CachedAttention(*empty_rows(inputs), pattern) for pattern in (Strided(8), Fixed(8, 2))]
    for attend in attends:
        wanted = walk(attend, inputs, 0)
        attend.forget()
        with torch.device("meta"):
            found = walk(attend, inputs, 0)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_copies_of_narrow_rows_are_as_precise(dtype: torch.dtype) -> None:
    inputs = make_inputs(Shape(2, 2, 72, 16, 16), dtype)
    for pattern in (Strided(8), Fixed(8, 3)):
        for by_position in (False, True):
            attend = CachedAttention(*empty_rows(inputs, by_position), pattern)
            found = walk(attend, inputs, 0)
            rows = [attend_one(inputs.q[:, :, i], inputs.k, inputs.v, pattern, i, backend="cpu") for i in range(72)]
            torch.testing.assert_close(found, torch.stack(rows, 2), rtol=0, atol=2 * torch.finfo(dtype).eps)


def test_a_block_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a summary takes of each block is read at all later positions, from the copy."""
    inputs = make_inputs(Shape(1, 2, 72, 16, 16), torch.float32)
    attend = CachedAttention(*empty_rows(inputs), Summary(8, 3))
    taken: list[plan.RegularPositions] = []
    rows_of = plan.RegularPositions.rows_of
    monkeypatch.setattr(plan.RegularPositions, "rows_of", lambda self, x: taken.append(self) or rows_of(self, x))
    walk(attend, inputs, 0)
    # A block that has begun, and the only one that is whole, are read in place.
    copied = [run for run in taken if run.step == 8 and run != plan.RegularPositions(5, 3, 1, 8)]
    first = plan.RegularPositions(5, 3, 2, 8)  # of two blocks at once, then one by one
    assert copied == [first] * 2 + [
        plan.RegularPositions(8 * block + 5, 3, 1, 8) for block in range(2, 9) for _ in range(2)
    ]


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_inference_mode_may_come_and_go(first: Any) -> None:
    inputs = make_inputs(Shape(1, 2, 72, 16, 16), torch.float32)
    for pattern in (Strided(8), Fixed(8, 2)):
        attend = CachedAttention(*empty_rows(inputs), pattern)
        with torch.no_grad():
            attend.k.copy_(inputs.k)
            attend.v.copy_(inputs.v)
        for position in (40, 50, 60, 71):
            with first() if position in (40, 60) else torch.inference_mode(first is torch.no_grad), torch.no_grad():
                found = attend(inputs.q[:, :, position], position)
                wanted = attend_one(inputs.q[:, :, position], inputs.k, inputs.v, pattern, position)
            torch.testing.assert_close(found, wanted)


def test_threads_are_as_they_were() -> None:
    """Little is read by one thread; who asked for several has them again, whatever happened."""
    inputs, before = make_inputs(Shape(1, 2, 72, 16, 16), torch.float32), torch.get_num_threads()
    attend = CachedAttention(inputs.k, inputs.v, Strided(8))
    torch.set_num_threads(3)
    try:
        attend(inputs.q[:, :, 50], 50)
        assert torch.get_num_threads() == 3
        with Interrupted(), pytest.raises(KeyboardInterrupt):
            attend(inputs.q[:, :, 50], 50)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


class Interrupted(TorchDispatchMode):
    """A person's Ctrl-C in the first product."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.baddbmm.default:
            assert torch.get_num_threads() == 1
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_logsumexp_of_a_cached_query(backend: str) -> None:
    inputs = make_inputs(Shape(2, 2, 24, 8, 8), torch.float64, seed=1)
    expected = sparse_attention(*inputs[:3], Strided(4), backend="reference", return_lse=True)
    attend = CachedAttention(inputs.k, inputs.v, Strided(4), backend=backend)
    for position in (0, 5, 23):
        for result, rows in zip(attend.with_lse(inputs.q[:, :, position], position), expected, strict=True):
            torch.testing.assert_close(result, rows[:, :, position], rtol=1e-12, atol=1e-12)
