"""Patterns against the paper's equations, and their parts against their masks."""

import pytest
import torch

from longstride.kernels import ConfigError
from longstride.kernels.forms import Bounds, Fold
from longstride.kernels.patterns import (
    PATTERNS,
    Block,
    Column,
    Dense,
    Fixed,
    Local,
    Pattern,
    Strided,
    Summary,
    pattern_from_json,
    pattern_to_json,
)
from tests.harness.oracles import all_patterns, mask_of

NAMES = ", ".join(PATTERNS)


def papers_keys(kind: str, i: int, l: int, c: int, g: int) -> set[int]:  # noqa: E741  the paper's letters
    """The keys of query i as the table of the paper counts them out; g is the head's summary sub-block."""
    local = set(range(max(0, i - l + 1), i + 1))
    column = set(range(i % l, i + 1, l))
    block = set(range(i // l * l, i + 1))
    ends = {start + t for start in range(0, i + 1, l) for t in range(l - c * (g + 1), l - c * g)} & set(range(i + 1))
    return {
        "dense": set(range(i + 1)),
        "local": local,
        "column": column,
        "strided": local | column,
        "strided paper": set(range(max(0, i - l), i + 1)) | column,
        "block": block,
        "summary": ends,
        "summary with self": ends | {i},
        "fixed": block | ends,
    }[kind]


def papers_patterns(stride: int, c: int, num_summaries: int) -> dict[str, Pattern]:
    return {
        "dense": Dense(),
        "local": Local(stride),
        "column": Column(stride),
        "strided": Strided(stride),
        "strided paper": Strided(stride, "paper"),
        "block": Block(stride),
        "summary": Summary(stride, c, num_summaries),
        "summary with self": Summary(stride, c, num_summaries, include_self=True),
        "fixed": Fixed(stride, c, num_summaries),
    }


@pytest.mark.parametrize("stride, c, num_summaries", [
    (1, 1, 1), (3, 1, 1), (3, 1, 3), (4, 2, 2), (4, 4, 1), (8, 2, 3), (8, 3, 2), (9, 1, 5), (60, 20, 1),
])  # fmt: skip
@pytest.mark.parametrize("context", [1, 2, 8, 9, 27])
def test_masks_of_every_head_equal_the_papers_sets(stride: int, c: int, num_summaries: int, context: int) -> None:
    for kind, pattern in papers_patterns(stride, c, num_summaries).items():
        for head in range(2 * num_summaries):
            found = mask_of(pattern.for_head(head), context)
            for i in range(context):
                keys = set(found[i].nonzero().flatten().tolist())
                assert keys == papers_keys(kind, i, stride, c, head % num_summaries), (kind, head, i)


def test_an_unresolved_pattern_has_no_mask() -> None:
    with pytest.raises(ValueError, match="resolve it first"):
        mask_of(Summary(12, 2, num_summaries=3), 24)


def has_a_row(inverse: Fold, position: torch.Tensor) -> torch.Tensor:
    """Which positions an inverse gives a row, by its width and length: what a kernel asks."""
    moved = position + inverse.before
    return (moved >= 0) & (moved % inverse.period < (inverse.width or 0)) & (inverse(position) < inverse.length)


@pytest.mark.parametrize("pattern", all_patterns(), ids=str)
@pytest.mark.parametrize("context", [1, 40, 50, 72])
def test_orders_in_closed_form_have_an_inverse(pattern: Pattern, context: int) -> None:
    for part in pattern.for_head(1).parts():
        for order in (part.query_order(context), part.key_order(context)):
            if not isinstance(order, Fold):
                continue
            row, inverse = torch.arange(order.length), order.inverse()
            assert torch.equal(inverse(order(row)), row)
            position = torch.arange(context)
            assert torch.equal(position[has_a_row(inverse, position)], order(row).sort().values)


@pytest.mark.parametrize("pattern", all_patterns(), ids=str)
def test_whole_blocks_need_no_vectors(pattern: Pattern) -> None:
    """A plan of a million positions is a few integers, if the pattern gives a closed form for its keys."""
    for part in pattern.for_head(1).parts():
        if part.by_key(72) is not None:
            orders = part.query_order(72), part.key_order(72)
            assert isinstance(part.by_query(72), Bounds) and not any(isinstance(each, torch.Tensor) for each in orders)


def two_hops(earlier: Pattern, later: Pattern, context: int, residual: bool = False) -> torch.Tensor:
    """(N, N) bool: in the later layer i reads some m, and in the earlier one m has read j (section 4.2).

    Across the ``residual`` connection a position also keeps what it holds, which is to read itself.
    """
    first, second = mask_of(earlier, context), mask_of(later, context)
    if residual:
        first, second = (hop | torch.eye(context, dtype=torch.bool) for hop in (first, second))
    return (second.int() @ first.int()).bool()


@pytest.mark.parametrize("span", ["paper", "released"])
@pytest.mark.parametrize("stride, blocks", [(1, 5), (2, 3), (4, 4), (9, 3), (8, 1)])
def test_two_hops_of_strided_factors_reach_every_earlier_position_in_either_order(
    stride: int, blocks: int, span: str
) -> None:
    context = stride * blocks
    local, column = Strided(stride, span).factors()  # type: ignore[arg-type]
    for earlier, later in ((local, column), (column, local)):
        assert torch.equal(two_hops(earlier, later, context), mask_of(Dense(), context))


@pytest.mark.parametrize("stride, summary, blocks", [(4, 1, 4), (6, 2, 3), (8, 8, 3), (5, 3, 1), (1, 1, 4)])
def test_two_hops_of_fixed_factors_reach_every_earlier_position_block_first(
    stride: int, summary: int, blocks: int
) -> None:
    """The order of ``interleaved``: what a block's end has gathered is read by all later blocks in the next layer.

    A query's own block is reached through itself: by include_self, or across the residual connection. Without either
    one, queries before their block's summary positions do not reach their own block.
    """
    context = stride * blocks
    causal, place = mask_of(Dense(), context), torch.arange(context)
    block, plain = Fixed(stride, summary).factors()
    assert torch.equal(two_hops(block, Summary(stride, summary, include_self=True), context), causal)
    assert torch.equal(two_hops(block, plain, context, residual=True), causal)
    blind = mask_of(block, context) & (place % stride < stride - summary)[:, None]
    assert torch.equal(two_hops(block, plain, context), causal & ~blind)


@pytest.mark.parametrize("stride, summary, blocks", [(4, 1, 4), (6, 2, 3), (8, 8, 3), (5, 3, 1)])
def test_two_hops_of_fixed_factors_reach_summaries_and_the_own_block_summary_first(
    stride: int, summary: int, blocks: int
) -> None:
    """In the other order no include_self helps: nobody has gathered what a summary position has not yet read.

    A third hop does: block, summary, block is every pair of layers of an interleaved model and the next.
    """
    context = stride * blocks
    causal, place = mask_of(Dense(), context), torch.arange(context)
    block, with_self = Block(stride), Summary(stride, summary, include_self=True)
    is_summary = (place % stride >= stride - summary)[None, :]
    reached = two_hops(with_self, block, context)
    assert torch.equal(reached, causal & (is_summary | mask_of(block, context)))
    third = (reached.int() @ mask_of(block, context).int()).bool()
    assert torch.equal(third, causal)


def test_two_hops_past_a_heads_own_summaries_need_the_head_of_the_last_ones() -> None:
    """With num_summaries, what stands in a block behind a head's sub-block is reached by the heads behind it alone."""
    context, block = 36, Block(12)
    place = torch.arange(context)
    earlier_block = ~mask_of(block, context) & mask_of(Dense(), context)
    for head in range(3):
        summary = Summary(12, 3, 3, include_self=True).for_head(head)
        missed = mask_of(Dense(), context) & ~two_hops(block, summary, context)
        assert torch.equal(missed, earlier_block & (place % 12 >= 12 - 3 * head)[None, :])


@pytest.mark.parametrize("pattern", [*all_patterns(), Fixed(9, 2, 3).for_head(2)], ids=str)
def test_json_round_trips(pattern: Pattern) -> None:
    assert pattern_from_json(pattern_to_json(pattern)) == pattern


@pytest.mark.parametrize(
    "value, message",
    [
        ("dense", f"type: a pattern is an object with a type: {NAMES}"),
        ({"stride": 4}, f"type: missing; one of {NAMES}"),
        ({"typ": "local", "window": 4}, "typ: unknown key; nearest type"),
        ({"type": None}, "type=null: must be a pattern's name; "
         f"known: {NAMES}"),
        ({"type": ["fixed"]}, "type=[\"fixed\"]: must be a pattern's name; nearest fixed"),
        ({"type": {}}, "type={}: must be a pattern's name; "
         f"known: {NAMES}"),
        ({1: "fixed"}, f"type: missing; one of {NAMES}"),
        ({"type": "local", "window": 4, 7: 4},
         "7: unknown key for local; known: window, dilation, align, causal, type"),
        ({"type": "local", "window": 4, None: 4},
         "None: unknown key for local; known: window, dilation, align, causal, type"),
        ({"type": "fixd"}, "type=\"fixd\": must be a pattern's name; nearest fixed"),
        ({"type": "local"}, "window: missing; local needs it"),
        ({"type": "local", "window": 4, "windw": 4}, "windw: unknown key for local; nearest window"),
        ({"type": "local", "window": 0}, "window=0: must be an integer of at least 1"),
        ({"type": "local", "window": 2.0}, "window=2.0: must be an integer of at least 1"),
        ({"type": "column", "stride": True}, "stride=true: must be an integer of at least 1"),
        ({"type": "strided", "stride": 4, "span": "p"}, 'span="p": must be paper or released'),
        ({"type": "fixed", "stride": 8, "summary": 3, "num_summaries": 3},
         "summary=3: summary x num_summaries must not exceed stride 8; largest 2"),
        ({"type": "summary", "stride": 8, "summary": 3, "include_self": 1}, "include_self=1: must be true or false"),
        ({"type": "summary", "stride": 8, "summary": 3, "index": 1}, "index=1: must be 0 to 0, or left out"),
    ],
)  # fmt: skip
def test_a_wrong_pattern_is_named(value: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        pattern_from_json(value)
    assert str(error.value) == message


@pytest.mark.parametrize("kind", ["column", "strided", "block", "summary", "fixed"])
def test_a_stride_that_does_not_divide_the_context_is_named_with_its_neighbours(kind: str) -> None:
    value = {"type": kind, "stride": 100} | ({"summary": 8} if kind in ("summary", "fixed") else {})
    with pytest.raises(ConfigError) as error:
        pattern_from_json(value).check(12288)
    assert str(error.value) == "stride=100: must divide context 12288; nearest 96, 128"
