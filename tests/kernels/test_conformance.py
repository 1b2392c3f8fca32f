"""What every backend of ``sparse_attention`` must do: each property once, over backends, patterns and dtypes.

Single queries are in ``test_decoding``; what one backend alone does is in its own file.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels import sparse_attention
from longstride.kernels.attention import head_patterns
from longstride.kernels.patterns import (
    BigBird,
    Block,
    Column,
    Dense,
    Fixed,
    Local,
    Longformer,
    LongNet,
    Pattern,
    Strided,
    Summary,
    declares_causal,
)
from tests.harness.backends import DEVICES, DTYPES, IN_THE_INTERPRETER, MIXES, WITH_TRITON, on, repeats, use_tiles
from tests.harness.oracles import (
    RESULTS,
    Inputs,
    Shape,
    all_patterns,
    allowed_by,
    assert_within_precision,
    attention_and_gradients,
    check_against_reference,
    exact,
    example_patterns,
    heads_to_see,
    make_inputs,
)

HALF, BRAIN, SINGLE, DOUBLE = DTYPES
FAST = ("cpu", "triton")  # the backends with kernels of their own
ALL = (*FAST, "reference")


def others(is_default: bool) -> list[pytest.MarkDecorator]:
    """Return marks of a case: the campaign's unless it is a default one."""
    return [] if is_default else [pytest.mark.campaign]


def results(backend: str, inputs: Inputs, pattern: Pattern | list[Pattern]) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv."""
    return attention_and_gradients(
        lambda q, k, v: sparse_attention(q, k, v, pattern, backend=backend, return_lse=True), inputs, DEVICES[backend]
    )


# Precision

# 72 is a multiple of the strides, so that orders and intervals have closed forms; 37 and 101 are multiples of none.
# By default each pattern once in each dtype on the CPU, and causal ones once in the slow interpreter. Of two-sided
# ones, whose kernels are the same with other bounds, every fourth runs there. All others are in the campaign.
PRECISION = [
    *(
        on("cpu", pattern, dtype, Shape(2, 3, n, d, d), marks=others((p + i) % 4 == j and (p + i // 2) % 2 == k))
        for p, pattern in enumerate(all_patterns())
        for i, dtype in enumerate(DTYPES)
        for j, d in enumerate((16, 24, 64, 256))
        for k, n in enumerate((72, 101))
    ),
    *(  # fp32 where widths and heads differ
        on("triton", p, dtype, Shape(1, heads_to_see(p), n, 24, 16), marks=others(is_default))
        for number, p in enumerate(all_patterns())
        for i, dtype in enumerate(DTYPES[:3])
        for k, n in enumerate((37, 72))
        for is_default in [(i, k) == (number % 3, number % 2) and (declares_causal(p) or number % 4 == 0)]
    ),
    *(on("reference", p, BRAIN if i % 2 else DOUBLE, Shape(1, 3, 29, 16, 24)) for i, p in enumerate(all_patterns())),
]


@pytest.mark.parametrize("backend, pattern, dtype, shape", PRECISION, ids=str)
def test_results_are_within_precision(backend: str, pattern: Pattern, dtype: torch.dtype, shape: Shape) -> None:
    check_against_reference(backend, pattern, dtype, shape, grad_lse=True, device=DEVICES[backend])


# Longer segments than the examples have, and bounds of which one side alone is closed.
FORMS = (
    Longformer(5, 4, 8), Longformer(3, 8, 6), Longformer(5, 4, 9, "target"), LongNet((8, 16, 48), (1, 2, 8)),
    BigBird(16, 2, 1, 1),
)  # fmt: skip


@pytest.mark.parametrize("backend, pattern", [on(name, pattern) for name in FAST for pattern in FORMS], ids=str)
def test_forms_that_the_examples_have_not_are_within_precision(backend: str, pattern: Pattern) -> None:
    shape = Shape(1, heads_to_see(pattern), 96, 16, 16)
    check_against_reference(backend, pattern, SINGLE, shape, grad_lse=True, device=DEVICES[backend])


# By default a pattern of each order; test_widths_may_differ has every width and dtype.
LARGER = [
    *((width, dtype, Strided(8)) for width, dtype in ((64, HALF), (64, SINGLE), (128, BRAIN))),
    *((16, BRAIN, pattern) for pattern in example_patterns()[::4]),
]
OTHERS = [(w, d, p) for w in (16, 64, 128, 256) for d in DTYPES[:3] for p in example_patterns()]


@pytest.mark.parametrize(
    "backend, width, dtype, pattern",
    [
        *(on("triton", *each) for each in dict.fromkeys(LARGER)),
        *(on("triton", *each, marks=[pytest.mark.campaign]) for each in OTHERS if each not in LARGER),
    ],
    ids=str,
)
def test_larger_tiles_are_within_precision_at_every_width(
    pattern: Pattern, backend: str, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiles(monkeypatch, (32, 32), closed=32)
    check_against_reference(backend, pattern, dtype, Shape(1, 1, 72, width, width), device=DEVICES[backend])


@pytest.mark.parametrize("backend", [on("cpu"), on("triton", marks=[IN_THE_INTERPRETER])])
def test_fp64_equals_the_specification(backend: str) -> None:
    inputs = make_inputs(Shape(1, 2, 40, 24, 16), DOUBLE, grad_lse=True)
    found = results(backend, inputs, Strided(8))
    for name, wanted in exact(inputs, Strided(8)).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", [on(name) for name in FAST])
@pytest.mark.parametrize("exponent", [0, 8, 16])
def test_gradients_survive_a_loss_scale(backend: str, exponent: int) -> None:
    shape = Shape(1, 1, 40, 64, 64)
    inputs = make_inputs(shape, HALF)
    inputs = inputs._replace(grad_out=inputs.grad_out * 2.0**-16 * 2.0**exponent)
    check_against_reference(backend, Local(16), HALF, shape, inputs=inputs, device=DEVICES[backend])


# Sizes, scales, heads and strides

CONTEXTS = [  # CPUs: tests/sparse_model/test_parts.py
    on("triton", p, Shape(2, 1, n, 16, 16), marks=repeats(i + j))
    for i, p in enumerate((Dense(), Column(4), Fixed(4, 1)))
    for j, n in enumerate((1, 2, 15, 16, 17, 64))
]


@pytest.mark.parametrize("backend, pattern, shape", CONTEXTS, ids=str)
def test_contexts_may_have_any_length(backend: str, pattern: Pattern, shape: Shape) -> None:
    check_against_reference(backend, pattern, HALF, shape, seed=shape.context, device=DEVICES[backend])


@pytest.mark.parametrize(
    "backend, pattern, dtype, shape",
    [
        *(on("cpu", p, SINGLE, Shape(2, 3, 65, 32, width)) for p in example_patterns()[::3] for width in (1, 40)),
        *(
            on("triton", Strided(8), dtype, Shape(1, 1, 37, *widths), marks=repeats(i + j))
            for i, dtype in enumerate(DTYPES[:3])
            for j, widths in enumerate(((16, 24), (64, 64), (96, 40), (128, 128), (256, 256)))
        ),
    ],
    ids=str,
)
def test_widths_may_differ(backend: str, pattern: Pattern, dtype: torch.dtype, shape: Shape) -> None:
    scale, grad_lse = (0.3, False) if backend == "cpu" else (None, True)
    check_against_reference(backend, pattern, dtype, shape, scale=scale, grad_lse=grad_lse, device=DEVICES[backend])


@pytest.mark.parametrize(
    "backend, pattern, dtype",
    [*(on(name, Fixed(8, 2), HALF) for name in FAST), *(on("cpu", Dense(), dtype) for dtype in DTYPES[:3])],
)
@pytest.mark.parametrize("scale", [None, 0.5, 2.0, -0.3, 0.0])
def test_the_scale_may_be_any_number(backend: str, pattern: Pattern, dtype: torch.dtype, scale: float | None) -> None:
    """Torch's own kernel computes dense attention where it masks behind the scale."""
    shape = Shape(1, 2, 33, 16, 16)
    check_against_reference(backend, pattern, dtype, shape, scale=scale, device=DEVICES[backend])


