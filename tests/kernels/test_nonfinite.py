"""What is not finite is lost for what reads it, other contexts keep their bits, and caches may hold anything unread.

The rule, as an oracle over the mask: a query's scores are lost where it or a key that it reads is not finite; its
gradients where its scores are, or the gradients that it is given, or a value that it reads. Other rows of the same
context may be lost too, as tiles are multiplied whole.

Letters: B batch, H heads, N positions, D width of queries and keys, Dv width of values.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels import CachedAttention, attend_listed, attend_one, selected_attention, sparse_attention
from longstride.kernels.patterns import BigBird, Block, Column, Dense, Fixed, Local, LongNet, Pattern, Strided, Summary
from longstride.kernels.selections import Selection
from tests.harness.backends import DEVICES, MIXES, on, repeats
from tests.harness.oracles import (
    RESULTS,
    Inputs,
    Reads,
    Shape,
    allowed_by,
    attention_and_gradients,
    make_inputs,
)
from tests.kernels.test_selections import NAMES, on_device, selections

# The interpreter's maximum, which passes over NaN as a card's does, says so.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered")

BRAIN, SINGLE = torch.bfloat16, torch.float32
PLACES = ("q", "k", "v", "grad_out", "grad_lse")
VALUES = (math.nan, math.inf, -math.inf)
KINDS = (Local(5), Column(8), Block(8), Summary(8, 2), Strided(8), Fixed(8, 2), Dense())
FURTHER = (BigBird(4, 2, 1, 2), LongNet((8, 24), (1, 2)), Local(5, 4))


def results(backend: str, inputs: Inputs, reads: Reads) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv; of ``flex``, which has no backward on a CPU, the first two."""
    attend: Any = selected_attention if isinstance(reads, Selection) else sparse_attention
    if backend == "flex":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            found = attend(*inputs[:3], reads, backend=backend, return_lse=True)
        return dict(zip(RESULTS, found, strict=False))
    if isinstance(reads, Selection):
        reads = on_device(reads, backend)
    return attention_and_gradients(
        lambda q, k, v: attend(q, k, v, reads, backend=backend, return_lse=True), inputs, DEVICES[backend]
    )


def spoilt(inputs: Inputs, places: dict[str, Sequence[int]], value: float) -> Inputs:
    """One number of these rows of the first context and the last head is not finite."""
    changed = inputs._asdict()
    for name, rows in places.items():
        changed[name] = changed[name].clone()
        target = changed[name][0, -1]
        for row in rows:
            target[row if name == "grad_lse" else (row, 3)] = value
    return Inputs(**changed)


