"""What layers of a pattern reach, how random blocks are drawn, and what plans cost."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Literal

import pytest
import torch
from torch import Tensor

from longstride.kernels import num_pairs
from longstride.kernels.forms import Bounds
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
)
from longstride.kernels.plan import view
from tests.harness.oracles import mask_of

FIXED = [(4, 1, 4), (6, 2, 3), (8, 8, 3), (5, 3, 1)]  # stride, summary and blocks


def reached(hops: Sequence[Tensor], residual: bool = True) -> Tensor:
    """(N, N) bool: over one layer after the other; residual connections keep what a position holds."""
    found = itself = torch.eye(len(hops[0]), dtype=torch.bool)
    for hop in hops:
        found = ((hop | itself if residual else hop).int() @ found.int()).bool()
    return found


def hops_needed(layer: Tensor) -> int:
    """How many equal layers reach every earlier position."""
    return next(n for n in range(1, 99) if torch.equal(reached([layer] * n), mask_of(Dense(), len(layer))))


@pytest.mark.parametrize("align", ["row", "target"])
@pytest.mark.parametrize("stride, factors, context", [(6, 3, 216), (6, 2, 36), (3, 4, 81), (2, 6, 64), (4, 3, 96)])
def test_p_hops_of_p_factors_reach_every_earlier_position_in_any_order(
    stride: int, factors: int, context: int, align: Literal["row", "target"]
) -> None:
    """Aligned to the target, every earlier token: row 0, which holds none, is only read by windows."""
    hops = [mask_of(factor, context) for factor in Strided(stride, num_factors=factors, align=align).factors()]
    first = int(align == "target")
    wanted = mask_of(Dense(), context)[:, first:]
    for start in range(factors):
        assert torch.equal(reached(hops[start:] + hops[:start])[:, first:], wanted)
    assert not torch.equal(reached(hops[1:])[:, first:], wanted)


@pytest.mark.parametrize("span", ["paper", "released"])
@pytest.mark.parametrize("stride, blocks", [(1, 5), (2, 3), (4, 4), (9, 3), (8, 1)])
def test_two_hops_of_strided_factors_reach_every_earlier_position_without_residual_connections(
    stride: int, blocks: int, span: Literal["paper", "released"]
) -> None:
    hops = [mask_of(factor, stride * blocks) for factor in Strided(stride, span).factors()]
    for ordered in (hops, hops[::-1]):
        assert torch.equal(reached(ordered, residual=False), mask_of(Dense(), stride * blocks))


@pytest.mark.parametrize("stride, summary, blocks", [*FIXED, (1, 1, 4)])
def test_two_hops_of_fixed_factors_reach_every_earlier_position_block_first(
    stride: int, summary: int, blocks: int
) -> None:
    """The order of ``interleaved``: what a block's end has gathered is read by all later blocks in the next layer.

    A query's own block is reached through itself: by include_self, or across the residual connection. Without either
    one, queries before their block's summary positions do not reach their own block.
    """
    context = stride * blocks
    causal, place = mask_of(Dense(), context), torch.arange(context)
    block, plain = (mask_of(factor, context) for factor in Fixed(stride, summary).factors())
    with_self = mask_of(Summary(stride, summary, include_self=True), context)
    assert torch.equal(reached([block, with_self], residual=False), causal)
    assert torch.equal(reached([block, plain]), causal)
    blind = block & (place % stride < stride - summary)[:, None]
    assert torch.equal(reached([block, plain], residual=False), causal & ~blind)


@pytest.mark.parametrize("stride, summary, blocks", FIXED)
def test_two_hops_of_fixed_factors_reach_summaries_and_the_own_block_summary_first(
    stride: int, summary: int, blocks: int
) -> None:
    """In the other order no include_self helps: nobody has gathered what a summary position has not yet read.

    A third hop does: block, summary, block is every pair of layers of an interleaved model and the next.
    """
    context = stride * blocks
    causal, place = mask_of(Dense(), context), torch.arange(context)
    hops = [mask_of(each, context) for each in (Summary(stride, summary, include_self=True), Block(stride))]
    is_summary = (place % stride >= stride - summary)[None, :]
    assert torch.equal(reached(hops, residual=False), causal & (is_summary | hops[1]))
    assert torch.equal(reached([hops[1], *hops], residual=False), causal)


def test_two_hops_past_a_heads_own_summaries_need_the_head_of_the_last_ones() -> None:
    """With num_summaries, what stands in a block behind a head's sub-block is reached by the heads behind it alone."""
    causal, block = mask_of(Dense(), 36), mask_of(Block(12), 36)
    for head in range(3):
        summary = mask_of(Summary(12, 3, 3, include_self=True).for_head(head), 36)
        missed = causal & ~reached([block, summary], residual=False)
        assert torch.equal(missed, causal & ~block & (torch.arange(36) % 12 >= 12 - 3 * head)[None, :])


