"""Patterns against their definitions in loops, their closed forms, and their JSON."""

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import pytest
import torch

from longstride.kernels import ConfigError, num_pairs
from longstride.kernels.forms import Bounds, Fold
from longstride.kernels.patterns import (
    PATTERNS,
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
    pattern_from_json,
    pattern_to_json,
)
from longstride.testing.patterns import require_parts_make_the_mask
from tests.harness.oracles import all_patterns, mask_of, two_sided_patterns

NAMES = ", ".join(PATTERNS)
Reads = Callable[[int, int, int], bool]  # head, query, key; a causal pattern reads no later key besides


def near(window: int, dilation: int = 1) -> Reads:
    return lambda head, i, j: abs(i - j) in range(0, window * dilation, dilation)


def multiples(stride: int) -> Reads:
    return lambda head, i, j: (i - j) % stride == 0


def powers(stride: int, factors: int, window: int) -> Reads:
    """A window, then for every further factor its multiples, as many as there are below the next power."""
    far = [near(stride, stride**p) for p in range(1, factors - 1)]
    return any_of(near(window), *far, multiples(stride ** (factors - 1)))


def in_block(stride: int) -> Reads:
    return lambda head, i, j: i // stride == j // stride


def summaries(stride: int, count: int, sub_blocks: int = 1) -> Reads:
    return lambda head, i, j: 0 < stride - j % stride - count * (head % sub_blocks) <= count


def first(count: int) -> Reads:
    return lambda head, i, j: i < count or j < count


def any_of(*several: Reads) -> Reads:
    return lambda head, i, j: any(reads(head, i, j) for reads in several)


def before_target(stride: int, count: int) -> Reads:
    """The tokens at the first multiples of the stride before token i; row j holds token j - 1, and row 0 none."""
    return lambda head, i, j: j >= 1 and (i - (j - 1)) in range(stride, stride * (count + 1), stride)


def powers_before_target(stride: int, factors: int, window: int) -> Reads:
    far = [before_target(stride**p, stride) for p in range(1, factors - 1)]
    return any_of(near(window), *far, before_target(stride ** (factors - 1), 1000))


def segments(*members: tuple[int, int]) -> Reads:
    def reads(head: int, i: int, j: int) -> bool:
        return any(
            i // length == j // length and {(i - head) % dilation, (j - head) % dilation} == {0}
            for length, dilation in members
        )

    return reads


