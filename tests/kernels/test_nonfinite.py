"""NaN and inf reach what reads them, and nothing else: every backend, both passes, patterns, selections, single queries.

The rule, as an oracle over the mask: a query's scores are lost where it or a key that it reads is not finite; its
gradients where its scores are, or the gradients that it is given, or a value that it reads. Whatever does not follow
from that has the same bits as in a run in which all is finite.

Letters: B batch, H heads, N positions, D width of queries and keys, Dv width of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels import CachedAttention, attend_listed, attend_one, selected_attention, sparse_attention
from longstride.kernels.patterns import BigBird, Block, Column, Dense, Fixed, Local, LongNet, Pattern, Strided, Summary
from longstride.kernels.selections import Selection, recent_members
from tests.harness.backends import DEVICES, MIXES, on, repeats
from tests.harness.oracles import (
    RESULTS,
    Inputs,
    Reads,
    Shape,
    allowed_by,
    attention_and_gradients,
    example_patterns,
    heads_to_see,
    make_inputs,
)

BRAIN, SINGLE = torch.bfloat16, torch.float32
PLACES = ("q", "k", "v", "grad_out", "grad_lse")
VALUES = (math.nan, math.inf, -math.inf)
KINDS = (Local(5), Column(8), Block(8), Summary(8, 2), Strided(8), Fixed(8, 2), Dense())
FURTHER = (BigBird(4, 2, 1, 2), LongNet((8, 24), (1, 2)), Local(5, 4))


def results(backend: str, inputs: Inputs, reads: Reads) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv; of ``flex``, which has no backward on a CPU, the first two."""
    attend: Any = selected_attention if isinstance(reads, Selection) else sparse_attention
    if backend == "flex":
        found = attend(*inputs[:3], reads, backend=backend, return_lse=True)
        return dict(zip(RESULTS, found, strict=False))
    return attention_and_gradients(
        lambda q, k, v: attend(q, k, v, reads, backend=backend, return_lse=True), inputs, DEVICES.get(backend, "cpu")
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
    q, k, v, grad_out = (~x.isfinite() for x in inputs[:4])
    assert inputs.grad_lse is not None
    pairs, some = allowed.float(), allowed.any(-1, keepdim=True)

    def of_keys(keys: Tensor) -> Tensor:
        return pairs @ keys.float() > 0

    def of_queries(queries: Tensor) -> Tensor:
        return pairs.mT @ queries.float() > 0

    scores = some & q.any(-1, keepdim=True) | of_keys(k.any(-1, keepdim=True))
    given = grad_out.any(-1, keepdim=True) | ~inputs.grad_lse.isfinite()[..., None]
    gradients = scores | some & given | of_keys(v.any(-1, keepdim=True))
    return {
        "out": scores | of_keys(v),
        "lse": scores[..., 0],
        "dq": gradients.expand_as(q),
        "dk": of_queries(gradients).expand_as(k),
        "dv": of_queries(scores | grad_out),
    }


def check(backend: str, reads: Reads, dtype: torch.dtype, shape: Shape, places: dict[str, Any], value: float) -> None:
    """Assert that what is not finite is lost where the rule says so, and has changed no bit of anything else."""
    inputs = make_inputs(shape, dtype, seed=3, grad_lse=True)
    bad = spoilt(inputs, places, value)
    allowed = allowed_by(reads, shape.heads, shape.context).expand(*shape[:3], shape.context)
    whole, found = results(backend, inputs, reads), results(backend, bad, reads)
    arithmetic = {} if math.isnan(value) else results("reference", bad, reads)
    for name, where in lost(bad, allowed).items():
        if name not in found:
            continue
        assert not where.all(), f"{name}: nothing is left to compare"
        assert torch.equal(found[name][~where], whole[name][~where]), f"{name}: {places} crossed a forbidden pair"
        # An inf may leave a number where its sign makes a weight 0. Whether it does is arithmetic's to say.
        gone = ~arithmetic[name].isfinite() & where if arithmetic else where
        assert not found[name][gone].isfinite().any(), f"{name}: {places} was hidden from a row that reads it"


def shape_of(backend: str, reads: Reads) -> Shape:
    """Several tiles, the last one ragged; of the slow interpreter no more than is needed."""
    if isinstance(reads, list):
        return Shape(1, len(reads), 50, 16, 16)
    return Shape(1, heads_to_see(reads), 50, 16, 16) if backend == "triton" else Shape(2, 2, 90, 16, 24)  # type: ignore[arg-type]


# A query and a key inside a tile, a block and a window; and some at once, in which a row is bad for several reasons.
ALONE = [{place: [21]} for place in PLACES]
# Of a summary, the first block reads nothing.
TOGETHER: dict[str, Any] = {"q": [3, 34], "k": [33], "v": [20, 33], "grad_out": [4, 19], "grad_lse": [5, 26]}


@pytest.mark.parametrize(
    "backend, pattern, dtype, places",
    [
        *(
            on(backend, pattern, dtype, places)
            for backend in ("cpu", "reference")
            for pattern in (*KINDS, *FURTHER, *MIXES)
            for dtype in (BRAIN, SINGLE)
            for places in ((*ALONE, TOGETHER) if dtype == SINGLE else (TOGETHER,))
        ),
        *(on("flex", pattern, SINGLE, places) for pattern in (Strided(8), Fixed(8, 2)) for places in ALONE[:3]),
    ],
    ids=str,
)
def test_nan_reaches_its_readers_alone(
    backend: str, pattern: Pattern | list[Pattern], dtype: torch.dtype, places: dict[str, Any]
) -> None:
    check(backend, pattern, dtype, shape_of(backend, pattern), places, math.nan)
