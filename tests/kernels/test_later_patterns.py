"""Patterns of later papers, and of any p: against their definitions in loops, what they reach, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Literal

import pytest
import torch
from torch import Tensor

from longstride.kernels import ConfigError, num_pairs
from longstride.kernels.forms import Bounds
from longstride.kernels.patterns import (
    BigBird,
    Column,
    Dense,
    Fixed,
    Local,
    Longformer,
    LongNet,
    Pattern,
    Strided,
    pattern_from_json,
    pattern_to_json,
)
from longstride.kernels.plan import view
from longstride.testing.patterns import require_parts_make_the_mask
from tests.harness.backends import DEVICES, on
from tests.harness.oracles import Shape, check_against_reference, mask_of

Reads = Callable[[int, int, int], bool]  # head, query, key at most the query
HEADS = (0, 1, 5)


def dilated(window: int, dilation: int) -> Reads:
    return lambda head, i, j: (i - j) in range(0, window * dilation, dilation)


def longformer(window: int, dilation: int, count: int) -> Reads:
    return lambda head, i, j: j < count or dilated(window, dilation)(head, i, j)


def before_target(stride: int, count: int) -> Reads:
    """The tokens at the first multiples of the stride before token i; row j holds token j - 1, and row 0 none."""
    return lambda head, i, j: j >= 1 and (i - (j - 1)) in range(stride, stride * (count + 1), stride)


def powers_before_target(stride: int, factors: int, span: int) -> Reads:
    far = [before_target(stride**p, stride) for p in range(1, factors - 1)]
    far.append(before_target(stride ** (factors - 1), 1000))
    return lambda head, i, j: i - j < span or any(reads(head, i, j) for reads in far)


def powers(stride: int, factors: int, span: int) -> Reads:
    """Window of ``span``, then for every further factor its multiples, as many as there are below the next power."""

    def reads(head: int, i: int, j: int) -> bool:
        far = [(stride**p, stride ** (p + 1)) for p in range(1, factors - 1)]
        last = stride ** (factors - 1)
        return i - j < span or any((i - j) in range(0, end, step) for step, end in far) or (i - j) % last == 0

    return reads


def segments(*members: tuple[int, int]) -> Reads:
    def reads(head: int, i: int, j: int) -> bool:
        return any(
            start <= j and i < start + length and {(i - head) % dilation, (j - head) % dilation} == {0}
            for length, dilation in members
            for start in [i // length * length]
        )

    return reads


def mixed(state: int, value: int) -> int:
    """The documented hash, in Python's own integers."""
    x = (state + value + 0x9E3779B9) % 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def drawn(seed: int, head: int, block: int, between: list[int], random: int) -> list[int]:
    """By taking each from a list of what is left."""
    state = reduce(mixed, (seed, head, block), 0)
    return [between.pop(mixed(state, n) % len(between)) for n in range(min(random, len(between)))]


def blocks(size: int, window: int, count: int, random: int, seed: int) -> Reads:
    def reads(head: int, i: int, j: int) -> bool:
        own, other = i // size, j // size
        between = list(range(count, own - window + 1))
        return other > own - window or other < count or other in drawn(seed, head, own, between, random)

    return reads


