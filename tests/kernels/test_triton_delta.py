"""The Triton kernels of the gated delta rule against its definition, position by position in fp64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.harness.backends import DEVICES, IN_THE_INTERPRETER, WITH_TRITON, repeats

pytestmark = WITH_TRITON
DEVICE = DEVICES["triton"]
UNIT_ROUNDOFF = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-8}
ALL = ("decay", "beta", "initial", "begins")
SIZES = (1, 3, 16, 63, 64, 65, 130)


class Inputs(NamedTuple):
    """The arguments of ``delta_forward``."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    initial: Tensor | None
    begins: Tensor | None


def inputs_of(
    size: int, width: int, value_width: int, dtype: torch.dtype, options: tuple[str, ...] = ALL, batch: int = 1
) -> Inputs:
    """Return random inputs with keys of length 1; heads of a position are adjacent, as in a model."""
    generator = torch.Generator().manual_seed(size)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = (normal(batch, size, 2, columns).transpose(1, 2) for columns in (width, width, value_width))
    q, k = q * width**-0.5, k / k.norm(dim=-1, keepdim=True)
    log_decay = -torch.nn.functional.softplus(3 * normal(batch, 2, size) - 2)
    beta = torch.rand(batch, 2, size, generator=generator, dtype=torch.float64)
    initial = normal(batch, 2, width, value_width)
    begins = torch.rand(batch, size, generator=generator) < 0.05
    rows = (x.to(DEVICE, dtype) for x in (q, k, v))
    optional = zip(ALL[:3], (log_decay, beta, initial), strict=True)
    return Inputs(
        *rows,
        *(x.to(DEVICE, wide) if name in options else None for name, x in optional),
        begins.to(DEVICE) if "begins" in options else None,
    )


