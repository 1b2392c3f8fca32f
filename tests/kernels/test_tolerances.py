"""The bounds of ``oracles`` and ``stochastic`` refuse one wrong pair, row, scale, or term of a sum.

Letters: N positions, D width.
"""

import pytest
import torch
from torch import Tensor

from longstride.kernels import selected_attention
from longstride.kernels.selections import Part, Selection
from tests.harness.backends import DTYPES
from tests.harness.oracles import (
    RESULTS,
    Expected,
    Inputs,
    Shape,
    assert_within_precision,
    attention_and_gradients,
    expected,
    make_inputs,
)
from tests.harness.stochastic import assert_rounding_explains

HALF, BRAIN, SINGLE, _ = DTYPES
SHAPE = Shape(1, 2, 48, 16, 16)
WINDOWS = {"window": 11, "all": SHAPE.context}
POSITION = torch.arange(SHAPE.context)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_window = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)


def bounds(window: int) -> tuple[Tensor, Tensor]:
    """The first key of each query and the one behind its last, (1, H, N)."""
    low = (POSITION + 1 - window).clamp_min(0)
    return tuple(x.expand(*SHAPE[:3]).int().clone() for x in (low, POSITION + 1))  # type: ignore[return-value]


def selection(low: Tensor, high: Tensor) -> Selection:
    return Selection((Part(None, None, low, high),), SHAPE.context)


def results(inputs: Inputs, reads: Selection, scale: float | None = None) -> dict[str, Tensor]:
    return attention_and_gradients(
        lambda q, k, v: selected_attention(q, k, v, reads, scale=scale, backend="reference", return_lse=True), inputs
    )


def assert_refused(found: dict[str, Tensor], wanted: dict[str, Expected]) -> None:
    """Each result alone must show that it is wrong."""
    shares = {name: wanted[name].share(found[name]) for name in RESULTS}
    assert min(shares.values()) > 1, shares


# What becomes of one row's bounds, and the key of row i that it concerns.
PAIRS = {
    "newest key dropped": ((0, -1), lambda i, window: i),
    "oldest key dropped": ((1, 0), lambda i, window: (i + 1 - window).clamp_min(0)),
    "next key read": ((0, 1), lambda i, window: i + 1),
    "earlier key read": ((-1, 0), lambda i, window: i - window),
}


@each_dtype
@pytest.mark.parametrize(
    "window, change",
    [(window, change) for window in WINDOWS.values() for change in PAIRS][:-1],  # all read them then
)
def test_one_wrong_pair_is_refused(change: str, window: int, dtype: torch.dtype) -> None:
    """In 16 bits the heaviest of the pairs, whose weight is more than rounding; in 32 and 64 the lightest."""
    (lower, upper), key_of = PAIRS[change]
    rows = POSITION[13:-1]
    keys = key_of(rows, window)
    inputs, (low, high) = make_inputs(SHAPE, dtype, grad_lse=True), bounds(window)
    weights = (inputs.q[0, -1, rows] * inputs.k[0, -1, keys]).double().sum(-1)
    row = rows[weights.argmax() if dtype in (HALF, BRAIN) else weights.argmin()]
    wanted = expected(inputs, selection(low, high))
    low[0, -1, row] += lower
    high[0, -1, row] += upper
    assert_refused(results(inputs, selection(low, high)), wanted)


@each_dtype
@each_window
@pytest.mark.parametrize("side", ["queries", "keys"])
def test_two_rows_in_the_wrong_order_are_refused(side: str, window: int, dtype: torch.dtype) -> None:
    inputs, reads = make_inputs(SHAPE, dtype, grad_lse=True), selection(*bounds(window))
    found = results(inputs, reads)
    assert_within_precision(found, inputs, reads)
    for name, result in found.items():
        if name in (("dk", "dv") if side == "keys" else ("out", "lse", "dq")):
            result[:, -1, [20, 21]] = result[:, -1, [21, 20]].clone()
            assert expected(inputs, reads)[name].share(result) > 1, name


@each_dtype
@each_window
@pytest.mark.parametrize("rows", [slice(None), slice(30, 31)], ids=["all rows", "one row"])
def test_a_wrong_scale_is_refused(rows: slice, window: int, dtype: torch.dtype) -> None:
    """That of a width of 17 in all rows, or of a width of 8 in one."""
    inputs, reads = make_inputs(SHAPE, dtype, grad_lse=True), selection(*bounds(window))
    wanted = expected(inputs, reads)
    inputs.q[0, :, rows] *= (SHAPE.width / (17 if rows == slice(None) else 8)) ** 0.5
    assert_refused(results(inputs, reads), wanted)


@each_dtype
def test_stochastic_arithmetic_refuses_a_missing_term_and_a_wrong_row(dtype: torch.dtype) -> None:
    def formula(a: Tensor, b: Tensor) -> list[Tensor]:
        out = (a @ b).tanh() @ b
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (a, b))]

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(64, 64, generator=generator, dtype=torch.float64).div(8).to(dtype) for _ in range(2)]
    right, wrong = (formula(*(x.requires_grad_() for x in inputs)) for _ in range(2))
    assert_rounding_explains(right, formula, inputs)
    wrong[0] -= ((inputs[0] @ inputs[1]).tanh()[:, :1] @ inputs[1][:1]).detach()
    for gradient in wrong[1:]:
        gradient[5] = gradient[6]  # a row in the place of another
    for number in range(3):
        found = [*right[:number], wrong[number], *right[number + 1 :]]
        with pytest.raises(AssertionError, match=f"result {number} is off by"):
            assert_rounding_explains(found, formula, inputs)
