"""What every backend of ``selected_attention`` must do, over adversarial selections; and the ways to select.

Letters: B batch, H heads, N positions.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels import attend_listed, selected_attention
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import (
    Part,
    Selection,
    pattern_parts,
    recent_matches,
    recent_members,
    selection_mask,
    within_documents,
)
from tests.harness.backends import DEVICES, DTYPES, IN_THE_INTERPRETER, on
from tests.harness.oracles import (
    Inputs,
    Shape,
    all_patterns,
    assert_explained,
    assert_within_precision,
    attention_and_gradients,
    exact,
    expected,
    make_inputs,
)

HALF, BRAIN, SINGLE, DOUBLE = DTYPES
ALL = ("cpu", "reference")


def clusters(kind: str, batch: int, heads: int, context: int, seed: int = 0) -> Tensor:
    """(B, H, N) clusters: at random, all in one, some empty, as many as positions, or alternating."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, context)
    if kind == "one":
        return torch.zeros(shape, dtype=torch.int64)
    if kind == "each its own":
        return torch.randperm(context, generator=generator).expand(shape).contiguous()
    if kind == "in turn":
        return (torch.arange(context) % 5).expand(shape).contiguous()
    drawn = torch.randint(7, shape, generator=generator)
    return drawn.where(drawn % 3 == 0, 3) if kind == "some empty" else drawn


def random_part(batch: int, heads: int, context: int, seed: int) -> Part:
    """Random orders, some keys left out, and random bounds that never decrease: blind rows and wide ones."""
    generator = torch.Generator().manual_seed(seed)

    def permuted() -> Tensor:
        return torch.rand(batch, heads, context, generator=generator).argsort(-1).int()

    keys = context - context // 4
    bounds = torch.randint(keys + 1, (2, batch, heads, context), generator=generator).sort(-1).values.int()
    low, high = torch.minimum(bounds[0], bounds[1]), torch.maximum(bounds[0], bounds[1])
    high = torch.where(torch.rand(high.shape, generator=generator) < 0.1, low, high).cummax(-1).values
    return Part(permuted(), permuted()[..., :keys], low, high)


def selections(batch: int, heads: int, context: int) -> dict[str, Selection]:
    """Adversarial ones of every kind."""
    size = (batch, heads, context)
    found = {
        f"{kind} {window}": Selection((recent_members(clusters(kind, *size), window=window),), window or context)
        for kind in ("random", "one", "some empty", "each its own", "in turn")
        for window in ((None, 9) if kind in ("random", "one") else (9,))
    }
    other = clusters("random", *size, seed=5)
    found["apart"] = Selection((recent_members(clusters("some empty", *size), other, window=11, itself=False),), 11)
    found["rounds"] = Selection(
        tuple(recent_members(clusters("random", *size, seed=seed), window=9) for seed in range(3)), 9, disjoint=False
    )
    found["any orders"] = Selection((random_part(*size, seed=1),), context)
    found["any orders, twice"] = Selection((random_part(*size, seed=2), random_part(*size, seed=3)), context, False)
    ones = torch.ones(batch, heads, context, dtype=torch.int32)
    near = Part(None, None, (ones.cumsum(-1).int() - 4).clamp_min(0), ones.cumsum(-1).int())
    found["matches"] = Selection((near, recent_matches(other, other - 1, 0 * other, behind=4, count=6)), 6)
    found["itself"] = Selection((Part(None, None, ones.cumsum(-1).int() - 1, ones.cumsum(-1).int()),), 1)
    found["nothing"] = Selection((Part(None, None, ones, ones),), 1)
    # Alike for all heads and contexts, and so expanded.
    one = recent_members(clusters("random", 1, 1, context), window=9)
    found["expanded"] = Selection((Part(*(t if t is None else t.expand(size) for t in one)),), 9)
    return found


NAMES = tuple(selections(1, 1, 12))


def on_device(selection: Selection, backend: str) -> Selection:
    """The selection where a backend runs; axes of stride 0 and tensors in the same memory stay so."""
    known: dict[Any, Tensor] = {}

    def moved(vectors: Tensor | None) -> Tensor | None:
        if vectors is None:
            return None
        memory = vectors.data_ptr(), vectors.shape, vectors.stride()
        if memory not in known:
            kept = vectors[tuple(slice(0, None if step else 1) for step in vectors.stride())]
            known[memory] = kept.to(DEVICES[backend]).expand(vectors.shape)
        return known[memory]

    parts = tuple(Part(*map(moved, part)) for part in selection.parts)  # type: ignore[arg-type]
    return Selection(parts, selection.span, selection.disjoint)


def check(
    backend: str,
    selection: Selection,
    dtype: torch.dtype,
    shape: Shape,
    *,
    grad_lse: bool = True,
    scale: float | None = None,
) -> None:
    """Assert that all results are within their precision; heads are cut from rows, as in models."""
    selection.check(shape.context)
    there = on_device(selection, backend)
    inputs = make_inputs(shape, dtype, grad_lse=grad_lse)
    inputs = Inputs(*(t if t is None else t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs))
    found = attention_and_gradients(
        lambda q, k, v: selected_attention(q, k, v, there, scale=scale, backend=backend, return_lse=True),
        inputs,
        DEVICES[backend],
    )
    assert_within_precision(found, inputs, selection, scale)


