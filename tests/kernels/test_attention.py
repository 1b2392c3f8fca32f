"""The public call: what it refuses, and its two dense oracles against each other."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from longstride.kernels import ConfigError, check_backend, sparse_attention
from longstride.kernels.patterns import Dense, Local, Pattern
from tests.harness.oracles import (
    Shape,
    all_patterns,
    make_inputs,
)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("number, pattern", [*enumerate(all_patterns()[::6])], ids=str)
def test_flex_agrees_with_the_reference(number: int, pattern: Pattern) -> None:
    """Two oracles, which share the masks alone: also over queries behind a cache, and where heads share keys."""
    rows = make_inputs(Shape(1, 3, 33, 16, 16), torch.float64)[:3]
    shared = make_inputs(Shape(1, 4, 33, 16, 16, 2), torch.float64)[:3]
    cases = (rows, None), ((rows[0][:, :, 7:20], *rows[1:]), 7), (shared, None)
    (q, *keys), first = cases[number % 3]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        found, wanted = (
            sparse_attention(q, *keys, pattern, backend=name, return_lse=True, first_query=first)
            for name in ("flex", "reference")
        )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_reference_equals_torchs_dense_attention() -> None:
    q, k, v = (normal(2, 2, 37, 16, dtype=torch.float64) for _ in range(3))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(sparse_attention(q, k, v, Dense(), backend="reference"), wanted)


def test_the_scale_is_one_over_the_root_of_the_width() -> None:
    q, k, v = (normal(1, 1, 9, 16) for _ in range(3))
    default = sparse_attention(q, k, v, Dense(), backend="reference")
    assert torch.equal(default, sparse_attention(q, k, v, Dense(), scale=0.25, backend="reference"))


@pytest.mark.parametrize(
    "shapes, dtypes, message",
    [
        (((2, 9, 16),) * 3, "fff", r"q must be \(B, H, N, D\), not \(2, 9, 16\)"),
        (((1, 2, 9, 16), (1, 2, 8, 16), (1, 2, 9, 16)), "fff", r"k \(1, 2, 8, 16\) must match q"),
        (((1, 2, 9, 16), (1, 2, 9, 16), (1, 2, 8, 16)), "fff", r"v \(1, 2, 8, 16\) must have the batch"),
        (((1, 2, 0, 16),) * 3, "fff", r"q \(1, 2, 0, 16\) must have at least one head, position and channel"),
        (((1, 0, 9, 16),) * 3, "fff", r"q \(1, 0, 9, 16\) must have at least one head"),
        (((1, 2, 9, 0),) * 3, "fff", r"q \(1, 2, 9, 0\) must have at least one head"),
        (((1, 2, 9, 16), (1, 2, 9, 16), (1, 2, 9, 0)), "fff", r"v \(1, 2, 9, 0\) must have at least one head"),
        (((1, 2, 9, 16),) * 3, "fhf", "k is torch.float16: q, k and v must share one of"),
        (((1, 2, 9, 16),) * 3, "iii", "q is torch.int64: q, k and v must share one of"),
    ],
)
def test_unfit_tensors_are_refused(shapes: tuple, dtypes: str, message: str) -> None:
    kinds = {"f": torch.float32, "h": torch.float16, "i": torch.int64}
    with pytest.raises(ValueError, match=message):
        sparse_attention(*(normal(*s, dtype=kinds[d]) for s, d in zip(shapes, dtypes, strict=True)), Dense())


@pytest.mark.parametrize(
    "pattern, message",
    [
        ({"type": "dense"}, r"pattern must be a Pattern \(pattern_from_json makes one\), not dict"),
        (None, "pattern must be a Pattern .* not NoneType"),
        (Dense, "pattern must be a Pattern .* not the class Dense"),
        ("dense", "pattern must be a Pattern .* not str"),
        ([Dense(), {"type": "dense"}], r"pattern\[1\] must be a Pattern .* not dict"),
        ([Dense, Dense], r"pattern\[0\] must be a Pattern .* not the class Dense"),
        ([Dense()] * 3, "3 patterns for 2 heads: give one pattern, or one per head"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern: Any, message: str) -> None:
    q, k, v = (normal(1, 2, 9, 16) for _ in range(3))
    with pytest.raises(ValueError, match=f"^{message}$"):
        sparse_attention(q, k, v, pattern)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    q, k, v = (normal(1, 2, 9, 16) for _ in range(3))
    with pytest.raises(ValueError, match=f"scale={scale}: must be a finite number"):
        sparse_attention(q, k, v, Dense(), scale=scale)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    q, k, v = (normal(1, 2, 9, 16) for _ in range(3))
    with pytest.raises(ConfigError, match='backend="cuda": must be one of auto, triton, cpu, reference, flex'):
        sparse_attention(q, k, v, Dense(), backend="cuda")


def test_a_named_backend_that_cannot_run_raises_instead_of_falling_back() -> None:
    q, k, v = (normal(1, 2, 9, 16).requires_grad_() for _ in range(3))
    with pytest.raises(ConfigError, match='backend="flex": cannot run here: FlexAttention has no backward on the CPU'):
        sparse_attention(q, k, v, Dense(), backend="flex")


@pytest.mark.parametrize("device, fast", [("cuda", "triton"), ("meta", "cpu")])
def test_auto_says_why_instead_of_falling_back_to_dense(device: str, fast: str) -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 9, 300, device=device) for _ in range(3))
        with pytest.raises(ConfigError, match=f'backend="auto": {fast} cannot run here: .*; backend="reference" runs'):
            sparse_attention(q, k, v, Dense())


@pytest.mark.parametrize(
    "name, training, message",
    [
        ("auto", True, None),
        ("cpu", True, None),
        ("flex", False, None),
        ("flex", True, 'backend="flex": cannot run here: FlexAttention has no backward on the CPU'),
        ("triton", True, 'backend="triton": cannot run here: .*a head width of 300 exceeds 256'),
        ("cuda", False, 'backend="cuda": must be one of auto'),
    ],
)
def test_a_backend_is_checked_without_computing(name: str, training: bool, message: str | None) -> None:
    def check() -> None:
        check_backend(
            name,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            head_width=16,
            value_width=300,
            training=training,
        )

    if message is None:
        check()
        return
    with pytest.raises(ConfigError, match=message):
        check()


def test_a_pattern_that_is_not_registered_is_refused_behind_the_op() -> None:
    class Mine(Local):
        """Looks like a registered one, but cannot be written down."""

    q, k, v = (normal(1, 1, 9, 16) for _ in range(3))
    with pytest.raises(ConfigError, match="cannot be imported; define the class at the top"):
        sparse_attention(q, k, v, Mine(3), backend="cpu")