@pytest.mark.parametrize(
    "pattern", [Local(2**31 - 1), Local(2**62), Block(2**31), Column(2**40), Fixed(2**31, 2), Strided(2**33)], ids=str
)
@pytest.mark.parametrize("backend", [on(name) for name in FAST])
def test_sizes_may_be_far_beyond_the_context(backend: str, pattern: Pattern) -> None:
    check_against_reference(backend, pattern, SINGLE, Shape(1, 1, 40, 16, 16), device=DEVICES[backend])


@pytest.mark.parametrize(
    "patterns, backend, dtype, shape",
    [
        *(pytest.param(mix, "cpu", dtype, Shape(2, 3, 75, 16, 24)) for mix in MIXES for dtype in DTYPES),
        *(
            pytest.param(
                mix,
                "triton",
                dtype,
                Shape(1, 3, 45, 16, 16),
                marks=[WITH_TRITON, *([] if i == j else [pytest.mark.campaign])],
            )
            for i, mix in enumerate(MIXES)
            for j, dtype in enumerate((HALF, SINGLE, BRAIN))
        ),
    ],
    ids=str,
)
def test_heads_may_differ(patterns: list[Pattern], backend: str, dtype: torch.dtype, shape: Shape) -> None:
    check_against_reference(backend, patterns, dtype, shape, grad_lse=True, device=DEVICES[backend])


