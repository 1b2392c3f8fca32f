"""Calls by a plan that another call made: the same launches, the same bits; and what has plans of its own."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels.backends import Saved
from longstride.kernels.cache import BoundedCache
from longstride.kernels.patterns import Column, Fixed, Local, Pattern, Strided
from tests.harness.backends import DEVICES, WITH_TRITON, use_tiles
from tests.harness.oracles import Shape

pytestmark = WITH_TRITON

ROOT = pathlib.Path(__file__).parents[2]
DEVICE = DEVICES["triton"]
SHAPE = Shape(1, 2, 40, 16, 16)
SCALE = 0.25
HEADS: tuple[tuple[Pattern, ...], ...] = (
    (Local(20),) * 2,
    (Strided(8),) * 2,  # two passes over queries, closed runs after others
    (Fixed(8, 2), Column(6)),
)


def inputs_of(seed: int, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    """q, k, v, and gradients of the output and its logsumexp."""
    generator = torch.Generator().manual_seed(seed)
    widths = (SHAPE.width, SHAPE.width, SHAPE.value_width, SHAPE.value_width)
    rows = [torch.randn(*SHAPE[:3], width, generator=generator).to(DEVICE, dtype) for width in widths]
    return [*rows, torch.randn(*SHAPE[:3], generator=generator).to(DEVICE)]


def calls(heads: tuple[Pattern, ...], given: list[Tensor], scale: float, *, with_grad_lse: bool) -> list[Tensor]:
    """Output, logsumexp and gradients, by the two functions that keep plans."""
    from longstride.kernels.backends.triton import backward, forward

    q, k, v, grad_out, grad_lse = given
    out, lse = forward(q, k, v, heads, scale)
    saved = Saved(q, k, v, out, grad_out, lse, grad_lse if with_grad_lse else None)
    return [out, lse, *backward(saved, heads, scale)]


def num_plans() -> int:
    """How many were made so far."""
    from longstride.kernels.backends import triton as backend

    return len(backend.PLANS)


@pytest.mark.parametrize("heads, with_grad_lse", [(heads, i % 2 == 0) for i, heads in enumerate(HEADS)], ids=str)
def test_a_plan_gives_other_inputs_the_bits_of_their_own(
    heads: tuple[Pattern, ...], with_grad_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longstride.kernels.backends import triton as backend

    use_tiles(monkeypatch, (16, 16), closed=16)
    first, second = inputs_of(0), inputs_of(1)
    first[1] = first[0]  # one tensor in two places: it must not be taken for both again
    calls(heads, first, SCALE, with_grad_lse=with_grad_lse)
    assert num_plans() == 2
    again = calls(heads, second, SCALE, with_grad_lse=with_grad_lse)
    assert num_plans() == 2
    monkeypatch.setattr(backend, "PLANS", BoundedCache())
    for found, wanted in zip(again, calls(heads, second, SCALE, with_grad_lse=with_grad_lse), strict=True):
        assert torch.equal(found, wanted) and found.stride() == wanted.stride()


def test_a_call_with_shared_keys_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from longstride.kernels.backends import triton as backend

    q, k, v, *gradients = inputs_of(0)
    given = [q, k[:, :1], v[:, :1], *gradients]
    calls(HEADS[0], inputs_of(1)[:1] + given[1:], SCALE, with_grad_lse=True)
    assert num_plans() == 2
    again = calls(HEADS[0], given, SCALE, with_grad_lse=True)
    monkeypatch.setattr(backend, "PLANS", BoundedCache())
    for found, wanted in zip(again, calls(HEADS[0], given, SCALE, with_grad_lse=True), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("scale, dtype", [(-SCALE, torch.float16), (SCALE, torch.bfloat16)], ids=str)
def test_copies_that_kernels_read_are_made_in_each_call(scale: float, dtype: torch.dtype) -> None:
    """Such as a negated q, or in the interpreter bf16 in fp32."""
    first, second = inputs_of(0, dtype), inputs_of(1, dtype)
    once = calls(HEADS[0], first, scale, with_grad_lse=True)
    calls(HEADS[0], second, scale, with_grad_lse=True)
    again = calls(HEADS[0], first, scale, with_grad_lse=True)
    assert num_plans() == 2
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(once, again, strict=True))


def test_calls_that_look_different_have_plans_of_their_own() -> None:
    from longstride.kernels.backends.triton import forward

    q, k, v = inputs_of(0)[:3]
    wide = torch.empty(*q.shape[:-1], 17, dtype=q.dtype, device=q.device)
    shifted = wide.flatten()[1 : 1 + q.numel()].view(q.shape).copy_(q)  # an address that is no multiple of 16
    by_position = q.transpose(1, 2).contiguous().transpose(1, 2)
    looks = [(q, HEADS[0], SCALE), (shifted, HEADS[0], SCALE), (by_position, HEADS[0], SCALE)]
    looks += [(q, HEADS[1], SCALE), (q, HEADS[0], 0.5)]
    for number, (query, heads, scale) in enumerate(looks):
        forward(query, k, v, heads, scale)
        assert num_plans() == number + 1


@pytest.fixture(scope="module")
def dry_calls() -> dict[str, dict[str, Any]]:
    """What ``tests/harness/dry_calls.py`` prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/harness/dry_calls.py")],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_card_is_told_the_same_by_a_call_made_again(dry_calls: dict[str, dict[str, Any]]) -> None:
    assert dry_calls["again"] and all(dry_calls["again"].values()), dry_calls["again"]


def test_other_batches_and_contexts_compile_no_other_kernels(dry_calls: dict[str, dict[str, Any]]) -> None:
    """Forward and backward passes of a layer take five kernels where patterns are merged, three where heads differ."""
    assert {size: count for size, count in dry_calls["kernels"].items() if count} == {
        "fixed 1 12288": 5,
        "strided 1 12288": 3,
    }


def test_a_call_made_again_enters_few_functions(dry_calls: dict[str, dict[str, Any]]) -> None:
    """Forward and backward: nothing of triton's own launching, and one function more a launch."""
    one, several = (dry_calls["python"][name] for name in ("one launch", "several"))
    assert one["triton"] <= 2 and several["triton"] <= 2, dry_calls["python"]
    assert one["longstride"] <= 64 and several["longstride"] - one["longstride"] <= 6, dry_calls["python"]