def mixed(state: int, value: int) -> int:
    """The documented hash, in Python's own integers."""
    x = (state + value + 0x9E3779B9) % 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def blocks(size: int, window: int, count: int, random: int, seed: int, context: int | None = None) -> Reads:
    """Blocks nearby, first blocks, and some of the others; without a context, of the others before."""

    @cache
    def drawn(head: int, block: int) -> list[int]:
        end = block if context is None else -(-context // size)
        others = [b for b in range(count, end) if abs(block - b) >= window]
        state = reduce(mixed, (seed, head, block), 0)
        return [others.pop(mixed(state, n) % len(others)) for n in range(min(random, len(others)))]

    def reads(head: int, i: int, j: int) -> bool:
        block, other = i // size, j // size
        is_near = block < count or other < count or abs(block - other) < window
        return is_near or other in drawn(head, block)

    return reads


ONE_FORM: dict[Pattern, Reads] = {  # patterns that are causal alone, or have another definition if not
    Column(1, "target"): before_target(1, 1000),
    Column(7, "target"): before_target(7, 1000),
    Column(8, "target"): before_target(8, 1000),
    Column(200, "target"): before_target(200, 1000),
    Local(5, 3, "target"): before_target(3, 5),
    Local(60, 7, "target"): before_target(7, 60),
    Local(3, 1, "target"): near(3),
    Strided(8, align="target"): powers_before_target(8, 2, 8),
    Strided(8, "paper", align="target"): powers_before_target(8, 2, 9),
    Strided(4, num_factors=3, align="target"): powers_before_target(4, 3, 4),
    Strided(2, "paper", 5, "target"): powers_before_target(2, 5, 3),
    Strided(1, "paper", 3, "target"): powers_before_target(1, 3, 2),
    Strided(50, num_factors=4, align="target"): powers_before_target(50, 4, 50),
    Longformer(5, 4, 1, "target"): any_of(first(1), before_target(4, 5)),
    Longformer(5, 4, 9, "target"): any_of(first(9), before_target(4, 5)),
    Longformer(3, 8, 6, "target"): any_of(first(6), before_target(8, 3)),
    Longformer(1, 3, 60, "target"): any_of(first(60), before_target(3, 1)),
    Longformer(7, 1, 2, "target"): any_of(first(2), near(7)),
    LongNet((6,), (1,)): segments((6, 1)),
    LongNet((4, 8, 24), (1, 2, 4)): segments((4, 1), (8, 2), (24, 4)),
    LongNet((6, 12), (1, 6)): segments((6, 1), (12, 6)),
    LongNet((2, 6, 48), (1, 1, 2)): segments((2, 1), (6, 1), (48, 2)),
    BigBird(4, 2, 1, 2): blocks(4, 2, 1, 2, 0),
    BigBird(3, 1, 0, 3, seed=2**32 - 1): blocks(3, 1, 0, 3, 2**32 - 1),
    BigBird(1, 1, 1, 1, seed=7): blocks(1, 1, 1, 1, 7),
    BigBird(4, 2, 1, 2, context=96, causal=False): blocks(4, 2, 1, 2, 0, 96),
    BigBird(3, 1, 0, 3, seed=2**32 - 1, context=50, causal=False): blocks(3, 1, 0, 3, 2**32 - 1, 50),
    BigBird(1, 1, 2, 1, seed=7, context=60, causal=False): blocks(1, 1, 2, 1, 7, 60),
}


def two_forms(causal: bool) -> dict[Pattern, Reads]:
    """Patterns that have a causal and a two-sided form of one definition."""
    return {
        Dense(causal=causal): lambda head, i, j: True,
        **{Local(window, causal=causal): near(window) for window in (1, 3, 7, 60)},
        Local(2**62, causal=causal): near(1000),
        Local(2, 8, causal=causal): near(2, 8),
        Local(5, 3, causal=causal): near(5, 3),
        Local(60, 7, causal=causal): near(60, 7),
        Local(3, 200, causal=causal): near(3, 200),
        **{Column(stride, causal=causal): multiples(stride) for stride in (1, 7, 8, 2**40)},
        **{Strided(stride, causal=causal): powers(stride, 2, stride) for stride in (1, 3, 8, 60)},
        **{Strided(stride, "paper", causal=causal): powers(stride, 2, stride + 1) for stride in (1, 4, 7)},
        Strided(4, num_factors=3, causal=causal): powers(4, 3, 4),
        Strided(2, num_factors=5, causal=causal): powers(2, 5, 2),
        Strided(4, "paper", 3, causal=causal): powers(4, 3, 5),
        Strided(2, "paper", 5, causal=causal): powers(2, 5, 3),
        Strided(1, "paper", 3, causal=causal): powers(1, 3, 2),
        Strided(50, num_factors=4, causal=causal): powers(50, 4, 50),
        **{Block(stride, causal=causal): in_block(stride) for stride in (1, 8, 9, 2**40)},
        **{
            pattern: any_of(summaries(*sizes), *others)
            for sizes in ((1, 1, 1), (3, 1, 3), (4, 4, 1), (8, 3, 2), (9, 2, 3))
            for pattern, others in (
                (Summary(*sizes, causal=causal), ()),
                (Summary(*sizes, include_self=True, causal=causal), (near(1),)),
                (Fixed(*sizes, causal=causal), (in_block(sizes[0]),)),
            )
        },
        Fixed(2**40, 3, causal=causal): in_block(1000),
        Longformer(7, causal=causal): any_of(near(7), first(1)),
        Longformer(5, globals=9, causal=causal): any_of(near(5), first(9)),
        Longformer(5, 4, causal=causal): any_of(near(5, 4), first(1)),
        Longformer(60, 2, causal=causal): any_of(near(60, 2), first(1)),
        Longformer(5, 4, 8, causal=causal): any_of(near(5, 4), first(8)),
        Longformer(3, 8, 6, causal=causal): any_of(near(3, 8), first(6)),
        Longformer(1, 3, 60, causal=causal): any_of(near(1), first(60)),
        BigBird(5, 3, 2, 0, causal=causal): blocks(5, 3, 2, 0, 0),
    }


DEFINITIONS = ONE_FORM | two_forms(True) | two_forms(False)


@pytest.mark.parametrize("pattern", DEFINITIONS, ids=str)
@pytest.mark.parametrize("context", [1, 8, 25, 96])
def test_masks_are_those_of_the_definitions_and_parts_those_of_the_masks(pattern: Pattern, context: int) -> None:
    """96 is a multiple of nearly all sizes, the others of few."""
    for head in (0, 1, 5):
        resolved = pattern.for_head(head)
        keys = [range(i + 1 if declares_causal(pattern) else context) for i in range(context)]
        reads = [[j in keys[i] and DEFINITIONS[pattern](head, i, j) for j in range(context)] for i in range(context)]
        assert torch.equal(mask_of(resolved, context), torch.tensor(reads)), head
        require_parts_make_the_mask(resolved, context)
        assert num_pairs(resolved, context) == sum(map(sum, reads))
        if resolved == pattern:
            break


def test_heads_that_differ_must_be_chosen() -> None:
    for pattern in (Summary(12, 2, num_summaries=3), LongNet((4, 8), (1, 2)), BigBird(4, 1, 1, 1)):
        with pytest.raises(ValueError, match="resolve it first"):
            mask_of(pattern, 8)


# Closed forms


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


# JSON


def test_json_round_trips() -> None:
    for pattern in (*all_patterns(), *DEFINITIONS):
        for each in (pattern, pattern.for_head(2)):
            assert pattern_from_json(pattern_to_json(each)) == each


WRITTEN: dict[Pattern, tuple[list[str], str]] = {  # keys of the JSON, and text
    Dense(): (["type"], "Dense()"),
    Local(4, 1): (["type", "window"], "Local(window=4)"),
    Local(4, 2): (["type", "window", "dilation"], "Local(window=4, dilation=2)"),
    Strided(4): (["type", "stride", "span"], "Strided(stride=4, span='released')"),
    Column(4): (["type", "stride"], "Column(stride=4)"),
    Column(4, "target"): (["type", "stride", "align"], "Column(stride=4, align='target')"),
    Block(4): (["type", "stride"], "Block(stride=4)"),
    Longformer(4): (["type", "window", "dilation", "globals"], "Longformer(window=4, dilation=1, globals=1)"),
    Fixed(8, 2): (
        ["type", "stride", "summary", "num_summaries", "index"],
        "Fixed(stride=8, summary=2, num_summaries=1, index=None)",
    ),
    Summary(8, 2): (
        ["type", "stride", "summary", "num_summaries", "include_self", "index"],
        "Summary(stride=8, summary=2, num_summaries=1, include_self=False, index=None)",
    ),
    BigBird(4, 2, 1, 2): (
        ["type", "block", "window", "globals", "random", "seed", "index"],
        "BigBird(block=4, window=2, globals=1, random=2, seed=0, index=None)",
    ),
}


def test_defaults_of_later_fields_are_written_as_they_always_were() -> None:
    for pattern, (keys, text) in WRITTEN.items():
        assert (list(pattern_to_json(pattern)), str(pattern)) == (keys, text)
    for pattern in two_sided_patterns():
        assert pattern_to_json(pattern)["causal"] is False and "causal=False" in str(pattern)
    assert all(cls.causal is True for cls in PATTERNS.values())


DRAWS = {"type": "bigbird", "block": 4, "window": 2, "globals": 1, "random": 2}
ALIGNED = 'align="target": needs a causal pattern; remove it, or "causal": false'


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
        ({"type": "local", "window": 4, "dilation": 0}, "dilation=0: must be an integer of at least 1"),
        ({"type": "column", "stride": 4, "align": "pixel"}, 'align="pixel": must be row or target'),
        ({"type": "strided", "stride": 4, "align": ["row"]}, 'align=["row"]: must be row or target'),
        ({"type": "strided", "stride": 4, "num_factors": 1}, "num_factors=1: must be an integer of at least 2"),
        ({"type": "strided", "stride": 4, "num_factors": 33}, "num_factors=33: must be at most 32"),
        ({"type": "longformer", "window": 4, "globals": 0}, "globals=0: must be an integer of at least 1"),
        ({"type": "longnet", "segments": 4, "dilations": [1]}, "segments=4: must be a list of integers of at least 1"),
        ({"type": "longnet", "segments": [4, 2.0], "dilations": [1]},
         "segments[1]=2.0: must be an integer of at least 1"),
        ({"type": "longnet", "segments": [64, 100], "dilations": [1, 2]},
         "segments=[64, 100]: each must be a multiple of the one before; nearest [64, 128]"),
        ({"type": "longnet", "segments": [64, 64], "dilations": [1, 2]},
         "segments=[64, 64]: each must be a multiple of the one before; nearest [64, 128]"),
        ({"type": "longnet", "segments": [64, 128, 256], "dilations": [1, 2]},
         "dilations=[1, 2]: must be one for each of the 3 segments; such as [1, 2, 2]"),
        ({"type": "longnet", "segments": [64], "dilations": [1, 2]},
         "dilations=[1, 2]: must be one for each of the 1 segments; such as [1]"),
        ({"type": "longnet", "segments": [64, 128, 256], "dilations": [2, 4, 6]},
         "dilations=[2, 4, 6]: must begin with 1, and each divide the next and the segment before its own; "
         "nearest [1, 4, 4]"),
        ({"type": "longnet", "segments": [64, 128], "dilations": [1, 2], "index": 2},
         "index=2: must be 0 to 1, or left out"),
        ({"type": "bigbird", "block": 4, "window": 0, "globals": 0, "random": 0},
         "window=0: must be an integer of at least 1"),
        ({"type": "bigbird", "block": 4, "window": 1, "globals": 0, "random": -1},
         "random=-1: must be an integer of at least 0"),
        ({"type": "bigbird", "block": 4, "window": 1, "globals": 0, "random": 1, "seed": 2**32},
         "seed=4294967296: must be below 2**32; largest 4294967295"),
        ({"type": "dense", "causal": 0}, "causal=0: must be true or false"),
        ({"type": "fixed", "stride": 8, "summary": 2, "causal": "no"}, 'causal="no": must be true or false'),
        ({"type": "longnet", "segments": [4], "dilations": [1], "causal": False},
         "causal: unknown key for longnet; known: segments, dilations, index, type"),
        *(({"type": kind, name: 4, "align": "target", "causal": False}, ALIGNED)
          for name, kinds in {"window": ("local", "longformer"), "stride": ("column", "strided")}.items()
          for kind in kinds),
        (DRAWS | {"causal": False},
         'context: missing; "causal": false draws from all blocks: give the model\'s context'),
        (DRAWS | {"context": 96}, 'context=96: only applies to random blocks of "causal": false; remove it'),
        (DRAWS | {"causal": False, "context": 0}, "context=0: must be an integer of at least 1"),
    ],
)  # fmt: skip
def test_a_wrong_pattern_is_named(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        pattern_from_json(value)
    assert str(error.value) == message


BOTH: dict[str, Any] = {"causal": False}


@pytest.mark.parametrize(
    "pattern, message",
    [
        *((pattern, "stride=100: must divide context 96; nearest 96")
          for pattern in (Column(100), Block(100), Summary(100, 8), Fixed(100, 8))),
        (Local(4, 7), "dilation=7: must divide context 96; nearest 6, 8"),
        (Local(4, 100), "dilation=100: must divide context 96; nearest 96"),
        (Strided(10), "stride=10: must divide context 96; nearest 8, 12"),
        (Strided(10, num_factors=3), "stride=10: its power 2 must divide context 96; nearest 4"),
        (Longformer(4, 5), "dilation=5: must divide context 96; nearest 4, 6"),
        (Longformer(4, globals=97), "globals=97: must not exceed context 96; largest 96"),
        (LongNet((4, 20), (1, 2)), "segments=[4, 20]: the last must divide context 96; nearest [4, 16]"),
        (LongNet((64, 128), (1, 2)), "segments=[64, 128]: the last must divide context 96; nearest [48, 96]"),
        (BigBird(10, 1, 1, 1), "block=10: must divide context 96; nearest 8, 12"),
        (BigBird(16, 2, 1, 9),
         "random=9: window + globals + random must not exceed the 6 blocks of context 96; largest 3"),
        (BigBird(16, 2, 9, 1),
         "globals=9: window + globals + random must not exceed the 6 blocks of context 96; largest 3"),
        (BigBird(16, 7, 0, 1),
         "window=7: window + globals + random must not exceed the 6 blocks of context 96; largest 5"),
        (BigBird(16, 7, 7, 7),
         "window=7: window + globals + random must not exceed the 6 blocks of context 96; "
         "with random 0 and globals 0 largest 6"),
        (BigBird(16, 1, 1, 1, context=48, **BOTH), "context=48: must be the model's context; nearest 96"),
        (BigBird(16, 3, 1, 2, context=96, **BOTH),
         "random=2: 2 x window - 1 + globals + random must not exceed the 6 blocks of context 96; largest 0"),
        (BigBird(16, 3, 5, 0, **BOTH),
         "globals=5: 2 x window - 1 + globals + random must not exceed the 6 blocks of context 96; largest 1"),
        (BigBird(16, 4, 0, 0, **BOTH),
         "window=4: 2 x window - 1 + globals + random must not exceed the 6 blocks of context 96; largest 3"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_context_is_named(pattern: Pattern, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        pattern.check(96)
    assert str(error.value) == message