DEFINITIONS: dict[Pattern, Reads] = {
    Local(5, 3): dilated(5, 3),
    Local(2, 8): dilated(2, 8),
    Local(60, 7): dilated(60, 7),
    Local(3, 200): dilated(3, 200),
    Strided(4, num_factors=3): powers(4, 3, 4),
    Strided(2, num_factors=5): powers(2, 5, 2),
    Strided(4, "paper", 3): powers(4, 3, 5),
    Strided(1, "paper", 3): powers(1, 3, 2),
    Strided(50, num_factors=4): powers(50, 4, 50),
    Column(1, "target"): before_target(1, 1000),
    Column(7, "target"): before_target(7, 1000),
    Column(8, "target"): before_target(8, 1000),
    Column(200, "target"): before_target(200, 1000),
    Local(5, 3, "target"): before_target(3, 5),
    Local(60, 7, "target"): before_target(7, 60),
    Local(3, 1, "target"): dilated(3, 1),
    Strided(8, align="target"): powers_before_target(8, 2, 8),
    Strided(8, "paper", align="target"): powers_before_target(8, 2, 9),
    Strided(4, num_factors=3, align="target"): powers_before_target(4, 3, 4),
    Strided(2, "paper", 5, "target"): powers_before_target(2, 5, 3),
    Strided(1, "paper", 3, "target"): powers_before_target(1, 3, 2),
    Strided(50, num_factors=4, align="target"): powers_before_target(50, 4, 50),
    Longformer(5, 4, 1, "target"): lambda head, i, j: j < 1 or before_target(4, 5)(head, i, j),
    Longformer(5, 4, 9, "target"): lambda head, i, j: j < 9 or before_target(4, 5)(head, i, j),
    Longformer(3, 8, 6, "target"): lambda head, i, j: j < 6 or before_target(8, 3)(head, i, j),
    Longformer(1, 3, 60, "target"): lambda head, i, j: j < 60 or before_target(3, 1)(head, i, j),
    Longformer(7, 1, 2, "target"): longformer(7, 1, 2),
    Longformer(7): longformer(7, 1, 1),
    Longformer(5, globals=9): longformer(5, 1, 9),
    Longformer(5, 4): longformer(5, 4, 1),
    Longformer(60, 2): longformer(60, 2, 1),
    Longformer(5, 4, 8): longformer(5, 4, 8),
    Longformer(3, 8, 6): longformer(3, 8, 6),
    Longformer(1, 3, 60): longformer(1, 3, 60),
    LongNet((6,), (1,)): segments((6, 1)),
    LongNet((4, 8, 24), (1, 2, 4)): segments((4, 1), (8, 2), (24, 4)),
    LongNet((6, 12), (1, 6)): segments((6, 1), (12, 6)),
    LongNet((2, 6, 48), (1, 1, 2)): segments((2, 1), (6, 1), (48, 2)),
    BigBird(4, 2, 1, 2): blocks(4, 2, 1, 2, 0),
    BigBird(3, 1, 0, 3, seed=2**32 - 1): blocks(3, 1, 0, 3, 2**32 - 1),
    BigBird(5, 3, 2, 0): blocks(5, 3, 2, 0, 0),
    BigBird(1, 1, 1, 1, seed=7): blocks(1, 1, 1, 1, 7),
}


@pytest.mark.parametrize("pattern", DEFINITIONS, ids=str)
@pytest.mark.parametrize("context", [1, 25, 50, 96])
def test_masks_are_those_of_the_definitions_and_parts_those_of_the_masks(pattern: Pattern, context: int) -> None:
    """96 is a multiple of nearly all sizes, the others of few."""
    for head in HEADS:
        own = pattern.for_head(head)
        reads = [[j <= i and DEFINITIONS[pattern](head, i, j) for j in range(context)] for i in range(context)]
        assert torch.equal(mask_of(own, context), torch.tensor(reads)), head
        require_parts_make_the_mask(own, context)
        assert num_pairs(own, context) == sum(map(sum, reads))
        if own == pattern:
            break