def lost(inputs: Inputs, allowed: Tensor) -> dict[str, Tensor]:
    """Where the results of (B, H, N, N) pairs hold no number, by the rule."""
    group = inputs.q.shape[1] // inputs.k.shape[1]  # of query heads that share keys
    q, grad_out = ~inputs.q.isfinite(), ~inputs.grad_out.isfinite()
    k, v = (~x.isfinite().repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
    assert inputs.grad_lse is not None
    pairs, some = allowed.float(), allowed.any(-1, keepdim=True)

    def of_keys(keys: Tensor) -> Tensor:
        return pairs @ keys.float() > 0

    def of_queries(queries: Tensor) -> Tensor:
        return (pairs.mT @ queries.float() > 0).unflatten(1, (-1, group)).any(2)

    scores = some & q.any(-1, keepdim=True) | of_keys(k.any(-1, keepdim=True))
    given = grad_out.any(-1, keepdim=True) | ~inputs.grad_lse.isfinite()[..., None]
    gradients = scores | some & given | of_keys(v.any(-1, keepdim=True))
    return {
        "out": scores | of_keys(v),
        "lse": scores[..., 0],
        "dq": gradients.expand_as(q),
        "dk": of_queries(gradients).expand_as(inputs.k),
        "dv": of_queries(scores | grad_out),
    }


def check(backend: str, reads: Reads, dtype: torch.dtype, shape: Shape, places: dict[str, Any]) -> None:
    """Assert that NaN is lost where the rule says so, and changes no bit of the other context."""
    inputs = make_inputs(shape, dtype, seed=3, grad_lse=True)
    bad = spoilt(inputs, places, math.nan)
    allowed = allowed_by(reads, shape.heads, shape.context).expand(*shape[:3], shape.context)
    whole, found = results(backend, inputs, reads), results(backend, bad, reads)
    where = lost(bad, allowed)
    for name in found:
        assert not found[name][where[name]].isfinite().any(), f"{name}: {places} was hidden from a row that reads it"
        assert torch.equal(found[name][1:], whole[name][1:]), f"{name}: {places} crossed into another context"


# A query and a key inside a tile, a block and a window; and some at once, in which a row is bad for several reasons.
# Of a summary, the first block reads nothing.
TOGETHER: dict[str, Any] = {"q": [3, 34], "k": [33], "v": [20, 33], "grad_out": [4, 19], "grad_lse": [5, 26]}
QUICK = ("cpu", "reference")


@pytest.mark.parametrize(
    "backend, reads, dtype",
    [
        *(
            on(backend, reads, (BRAIN, SINGLE)[(i + j) % 2])
            for i, backend in enumerate(QUICK)
            for j, reads in enumerate((*KINDS, *FURTHER, *MIXES, *NAMES))
        ),
        on("triton", "rounds", SINGLE),  # the next test has a pattern
        *(on("triton", reads, SINGLE, marks=[pytest.mark.campaign]) for reads in (*KINDS, *FURTHER, *MIXES, *NAMES)),
        *(on("flex", reads, SINGLE) for reads in (Strided(8), Fixed(8, 2))),
    ],
    ids=str,
)
def test_nan_reaches_its_readers_and_no_other_context(
    backend: str, reads: Pattern | list[Pattern] | str, dtype: torch.dtype
) -> None:
    shape = Shape(2, len(reads) if isinstance(reads, list) else 2, 50, 16, 16)
    check(backend, selections(*shape[:3])[reads] if isinstance(reads, str) else reads, dtype, shape, TOGETHER)


@pytest.mark.parametrize("backend", [on(name) for name in (*QUICK, "triton")])
def test_heads_that_share_keys_read_them_all(backend: str) -> None:
    check(backend, Fixed(8, 2), SINGLE, Shape(2, 4, 50, 16, 16, key_heads=2), TOGETHER)


@pytest.mark.parametrize(
    "backend, value",
    [*(on(name, value) for name in QUICK for value in (math.inf, -math.inf, 1e30)), on("triton", 1e30)],
)
def test_what_overflows_stays_in_its_context(backend: str, value: float) -> None:
    """An inf leaves a number where its sign makes a weight 0; products of 1e30 with itself overflow."""
    inputs = make_inputs(Shape(2, 2, 50, 16, 16), SINGLE, seed=3, grad_lse=True)
    whole, found = (results(backend, x, Fixed(8, 2)) for x in (inputs, spoilt(inputs, TOGETHER, value)))
    for name in found:
        assert torch.equal(found[name][1:], whole[name][1:]), name


# One query at a time


@pytest.mark.parametrize(
    "backend, pattern",
    [
        on(name, pattern, marks=repeats(i) if name == "triton" else ())
        for name in (*QUICK, "triton")
        for i, pattern in enumerate((Fixed(8, 2), Dense(), Strided(8), MIXES[0]))
    ],
    ids=str,
)
def test_a_cached_row_that_is_not_read_may_hold_anything(backend: str, pattern: Pattern | list[Pattern]) -> None:
    """Not a bit of the output and the logsumexp depends on it; of a row that is read, all of its readers do."""
    heads, context, position = 3, 72, 37
    q, k, v = (x.to(DEVICES[backend]) for x in make_inputs(Shape(2, heads, context, 16, 24), SINGLE)[:3])
    q = q[:, :, position]
    read = allowed_by(pattern, heads, context)[:, position].to(q.device)  # (H, N)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        cached = CachedAttention(k, v, pattern, backend=backend)
        cached(q, position - 1)  # after which copies may be kept
        return [cached(q, position), *attend_one(q, k, v, pattern, position, backend=backend, return_lse=True)]

    wanted = attend(q, k, v)
    for value in VALUES if backend in QUICK else VALUES[:1]:
        hidden = (x.masked_fill(~read[..., None], value) for x in (k, v))
        # What the query before reads and this one does not may be anything as well: it goes into that one's row alone.
        assert all(map(torch.equal, attend(q, *hidden), wanted))
        bad = q.clone()
        bad[0, 1] = value  # reaches neither other heads nor other contexts
        for found, whole in zip(attend(bad, k, v), wanted, strict=True):
            assert not found[0, 1].isfinite().any()
            found[0, 1] = whole[0, 1]
            assert torch.equal(found, whole)
    for value in VALUES:
        bad = v.clone()
        bad[0, :, position, 3] = value
        for found in attend(q, k, bad)[:2]:
            assert torch.equal(found[0, :, 3].isfinite(), ~read[:, position])


def test_a_listed_row_that_is_not_read_may_hold_anything() -> None:
    q, k, v = make_inputs(Shape(2, 3, 20, 8, 12), SINGLE)[:3]
    rows = torch.tensor([3, -1, 7]).expand(2, 3, 3)
    wanted = attend_listed(q[:, :, 0], k, v, rows)
    for value in VALUES:
        bad = [x.clone() for x in (k, v)]
        for x in bad:
            x[:, :, [0, 1, 2, *range(8, 20)]] = value
        assert torch.equal(attend_listed(q[:, :, 0], *bad, rows), wanted)
        bad[1][0, 1, 7, 2] = value
        found = attend_listed(q[:, :, 0], *bad, rows)
        assert not found[0, 1, 2].isfinite() and int(found.isfinite().sum()) == found.numel() - 1
