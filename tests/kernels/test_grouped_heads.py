"""Keys and values with fewer heads than queries, on every backend: each head of them serves a group of query heads.

Letters: B batch, H heads of queries, K heads of keys and values, N positions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels import (
    CachedAttention,
    attend_listed,
    attend_one,
    empty_cache,
    sparse_attention,
)
from longstride.kernels.patterns import Block, Column, Dense, Fixed, Local, Pattern, Strided
from tests.harness.backends import DEVICES, DTYPES, on
from tests.harness.oracles import (
    RESULTS,
    Shape,
    assert_within_precision,
    attention_and_gradients,
    check_against_reference,
    exact,
    make_inputs,
)
from tests.kernels.test_selections import check, selections

HALF, BRAIN, SINGLE, DOUBLE = DTYPES
# Of four heads: alike, of closed runs, of groups that differ inside, and in turn.
READS: dict[str, Pattern | list[Pattern]] = {
    "dense": Dense(),
    "fixed": Fixed(8, 2, 2),
    "blocks and columns": [Block(8), Block(8), Column(8), Column(8)],
    "closed and open": Strided(8),
    "within a group": [Local(5), Dense(), Fixed(8, 2), Local(5)],
    "in turn": [Strided(8), Local(7), Strided(8), Local(7)],
}
CASES = [
    *(on("cpu", d, reads, 1 + (i + j) % 2) for i, d in enumerate(DTYPES) for j, reads in enumerate(READS)),
    *(on("reference", SINGLE, reads, K) for reads in READS for K in (1, 2)),
    *(
        on("triton", dtype, reads, 1 + (i + j) % 2, marks=[] if i == j % 3 else [pytest.mark.campaign])
        for i, dtype in enumerate(DTYPES[:3])
        for j, reads in enumerate(READS)
    ),
]


def each_its_own(x: Tensor, heads: int) -> Tensor:
    """(B, K, …) as (B, H, …)."""
    return x.repeat_interleave(heads // x.shape[1], 1)


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_the_specification_is_that_of_heads_with_keys_of_their_own(
    reads: Pattern | list[Pattern], key_heads: int
) -> None:
    inputs = make_inputs(Shape(2, 4, 40, 16, 24, key_heads), DOUBLE, grad_lse=True)
    found = exact(inputs, reads)
    wanted = exact(inputs._replace(k=each_its_own(inputs.k, 4), v=each_its_own(inputs.v, 4)), reads)
    for name in RESULTS:
        if name in ("dk", "dv"):
            wanted[name] = wanted[name].unflatten(1, (key_heads, -1)).sum(2)
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend, dtype, reads, key_heads", CASES, ids=str)
def test_results_are_within_precision(backend: str, dtype: torch.dtype, reads: str, key_heads: int) -> None:
    shape = Shape(1, 4, 37, 16, 24, key_heads) if backend == "triton" else Shape(2, 4, 45, 16, 24, key_heads)
    check_against_reference(backend, READS[reads], dtype, shape, grad_lse=True, device=DEVICES[backend])


@pytest.mark.parametrize("backend", [on("cpu"), on("triton")])
def test_two_runs_give_the_same_bits_in_the_order_of_the_inputs(backend: str) -> None:
    """Of as many threads, of which others may round otherwise; heads are cut from rows, as in models."""
    inputs = make_inputs(Shape(1 if backend == "triton" else 2, 4, 33, 16, 16, 2), BRAIN)
    inputs = inputs._replace(
        **{name: getattr(inputs, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return sparse_attention(q, k, v, Strided(8), backend=backend, return_lse=True)

    for threads in (1, 3) if backend == "cpu" else (1,):
        torch.set_num_threads(threads)
        runs = [attention_and_gradients(attend, inputs, DEVICES[backend]) for _ in range(2)]
        assert all(torch.equal(runs[0][name], runs[1][name]) for name in RESULTS)
        assert_within_precision(runs[0], inputs, Strided(8))
    assert all(runs[0][f"d{name}"].stride() == getattr(inputs, name).stride() for name in "qkv")


@pytest.mark.parametrize(
    "backend, dtype, name",
    [
        on(backend, dtype, name, marks=[pytest.mark.campaign] if backend == "triton" and i != j else ())
        for backend in ("cpu", "reference", "triton")
        for i, dtype in enumerate((SINGLE, BRAIN))
        for j, name in enumerate(("random 9", "any orders, twice", "rounds"))
    ],
)
def test_selections_are_those_of_query_heads(backend: str, dtype: torch.dtype, name: str) -> None:
    batch = 1 if backend == "triton" else 2
    check(backend, selections(batch, 4, 33)[name], dtype, Shape(batch, 4, 33, 16, 24, 2), grad_lse=False)


@pytest.mark.parametrize(
    "backend, reads, key_heads",
    [
        on(
            backend,
            reads,
            key_heads,
            marks=[pytest.mark.campaign] if backend == "triton" and i % 4 != key_heads else (),
        )
        for backend in ("cpu", "reference", "triton")
        for i, reads in enumerate(READS)
        for key_heads in (1, 2)
    ],
)
def test_single_queries_read_their_groups_keys(backend: str, reads: str, key_heads: int) -> None:
    """From caches in the order in memory of ``empty_cache``, written row by row; forward again after a step back."""
    shape, pattern, device = Shape(2, 4, 40, 16, 24, key_heads), READS[reads], DEVICES[backend]
    given = make_inputs(shape, SINGLE)
    wanted = sparse_attention(*(x.double() for x in given[:3]), pattern, backend="reference")
    q, *rows = (x.to(device) for x in given[:3])
    k, v = (
        empty_cache(2, key_heads, 40, width, pattern, device=torch.device(device), dtype=SINGLE).fill_(math.nan)
        for width in (16, 24)
    )
    attend = CachedAttention(k, v, pattern, heads=4, backend=backend)
    for position in (*range(20), *range(9, 40)) if backend == "cpu" else (0, 7, 8, 39):
        for cache, row in zip((k, v), rows, strict=True):
            cache[:, :, : position + 1] = row[:, :, : position + 1]
        found = [attend(q[:, :, position], position)]
        found.append(attend_one(q[:, :, position], k, v, pattern, position, backend=backend))
        for each in found:
            torch.testing.assert_close(each.cpu().double(), wanted[:, :, position], rtol=1e-5, atol=1e-5)


def test_listed_rows_are_those_of_a_groups_keys() -> None:
    q, k, v = make_inputs(Shape(2, 4, 12, 16, 8, 2), DOUBLE)[:3]
    positions = torch.stack([torch.randperm(12)[:5] for _ in range(8)]).view(2, 4, 5)
    positions[0, 0, 2:] = -1
    found = attend_listed(q[:, :, 11], k, v, positions)
    wanted = attend_listed(q[:, :, 11], each_its_own(k, 4), each_its_own(v, 4), positions)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def attend_with_cache(q: Tensor, k: Tensor, v: Tensor, patterns: Sequence[Pattern] | Pattern) -> Tensor:
    return CachedAttention(k, v, patterns, heads=q.shape[1])(q[:, :, 3], 3)


@pytest.mark.parametrize(
    "attend",
    [
        sparse_attention,
        lambda q, k, v, pattern: attend_one(q[:, :, 3], k, v, pattern, 3),
        lambda q, k, v, pattern: attend_listed(q[:, :, 3], k, v, torch.zeros(*q.shape[:2], 1)),
        attend_with_cache,
    ],
)
def test_heads_that_do_not_divide_are_refused(attend: Callable[..., Any]) -> None:
    q, k = torch.zeros(1, 4, 9, 16), torch.zeros(1, 3, 9, 16)
    with pytest.raises(ValueError, match="k and v have 3 heads: their number must divide the 4 heads of q"):
        attend(q, k, k, Local(3))
    with pytest.raises(ValueError, match=r"v \(1, 2, 9, 16\) must have the batch, heads and positions of k"):
        attend(q, torch.zeros(1, 1, 9, 16), torch.zeros(1, 2, 9, 16), Local(3))


def test_a_cache_serves_the_heads_that_were_asked_for() -> None:
    k = torch.zeros(1, 2, 9, 16)
    with pytest.raises(ValueError, match=r"q \(1, 4, 16\) must have heads=2, as the cache was created for"):
        CachedAttention(k, k, Local(3))(torch.zeros(1, 4, 16), 3)
    with pytest.raises(ValueError, match="3 patterns for 2 heads"):
        empty_cache(1, 2, 9, 16, [Local(3)] * 3, device=torch.device("cpu"), dtype=SINGLE)