@pytest.mark.parametrize(
    "pattern",
    [
        Longformer(5, 4, 8),
        Longformer(3, 8, 6),
        Longformer(5, 4, 9, "target"),
        LongNet((8, 16, 48), (1, 2, 8)),
        BigBird(16, 2, 1, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", [on("cpu"), on("triton")])
def test_forms_that_the_examples_have_not_are_within_precision(backend: str, pattern: Pattern) -> None:
    """Longer segments than those of the conformance suite, and bounds of which one side alone is closed."""
    shape = Shape(1, 2, 96, 16, 16)
    check_against_reference(backend, pattern, torch.float32, shape, grad_lse=True, device=DEVICES[backend])


def test_defaults_of_later_fields_are_written_as_they_always_were() -> None:
    assert pattern_to_json(Local(4, 1)) == {"type": "local", "window": 4}
    assert pattern_to_json(Strided(4)) == {"type": "strided", "stride": 4, "span": "released"}
    assert (str(Local(4)), str(Local(4, 2))) == ("Local(window=4)", "Local(window=4, dilation=2)")
    assert pattern_to_json(Column(4)) == {"type": "column", "stride": 4}
    assert pattern_to_json(Longformer(4)) == {"type": "longformer", "window": 4, "dilation": 1, "globals": 1}
    assert (str(Column(4)), str(Column(4, "target"))) == ("Column(stride=4)", "Column(stride=4, align='target')")
    assert str(Longformer(4)) == "Longformer(window=4, dilation=1, globals=1)"
    for pattern in DEFINITIONS:
        assert pattern_from_json(pattern_to_json(pattern.for_head(3))) == pattern.for_head(3)
    assert Strided(4, num_factors=4).factors() == (Local(4), Local(4, 4), Local(4, 16), Column(64))


# What is reached


def reached(hops: Sequence[Tensor]) -> Tensor:
    """(N, N) bool: over one layer after the other, each position keeping what it holds (residual connections)."""
    found = torch.eye(len(hops[0]), dtype=torch.bool)
    for hop in hops:
        found = ((hop | torch.eye(len(hop), dtype=torch.bool)).int() @ found.int()).bool()
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


@pytest.mark.parametrize("pattern", [LongNet((8, 16, 64), (1, 2, 4)), LongNet((8, 64), (1, 4))], ids=str)
def test_three_hops_of_all_heads_of_dilated_segments_reach_all_but_the_ends_of_the_segment_before(
    pattern: LongNet,
) -> None:
    heads = [mask_of(pattern.for_head(head), 64) for head in range(4)]
    segment = torch.arange(64) // 8
    back = segment[:, None] - segment[None, :]
    wanted = mask_of(Dense(), 64) & (back != 1)
    assert bool(reached([reduce(or_, heads)] * 3)[wanted].all())
    assert not bool(reached([reduce(or_, heads)] * 2)[wanted].all())
    assert not bool(reached([reduce(or_, heads[:3])] * 9)[wanted].all())  # without one head some never get there


def test_draws_shorten_the_way() -> None:
    layers = [mask_of(BigBird(4, 2, 1, random).for_head(0), 128) for random in (0, 1, 2)]
    assert [hops_needed(layer) for layer in layers] == [30, 11, 6]


# What is drawn


def test_draws_are_spread_evenly_and_differ_by_head_and_seed() -> None:
    query = torch.tensor([40])
    heads = [BigBird(1, 2, 3, 4, seed=seed, index=head) for seed in (0, 1) for head in range(512)]
    found = torch.tensor([[int(one) for one in pattern.draws(query)] for pattern in heads])
    assert bool((found >= 3).all() and (found <= 38).all())
    assert all(len(set(row)) == 4 for row in found.tolist())
    count = torch.bincount(found.flatten(), minlength=39)[3:]  # of 36 blocks
    mean = found.numel() / 36
    assert bool(((count - mean).abs() < 5 * mean**0.5).all())
    assert len({tuple(row) for row in found.tolist()}) > 1000


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


# What is refused


@pytest.mark.parametrize(
    "value, message",
    [
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
    ],
)  # fmt: skip
def test_a_wrong_pattern_is_named(value: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        pattern_from_json(value)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "pattern, message",
    [
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
    ],
)  # fmt: skip
def test_what_does_not_fit_a_context_is_named(pattern: Pattern, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        pattern.check(96)
    assert str(error.value) == message


def test_heads_that_differ_must_be_chosen() -> None:
    for pattern in (LongNet((4, 8), (1, 2)), BigBird(4, 1, 1, 1)):
        with pytest.raises(ValueError, match="resolve it first"):
            mask_of(pattern, 8)