PRECISION = [
    *(on("cpu", name, dtype, Shape(3, 4, 41, 16, 24)) for dtype in DTYPES for name in NAMES),
    *(  # by default each name once by the specification and in the slow interpreter, and each dtype several times
        on(backend, name, dtype, Shape(2, 2, 41, 16, 24), marks=[pytest.mark.campaign] if (i - j) % 4 else [])
        for backend in ("reference", "triton")
        for i, name in enumerate(NAMES)
        for j, dtype in enumerate(DTYPES)
    ),
    *(  # in many tiles
        on("cpu", name, dtype, Shape(1, 2, 512, 16, 16))
        for name, dtype in (
            ("random None", SINGLE),
            ("one 9", SINGLE),
            ("rounds", SINGLE),
            ("any orders, twice", BRAIN),
        )
    ),
    *(
        on("cpu", name, dtype, Shape(3, 4, 2_048, 16, 16), marks=[pytest.mark.campaign])
        for name in NAMES
        for dtype in (BRAIN, SINGLE)
    ),
]


@pytest.mark.parametrize("backend, name, dtype, shape", PRECISION, ids=str)
def test_results_are_within_precision(backend: str, name: str, dtype: torch.dtype, shape: Shape) -> None:
    # In fp32 rows of one key are left to fp64 where lse has a gradient: dense attention's own error is that gradient's
    # alone there, since what it subtracts from itself is the same number.
    grad_lse = shape.context < 512 and (backend != "triton" or dtype != SINGLE)
    scale = -0.3 if name == "rounds" else None
    check(backend, selections(*shape[:3])[name], dtype, shape, grad_lse=grad_lse, scale=scale)


@pytest.mark.parametrize("backend", [*(on(backend) for backend in ALL), on("triton", marks=[IN_THE_INTERPRETER])])
def test_no_row_reads_its_future(backend: str) -> None:
    """When the second half is assigned otherwise, the first stays: every bit, or all but rounding of other chunks."""
    shape = Shape(2, 2, 64, 16, 16)
    inputs, half = make_inputs(shape, torch.float64), 32
    later = [torch.cat([x[:, :, :half], x[:, :, half:].flip(2) + 1], 2) for x in inputs[:3]]
    assigned = clusters("random", *shape[:3])
    moved = torch.cat([assigned[..., :half], (assigned[..., half:] + 3) % 7], -1)
    outs, masks = [], []
    for (q, k, v), members in ((inputs[:3], assigned), (later, moved)):
        selection = Selection((recent_members(members, window=6),), 6)
        outs.append(selected_attention(q, k, v, selection, backend=backend)[:, :, :half])
        masks.append(selection_mask(selection, shape.context)[:, :, :half])
    assert torch.equal(*masks)
    assert not masks[0].triu(1).any()
    if backend == "reference":
        assert torch.equal(*outs)
    selection = Selection((recent_members(assigned, window=6),), 6)
    wanted = expected(inputs, selection)["out"].at(slice(half))
    for out in outs:
        assert_explained("out", out, wanted, selection)


def test_recent_members_are_those_of_the_definition() -> None:
    """By loops, for queries and keys of different clusters."""
    batch, heads, context, window = 2, 2, 23, 4
    queries, keys = (clusters("random", batch, heads, context, seed) for seed in (1, 2))
    for apart, itself in ((None, True), (None, False), (keys, True), (keys, False)):
        selection = Selection((recent_members(queries, apart, window=window, itself=itself),), window)
        selection.check(context)
        found, members = selection_mask(selection, context), queries if apart is None else apart
        for b in range(batch):
            for h in range(heads):
                for i in range(context):
                    last = i + 1 if itself else i
                    earlier = [j for j in range(last) if members[b, h, j] == queries[b, h, i]][-window:]
                    assert found[b, h, i].nonzero().flatten().tolist() == earlier


@pytest.mark.parametrize(("behind", "count"), [(0, 3), (1, 1), (5, 40), (30, 2)])
def test_recent_matches_are_those_of_the_definition(behind: int, count: int) -> None:
    """By loops, for keys of no cluster, and queries that may not read before a position."""
    shape = (2, 2, 23)
    queries, keys = (clusters("random", *shape, seed) for seed in (1, 2))
    keys[..., ::5] = -1
    starts = torch.arange(shape[-1]).expand(shape) // 9 * 9
    selection = Selection((recent_matches(queries, keys, starts, behind=behind, count=count),), count)
    selection.check(shape[-1])
    found = selection_mask(selection, shape[-1])
    for b, h, i in itertools.product(*map(range, shape)):
        earlier = range(int(starts[b, h, i]), i - behind + 1)
        matches = [j for j in earlier if keys[b, h, j] == queries[b, h, i]][-count:]
        assert found[b, h, i].nonzero().flatten().tolist() == matches


