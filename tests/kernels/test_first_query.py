"""Several queries behind a cache: rows of the attention over the whole context, on every backend."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels import ConfigError, sparse_attention
from longstride.kernels.patterns import Dense, Fixed, Local, Pattern, Strided
from tests.harness.backends import DEVICES, DTYPES, MIXES, on
from tests.harness.oracles import (
    RESULTS,
    Inputs,
    Shape,
    all_patterns,
    assert_explained,
    example_patterns,
    expected,
    heads_to_see,
    make_inputs,
    mask_of,
)

SPLITS = ((0, 1), (0, 20), (13, 1), (13, 30), (40, 13), (52, 1))  # first query and number of queries of 53 positions
Reads = Pattern | list[Pattern]


def behind(inputs: Inputs, first: int, count: int) -> Inputs:
    """Return the inputs with only the queries from ``first`` on."""
    rows = slice(first, first + count)
    grad_lse = None if inputs.grad_lse is None else inputs.grad_lse[:, :, rows]
    return inputs._replace(q=inputs.q[:, :, rows], grad_out=inputs.grad_out[:, :, rows], grad_lse=grad_lse)


def check(backend: str, pattern: Reads, dtype: torch.dtype, shape: Shape, first: int, count: int) -> None:
    """Assert that output, logsumexp and gradients are within what rounding explains."""
    inputs = behind(make_inputs(shape, dtype, grad_lse=True), first, count)
    device = DEVICES[backend]
    leaves = [x.to(device).detach().requires_grad_() for x in inputs[:3]]
    outputs = sparse_attention(*leaves, pattern, backend=backend, return_lse=True, first_query=first)
    grads = torch.autograd.grad(outputs, leaves, [x.to(device) for x in inputs[3:]])
    found = {name: x.detach().cpu() for name, x in zip(RESULTS, (*outputs, *grads), strict=True)}
    patterns = pattern if isinstance(pattern, list) else [pattern.for_head(head) for head in range(shape.heads)]
    masks = torch.stack([mask_of(each.for_head(head), shape.context) for head, each in enumerate(patterns)])
    wanted = expected(inputs, lambda rows: masks[:, first + rows])
    for name in RESULTS:
        assert_explained(name, found[name], wanted[name], lambda rows: masks[:, first + rows])


@pytest.mark.parametrize(
    "backend, pattern, split",
    [
        *(
            on("cpu", pattern, split, marks=[] if (i + j) % 3 == 0 else [pytest.mark.campaign])
            for i, pattern in enumerate((*all_patterns(), *MIXES))
            for j, split in enumerate(SPLITS)
        ),
        *(on("reference", pattern, SPLITS[3]) for pattern in (*all_patterns(), *MIXES)),
        # Which read the lists that the CPU reads.
        *(on("triton", pattern, SPLITS[3]) for pattern in all_patterns()[::6]),
    ],
    ids=str,
)
def test_every_pattern_behind_a_cache(backend: str, pattern: Reads, split: tuple[int, int]) -> None:
    if backend == "triton":
        assert isinstance(pattern, Pattern)
        check(backend, pattern, torch.float32, Shape(1, heads_to_see(pattern), 53, 16, 16), *split)
        return
    for context in (53, 72):  # orders and intervals have closed forms at 72 alone
        check(backend, pattern, torch.float64, Shape(2, 3, context, 8, 12), *split)


@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize(
    "backend, dtype, split",
    [
        *(on(backend, dtype, split) for backend in ("cpu", "reference") for dtype in DTYPES for split in SPLITS[2:4]),
        *(
            on("triton", dtype, SPLITS[2 + i % 2], marks=[] if i else [pytest.mark.campaign])
            for i, dtype in enumerate(DTYPES[:3])
        ),
    ],
    ids=str,
)
def test_precisions_and_shared_heads(backend: str, dtype: torch.dtype, split: tuple[int, int], key_heads: int) -> None:
    patterns: list[Pattern] = [Fixed(8, 2), Strided(8), Local(11), Dense()]
    check(backend, patterns, dtype, Shape(1, 4, 53, 16, 24, key_heads), *split)


@pytest.mark.parametrize("backend", [on("cpu"), on("triton")])
def test_keys_behind_the_last_query_may_hold_anything(backend: str) -> None:
    q, k, v = (x.to(DEVICES[backend]) for x in make_inputs(Shape(1, 3, 53, 16, 16), torch.float32)[:3])
    later = [x.clone() for x in (k, v)]
    for x in later:
        x[:, :, 43:] = float("nan")
    for pattern in example_patterns()[:: 4 if backend == "triton" else 1]:
        wanted = sparse_attention(q[:, :, 13:43], k, v, pattern, backend=backend, first_query=13)
        found = sparse_attention(q[:, :, 13:43], *later, pattern, backend=backend, first_query=13)
        assert torch.equal(found, wanted), pattern


def test_all_queries_are_the_plain_call() -> None:
    q, k, v = make_inputs(Shape(1, 2, 40, 16, 16), torch.float32)[:3]
    found = sparse_attention(q, k, v, Fixed(8, 2), first_query=0)
    assert torch.equal(found, sparse_attention(q, k, v, Fixed(8, 2)))


def test_compiled_chunks_are_those_without() -> None:
    q, k, v = make_inputs(Shape(1, 2, 40, 16, 16), torch.float32)[:3]

    @torch.compile(backend="eager", fullgraph=True)
    def attend(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        return sparse_attention(q, k, v, Fixed(8, 2), first_query=first)

    for first in (3, 10, 17):
        wanted = sparse_attention(q[:, :, first : first + 9], k, v, Fixed(8, 2), first_query=first)
        assert torch.equal(attend(q[:, :, first : first + 9], k, v, first), wanted)


@pytest.mark.parametrize(
    "first, message",
    [
        (-1, "first_query=-1: must be 0 to 5 for 4 queries and 9 keys"),
        (6, "first_query=6: must be 0 to 5 for 4 queries and 9 keys"),
        (2.0, "first_query must be an int, not float"),
        (True, "first_query must be an int, not bool"),
    ],
)
def test_a_position_outside_the_keys_is_refused(first: Any, message: str) -> None:
    q, k = torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 9, 16)
    with pytest.raises(ValueError, match=f"^{message}$"):
        sparse_attention(q, k, k, Dense(), first_query=first)


def test_what_does_not_fit_is_refused() -> None:
    q, k = torch.zeros(1, 2, 9, 16), torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match=r"^first_query=0: leaves no room for 9 queries and 4 keys$"):
        sparse_attention(q, k, k, Dense(), first_query=0)
    with pytest.raises(ValueError, match=r"^k \(1, 2, 4, 16\) must have the batch and channels of q \(1, 2, 4, 8\)$"):
        sparse_attention(q[:, :, :4, :8], k, k, Dense(), first_query=0)
    with pytest.raises(ValueError, match=r"must match q .*; behind a cache, give first_query"):
        sparse_attention(k, q, q, Dense())
    with pytest.raises(ConfigError, match="FlexAttention has no backward on the CPU"):
        sparse_attention(k.requires_grad_(), q, q, Dense(), backend="flex", first_query=5)