@pytest.mark.parametrize("pattern", [LongNet((8, 16, 64), (1, 2, 4)), LongNet((8, 64), (1, 4))], ids=str)
def test_three_hops_of_all_heads_of_dilated_segments_reach_all_but_the_ends_of_the_segment_before(
    pattern: LongNet,
) -> None:
    heads = [mask_of(pattern.for_head(head), 64) for head in range(4)]
    segment = torch.arange(64) // 8
    wanted = mask_of(Dense(), 64) & (segment[:, None] - segment[None, :] != 1)
    assert bool(reached([reduce(or_, heads)] * 3)[wanted].all())
    assert not bool(reached([reduce(or_, heads)] * 2)[wanted].all())
    assert not bool(reached([reduce(or_, heads[:3])] * 9)[wanted].all())  # without one head some never get there


def test_draws_shorten_the_way() -> None:
    layers = [mask_of(BigBird(4, 2, 1, random).for_head(0), 128) for random in (0, 1, 2)]
    assert [hops_needed(layer) for layer in layers] == [30, 11, 6]


@pytest.mark.parametrize(
    "pattern, query, eligible",
    [
        (BigBird(1, 2, 3, 4), 40, range(3, 39)),
        (BigBird(1, 3, 2, 4, context=48, causal=False), 20, [*range(2, 18), *range(23, 48)]),
    ],
    ids=["causal", "two-sided"],
)
def test_draws_are_spread_evenly_and_differ_by_head_and_seed(
    pattern: BigBird, query: int, eligible: Sequence[int]
) -> None:
    """Over all blocks that are neither near nor first."""
    heads = [replace(pattern, seed=seed, index=head) for seed in (0, 1) for head in range(512)]
    draws = torch.tensor([[int(block) for block in each.draws(torch.tensor([query]))] for each in heads])
    assert all(len(set(row)) == 4 for row in draws.tolist())
    count = torch.bincount(draws.flatten())
    assert count.nonzero().flatten().tolist() == list(eligible)
    mean = draws.numel() / len(eligible)
    assert bool(((count[list(eligible)] - mean).abs() < 5 * mean**0.5).all())
    assert len({tuple(row) for row in draws.tolist()}) > 1000


# What it costs


def vector_bytes(pattern: Pattern, context: int) -> int:
    """Of all vectors that a forward and a backward pass keep about a head."""
    views = [view(part, context, side) for part in pattern.parts() for side in ("queries", "keys")]
    held = [
        entry
        for one in views
        for entry in (one.row_order, one.column_order, *(() if isinstance(one.bounds, Bounds) else one.bounds))
    ]
    return sum({id(entry): entry.nbytes for entry in held if isinstance(entry, Tensor)}.values())


@pytest.mark.parametrize(
    "pattern, bytes_a_position",
    [
        (Column(8, "target"), 0),
        (Strided(8, align="target"), 0),
        (Strided(4, num_factors=3, align="target"), 0),
        (Local(8, 4, "target"), 0),
        (Longformer(8, 4, 1, "target"), 0),
        (Longformer(8, 4, 1), 0),
        (Longformer(8, 1, 6), 0),
        (Longformer(8, 4, 8), 16),
        (Longformer(8, 4, 6), 32),
        (LongNet((16, 64, 256), (1, 2, 8)), 0),
        (BigBird(16, 2, 1, 0), 0),
        (BigBird(16, 2, 1, 3), 3 * 40),
        (Dense(causal=False), 0),
        (Local(8, 4, causal=False), 0),
        (Strided(4, num_factors=3, causal=False), 0),
        (Fixed(16, 4, causal=False), 0),
        (Longformer(8, globals=6, causal=False), 56),
        (Longformer(8, 4, 6, causal=False), 56),
        (BigBird(16, 2, 0, 0, causal=False), 0),
        (BigBird(16, 2, 1, 3, context=1024, causal=False), 56 + 3 * 40),
    ],
    ids=str,
)
def test_plans_are_closed_forms_or_cost_what_they_say(pattern: Pattern, bytes_a_position: int) -> None:
    assert vector_bytes(pattern.for_head(5), 1024) == bytes_a_position * 1024


@pytest.mark.parametrize("stride, factors", [(64, 2), (16, 3), (8, 4)])
def test_pairs_of_p_factors_grow_with_the_root(stride: int, factors: int) -> None:
    assert num_pairs(Strided(stride, num_factors=factors), 4096) <= factors * 4096 * stride


def test_pairs_of_a_window_and_globals_are_linear_in_the_context() -> None:
    for pattern in (Longformer(256), Longformer(256, 4), Longformer(256, globals=16)):
        short, middle, long = (num_pairs(pattern, context) for context in (3_072, 12_288, 49_152))
        assert long - middle == 4 * (middle - short)  # a constant for every further position