@pytest.mark.parametrize(
    "backend, pattern",
    [
        *(on("cpu", pattern) for pattern in example_patterns()),
        *(on("triton", pattern) for pattern in (Fixed(8, 2), Column(8))),
    ],
    ids=str,
)
def test_strides_change_nothing(backend: str, pattern: Pattern) -> None:
    """Heads behind positions with q, k and v side by side, and channels that are not adjacent.

    Backends copy or load rows of any strides alike. Torch's own kernel, which has dense attention, promises nothing.
    """
    plain = make_inputs(Shape(*((1, 2) if backend == "triton" else (2, 3)), 20, 24, 16), SINGLE)
    packed = torch.cat([plain.q, plain.k, plain.v], -1).transpose(1, 2).contiguous().transpose(1, 2)
    turned = plain.grad_out.transpose(-1, -2).contiguous().transpose(-1, -2)
    behind = Inputs(*packed.split([24, 24, 16], -1), turned, None)
    spread = Inputs(*(torch.stack([x, x], -1).flatten(-2)[..., ::2] for x in plain[:4]), None)
    wanted = results(backend, plain, pattern)
    for strided in (behind, spread):
        assert not any(x.is_contiguous() for x in strided[:4])
        found = results(backend, strided, pattern)
        if backend == "cpu" and pattern == Dense():
            assert_within_precision(found, strided, pattern)
        else:
            assert all(torch.equal(found[name], wanted[name]) for name in RESULTS)


@pytest.mark.parametrize("backend", [on(name) for name in ALL])
def test_an_empty_batch_is_empty(backend: str) -> None:
    out, lse = sparse_attention(
        *(torch.empty(0, 2, 8, 16, device=DEVICES[backend]) for _ in range(3)),
        Dense(),
        backend=backend,
        return_lse=True,
    )
    assert out.shape == (0, 2, 8, 16) and lse.shape == (0, 2, 8)


# What is read


@pytest.mark.parametrize(
    "backend, dtype", [*(on("cpu", d) for d in DTYPES), on("triton", HALF), on("reference", SINGLE)]
)
@pytest.mark.parametrize("pattern", [Summary(8, 2), Summary(64, 4), Summary(9, 2, 3)], ids=str)
def test_queries_without_keys_give_zeros(pattern: Pattern, backend: str, dtype: torch.dtype) -> None:
    context = 70
    inputs = make_inputs(Shape(1 if backend == "triton" else 2, 3, context, 16, 16), dtype, grad_lse=True)
    assert inputs.grad_lse is not None
    position = torch.arange(context)
    masks = [resolved.mask(position[:, None], position[None]) for resolved in head_patterns(pattern, 3)]
    for head, mask in enumerate(masks):
        inputs.grad_lse[:, head, ~mask.any(1)] = math.nan  # as a merge of two -inf hands back
    found = results(backend, inputs, pattern)
    for head, mask in enumerate(masks):
        blind, unread = ~mask.any(1), ~mask.any(0)
        assert blind.any() and unread.any()
        assert not found["out"][:, head, blind].any() and not found["dq"][:, head, blind].any()
        assert (found["lse"][:, head, blind] == -math.inf).all() and found["lse"][:, head, ~blind].isfinite().all()
        assert not found["dk"][:, head, unread].any() and not found["dv"][:, head, unread].any()
    assert all(found[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize(
    "backend, pattern",
    [
        *(on("cpu", pattern) for pattern in all_patterns()),
        *(on("triton", pattern, marks=others(i % 4 == 0)) for i, pattern in enumerate(all_patterns())),
    ],
    ids=str,
)
def test_rows_change_only_with_what_they_read(backend: str, pattern: Pattern) -> None:
    """Changes begin at 23: inside a tile, a block and a window."""
    heads = heads_to_see(pattern) if backend == "triton" else 3
    inputs = [x.to(DEVICES[backend]) for x in make_inputs(Shape(1, heads, 40, 16, 16), SINGLE)[:3]]
    before = sparse_attention(*inputs, pattern, backend=backend, return_lse=True)
    for x in inputs:
        x[:, :, 23:] += 1
    after = sparse_attention(*inputs, pattern, backend=backend, return_lse=True)
    changed = allowed_by(pattern, heads, 40)[..., 23:].any(-1) | (torch.arange(40) >= 23)
    for old, new in zip(before, after, strict=True):
        old, new = (x[0].cpu() for x in (old, new))
        assert torch.equal(old[~changed], new[~changed]) and not torch.equal(old[:, 23:], new[:, 23:])
        if not declares_causal(pattern):
            early = changed & (torch.arange(40) < 23)
            assert (old[early] != new[early]).reshape(int(early.sum()), -1).any(-1).all()


# The same bits


@pytest.mark.parametrize("pattern", [Strided(8), Fixed(8, 2)], ids=str)
@pytest.mark.parametrize("backend", [on(name) for name in FAST])
def test_two_runs_give_the_same_bits(backend: str, pattern: Pattern) -> None:
    inputs = make_inputs(Shape(1, 2, 33, 16, 16), BRAIN, grad_lse=True)
    first, second = results(backend, inputs, pattern), results(backend, inputs, pattern)
    assert all(torch.equal(first[name], second[name]) for name in RESULTS)


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_autocast_changes_nothing_inside(backend: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Shape(2, 2, 33, 16, 16), dtype, grad_lse=True)

    def autocast(*qkv: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return sparse_attention(*qkv, Fixed(8, 2), backend=backend, return_lse=True)

    found, wanted = attention_and_gradients(autocast, inputs), results(backend, inputs, Fixed(8, 2))
    for name in RESULTS:
        assert found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]), name