def definition(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute S_t = e^g_t (I - β_t k_t k_tᵀ) S_t-1 + β_t k_t v_tᵀ and out_t = S_tᵀ q_t."""
    q, k, v, log_decay, beta, initial, begins = inputs
    state = initial if initial is not None else (k[:, :, 0, :, None] * v[:, :, 0, None]) * 0
    rows = []
    for t in range(q.shape[2]):
        key, value = k[:, :, t, :, None], v[:, :, t, None]
        if begins is not None:
            state = torch.where(begins[:, t, None, None, None], 0, state)
        if log_decay is not None:
            state = log_decay[:, :, t, None, None].exp() * state
        if beta is not None:
            rate = beta[:, :, t, None, None]
            state = state - rate * key @ (key.mT @ state) + rate * key * value
        else:
            state = state + key * value
        rows.append((state.mT @ q[:, :, t, :, None]).squeeze(-1))
    return torch.stack(rows, 2), state


def check(inputs: Inputs, with_final: bool = True) -> None:
    """Compare both results and all gradients with the definition and autograd."""
    from longstride.kernels.backends.triton.delta import delta_backward, delta_forward

    out, final, states = delta_forward(*inputs)
    generator = torch.Generator().manual_seed(1)
    grad_out, grad_final = (
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (out, final)
    )  # fmt: skip
    q, k, v, log_decay, beta, _, begins = inputs
    grads = delta_backward(
        grad_out, grad_final if with_final else None, q, k, v, log_decay, beta, begins, final, states
    )  # fmt: skip
    leaves = [None if x is None else x.double().requires_grad_() for x in inputs[:6]]
    expected = definition(Inputs(*leaves, begins))
    total = (expected[0] * grad_out.double()).sum()
    if with_final:
        total = total + (expected[1] * grad_final.double()).sum()
    total.backward()
    names = ("out", "final", "q", "k", "v", "log_decay", "beta", "initial")
    pairs = [(out, expected[0]), (final, expected[1])]
    pairs += [(grad, leaf.grad) for grad, leaf in zip(grads, leaves, strict=True) if leaf is not None]  # type: ignore[misc]
    present = [name for name, x in zip(names, (out, final, *inputs[:6]), strict=True) if x is not None]
    # No result takes more than six products, each a sum over a chunk's rows or over columns.
    terms = 6 * (64 + q.shape[3] + v.shape[3])
    for name, (actual, wanted) in zip(present, pairs, strict=True):
        narrow = UNIT_ROUNDOFF[actual.dtype] if actual.dtype == torch.bfloat16 else 0
        scale = wanted.abs().max()
        error = (actual.double() - wanted).abs() - narrow * wanted.abs()
        assert (error <= terms * rounding(q.dtype) * scale).all(), f"{name}: {error.max()} of {scale}"


def rounding(dtype: torch.dtype) -> float:
    """Return the unit roundoff of products; on a card they are of tf32, or three of them."""
    if DEVICE == "cuda":
        return 2**-20 if dtype == torch.float32 else 2**-11
    return UNIT_ROUNDOFF[torch.promote_types(dtype, torch.float32)]


@IN_THE_INTERPRETER
@pytest.mark.parametrize("size", SIZES)
def test_kernels_equal_the_definition_in_fp64(size: int) -> None:
    check(inputs_of(size, 16, 24, torch.float64))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        pytest.param(size, dtype, marks=repeats(i + j))
        for i, size in enumerate(SIZES)
        for j, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
)
def test_kernels_equal_the_definition(size: int, dtype: torch.dtype) -> None:
    check(inputs_of(size, 24, 16, dtype))


@pytest.mark.parametrize(("width", "value_width"), [(16, 32), (32, 24), (64, 40)])
def test_widths_may_differ(width: int, value_width: int) -> None:
    check(inputs_of(70, width, value_width, torch.float32))


@pytest.mark.parametrize(
    "options",
    [(), ("decay",), ("beta",), ("decay", "initial"), ("beta", "begins"), ("decay", "begins"), ("decay", "beta")],
    ids="+".join,
)
def test_everything_is_optional(options: tuple[str, ...]) -> None:
    check(inputs_of(67, 16, 24, torch.float32, options))


def test_each_context_has_its_own_state() -> None:
    check(inputs_of(66, 16, 16, torch.float32, batch=3))


def test_final_state_may_have_no_gradient() -> None:
    check(inputs_of(66, 16, 16, torch.float32), with_final=False)


def test_equal_keys_keep_the_inverse_exact() -> None:
    """Powers of the system are as large as binomial coefficients then."""
    inputs = inputs_of(64, 16, 16, torch.float32, ("beta",))
    assert inputs.beta is not None
    check(inputs._replace(k=inputs.k[:, :, :1].expand_as(inputs.k), beta=torch.ones_like(inputs.beta)))


def test_strong_decay_neither_overflows_nor_leaks() -> None:
    inputs = inputs_of(130, 16, 16, torch.float32)
    assert inputs.log_decay is not None
    check(inputs._replace(log_decay=inputs.log_decay * 100))


def test_later_positions_leave_earlier_bits() -> None:
    from longstride.kernels.backends.triton.delta import delta_forward

    inputs = inputs_of(130, 16, 16, torch.float32)
    out = delta_forward(*inputs)[0]
    changed = [x if x is None else x.clone() for x in inputs[:5]]
    for x in changed:
        assert x is not None
        x[:, :, 70:] = x[:, :, 70:] * 0.5
    assert torch.equal(delta_forward(*changed, *inputs[5:])[0][:, :, :70], out[:, :, :70])


def test_two_runs_have_equal_bits() -> None:
    from longstride.kernels.backends.triton.delta import delta_backward, delta_forward

    def run() -> list[Tensor]:
        inputs = inputs_of(66, 16, 16, torch.bfloat16)
        out, final, states = delta_forward(*inputs)
        return [out, final, *delta_backward(out, final, *inputs[:5], inputs.begins, final, states)]

    assert all(map(torch.equal, run(), run()))


def test_states_are_kept_on_request_alone() -> None:
    from longstride.kernels.backends.triton.delta import delta_forward

    inputs = inputs_of(65, 16, 24, torch.float32)
    kept, dropped = delta_forward(*inputs)[2], delta_forward(*inputs, keep=False)[2]
    assert kept.shape == (2, 2, 16, 24) and dropped.shape == (0, 2, 16, 24)