@pytest.mark.parametrize("pattern", all_patterns(), ids=str)
def test_a_patterns_parts_are_its_mask(pattern: Pattern) -> None:
    for context in (1, 37, 96):
        head = pattern.for_head(1)
        selection = Selection(pattern_parts(head, context), context)
        selection.check(context)
        position = torch.arange(context)
        assert torch.equal(selection_mask(selection, context)[0, 0], head.mask(position[:, None], position))


def test_a_pair_in_several_parts_counts_once() -> None:
    inputs = make_inputs(Shape(1, 2, 19, 8, 8), DOUBLE)
    part = recent_members(clusters("random", 1, 2, 19), window=5)
    once, twice = (Selection(parts, 5, disjoint=False) for parts in ((part,), (part, part)))
    for name, wanted in exact(inputs, once).items():
        torch.testing.assert_close(exact(inputs, twice)[name], wanted)
    with pytest.raises(ValueError, match="a pair is in several parts"):
        Selection((part, part), 5).check(19)


def test_one_query_reads_listed_rows() -> None:
    """As the row of the whole, from a cache in which rows that are not read hold NaN."""
    shape = Shape(2, 3, 29, 8, 12)
    q, k, v = make_inputs(shape, DOUBLE)[:3]
    selection = Selection((recent_members(clusters("random", *shape[:3]), window=5, itself=False),), 5)
    wanted, mask = selected_attention(q, k, v, selection), selection_mask(selection, shape.context)
    for position in (0, 7, 28):
        read = mask[:, :, position]
        rows = torch.where(read, torch.arange(shape.context), -1).sort(-1, descending=True).values[..., :6]
        keys, values = (x.masked_fill(~read[..., None], math.nan) for x in (k, v))
        torch.testing.assert_close(attend_listed(q[:, :, position], keys, values, rows), wanted[:, :, position])


@pytest.mark.parametrize("backend", [*(on(backend) for backend in ALL), on("triton", marks=[IN_THE_INTERPRETER])])
def test_the_last_queries_alone_have_their_rows(backend: str) -> None:
    """Fewer queries than keys: as rows of all queries, with the gradients that these give to keys and values."""
    q, k, v, grad, _ = make_inputs(Shape(2, 3, 29, 8, 12), SINGLE)
    bounds = random_part(2, 3, 29, seed=1)
    part = Part(None, bounds.key_order, bounds.low, bounds.high)
    last = part._replace(low=part.low[..., 20:], high=part.high[..., 20:])
    results = []
    for queries, chosen, name in ((q, part, "reference"), (q[:, :, 20:], last, backend)):
        tensors = [x.to(DEVICES[name]).detach().requires_grad_() for x in (queries, k, v)]
        selection = Selection((chosen,), 29).mapped(lambda x, name=name: x.to(DEVICES[name]))
        out = selected_attention(*tensors, selection, backend=name)
        out[:, :, -9:].backward(grad[:, :, 20:].to(DEVICES[name]))
        results.append(
            [x.cpu() for x in (out[:, :, -9:], tensors[0].grad[:, :, -9:], tensors[1].grad, tensors[2].grad)]
        )
    for actual, wanted in zip(*results[::-1], strict=True):
        torch.testing.assert_close(actual, wanted)
    with pytest.raises(ValueError, match="9 queries of 29 keys need a selection with disjoint parts"):
        selected_attention(q[:, :, 20:], k, v, Selection((last,), 29, disjoint=False))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda part: part._replace(low=part.low.long()), "part 0: low is torch.int64 on cpu: give int32 on cpu"),
        (lambda part: part._replace(high=part.high[:1]), r"part 0: high \(1, 2, 8\) must be \(2, 2, 8\)"),
    ],
)
def test_what_does_not_fit_is_told(change: Callable[[Part], Part], message: str) -> None:
    q, k, v = make_inputs(Shape(2, 2, 8, 4, 4), SINGLE)[:3]
    part = change(recent_members(clusters("random", 2, 2, 8)))
    with pytest.raises(ValueError, match=message):
        selected_attention(q, k, v, Selection((part,), 8))


@pytest.mark.parametrize("context", [1, 7, 40, 96])
def test_documents_have_a_pattern_each(context: int) -> None:
    """Any patterns together, documents of one position and of the whole context, and any length of these."""
    generator = torch.Generator().manual_seed(context)
    position = torch.arange(context)
    begins = torch.rand(3, context, generator=generator) < torch.tensor([0.0, 0.1, 0.6])[:, None]
    starts = torch.where(begins, position, 0).cummax(-1).values
    place, own = position - starts, starts[:, :, None] == starts[:, None]
    patterns = [pattern.for_head(head) for pattern in all_patterns() for head in range(2)]
    alike = within_documents(patterns[:1] * 4, starts.int())
    assert all(tensor is None or tensor.stride(1) == 0 for part in alike.parts for tensor in part)
    for some in (patterns, patterns[:1] * 2):
        selection = within_documents(some, starts.int())
        selection.check(context)
        wanted = torch.stack([own & pattern.mask(place[:, :, None], place[:, None]) for pattern in some], 1)
        assert torch.equal(selection_mask(selection, context), wanted)
