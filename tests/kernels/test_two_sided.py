"""Patterns that read later positions: by their definitions, on every backend, and refused where order is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels import (
    CachedAttention,
    ConfigError,
    attend_one,
    empty_cache,
    num_pairs,
    selected_attention,
    sparse_attention,
)
from longstride.kernels.backends.cpu import dense
from longstride.kernels.forms import Bounds, constant, ramp, whole
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
from longstride.kernels.patterns.base import SinglePart
from longstride.kernels.plan import is_causal, query_views
from longstride.kernels.selections import within_documents
from longstride.testing.patterns import require_parts_make_the_mask
from tests.harness.backends import DEVICES, IN_THE_INTERPRETER, on
from tests.harness.oracles import (
    Shape,
    attention_and_gradients,
    check_against_reference,
    example_patterns,
    heads_to_see,
    make_inputs,
    mask_of,
    two_sided_patterns,
)
from tests.kernels.test_later_patterns import drawn

Reads = Callable[[int, int, int], bool]  # head, query, key


def near(window: int, dilation: int = 1) -> Reads:
    return lambda head, i, j: abs(i - j) in range(0, window * dilation, dilation)


def strided(stride: int, factors: int, window: int) -> Reads:
    far = [near(stride, stride**p) for p in range(1, factors - 1)]
    return lambda head, i, j: (
        abs(i - j) < window or (i - j) % stride ** (factors - 1) == 0 or any(reads(head, i, j) for reads in far)
    )


def summaries(stride: int, count: int, sub_blocks: int) -> Reads:
    return lambda head, i, j: 0 < stride - j % stride - count * (head % sub_blocks) <= count


def in_block(stride: int) -> Reads:
    return lambda head, i, j: i // stride == j // stride


def any_of(*several: Reads) -> Reads:
    return lambda head, i, j: any(reads(head, i, j) for reads in several)


def first(count: int) -> Reads:
    return lambda head, i, j: i < count or j < count


def blocks(size: int, window: int, count: int, random: int, seed: int, context: int) -> Reads:
    def reads(head: int, i: int, j: int) -> bool:
        block, other = i // size, j // size
        if block < count or other < count or abs(block - other) < window:
            return True
        others = [b for b in range(count, -(-context // size)) if abs(block - b) >= window]
        return other in drawn(seed, head, block, others, random)

    return reads


BOTH = {"causal": False}
DEFINITIONS: dict[Pattern, Reads] = {
    Dense(causal=False): lambda head, i, j: True,
    Local(1, **BOTH): near(1),
    Local(7, **BOTH): near(7),
    Local(2**62, **BOTH): near(1000),
    Local(5, 3, **BOTH): near(5, 3),
    Local(60, 7, **BOTH): near(60, 7),
    Local(3, 200, **BOTH): near(3, 200),
    Column(1, **BOTH): lambda head, i, j: True,
    Column(7, **BOTH): lambda head, i, j: i % 7 == j % 7,
    Column(8, **BOTH): lambda head, i, j: i % 8 == j % 8,
    Column(2**40, **BOTH): near(1),
    Strided(8, **BOTH): strided(8, 2, 8),
    Strided(7, "paper", **BOTH): strided(7, 2, 8),
    Strided(4, num_factors=3, **BOTH): strided(4, 3, 4),
    Strided(2, "paper", 5, **BOTH): strided(2, 5, 3),
    Strided(1, "paper", 3, **BOTH): strided(1, 3, 2),
    Strided(50, num_factors=4, **BOTH): strided(50, 4, 50),
    Block(8, **BOTH): in_block(8),
    Block(2**40, **BOTH): in_block(1000),
    Summary(8, 3, **BOTH): summaries(8, 3, 1),
    Summary(9, 2, 3, **BOTH): summaries(9, 2, 3),
    Summary(8, 2, 2, include_self=True, **BOTH): any_of(summaries(8, 2, 2), near(1)),
    Fixed(8, 2, **BOTH): any_of(in_block(8), summaries(8, 2, 1)),
    Fixed(9, 2, 3, **BOTH): any_of(in_block(9), summaries(9, 2, 3)),
    Fixed(2**40, 3, **BOTH): in_block(1000),
    Longformer(7, **BOTH): any_of(near(7), first(1)),
    Longformer(5, globals=9, **BOTH): any_of(near(5), first(9)),
    Longformer(5, 4, **BOTH): any_of(near(5, 4), first(1)),
    Longformer(5, 4, 8, **BOTH): any_of(near(5, 4), first(8)),
    Longformer(3, 8, 6, **BOTH): any_of(near(3, 8), first(6)),
    Longformer(1, 3, 60, **BOTH): any_of(near(1), first(60)),
    BigBird(4, 2, 1, 2, context=96, **BOTH): blocks(4, 2, 1, 2, 0, 96),
    BigBird(3, 1, 0, 3, seed=2**32 - 1, context=50, **BOTH): blocks(3, 1, 0, 3, 2**32 - 1, 50),
    BigBird(5, 3, 2, 0, **BOTH): blocks(5, 3, 2, 0, 0, 1000),
    BigBird(1, 1, 2, 1, seed=7, context=60, **BOTH): blocks(1, 1, 2, 1, 7, 60),
}  # type: ignore[arg-type]
every_kind = pytest.mark.parametrize("pattern", two_sided_patterns(), ids=str)


@dataclass(frozen=True)
class Later(SinglePart):
    """All later positions and its own: as many pairs as causal dense attention has. Other packages' may be so."""

    causal: bool = False

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return k >= q

    def by_query(self, context: int) -> Bounds:
        return Bounds(context, whole(context), ramp(0, 0, context), constant(context))

    def by_key(self, context: int) -> Bounds:
        return Bounds(context, whole(context), constant(0), ramp(1, 1, context))


# Context and pattern: the first three have as many pairs as causal dense attention.
CASES: tuple[tuple[int, Pattern], ...] = (
    (21, Local(7, causal=False)),
    (120, Local(36, causal=False)),
    (50, Later()),
    (48, Block(48, causal=False)),
    (48, Column(8, causal=False)),
    (48, Summary(8, 2, causal=False)),
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend is handed patterns by their names."""
    monkeypatch.setitem(PATTERNS, "later", Later)


# What is read


@pytest.mark.parametrize("pattern", DEFINITIONS, ids=str)
@pytest.mark.parametrize("context", [1, 2, 25, 50, 96])
def test_masks_are_those_of_the_definitions_and_parts_those_of_the_masks(pattern: Pattern, context: int) -> None:
    """96 is a multiple of nearly all sizes, the others of few."""
    for head in (0, 1, 5):
        resolved = pattern.for_head(head)
        reads = [[DEFINITIONS[pattern](head, i, j) for j in range(context)] for i in range(context)]
        assert torch.equal(mask_of(resolved, context), torch.tensor(reads)), head
        require_parts_make_the_mask(resolved, context)
        assert num_pairs(resolved, context) == sum(map(sum, reads))
        if resolved == pattern:
            break


@pytest.mark.parametrize("context", [1, 21, 48, 50])
def test_a_pattern_is_causal_where_its_mask_is(context: int) -> None:
    natural = torch.arange(context)
    examples = [*example_patterns(), *two_sided_patterns(), *(each for size, each in CASES if size == context)]
    for pattern in (each.for_head(head) for each in examples for head in range(3)):
        reads_later = bool((mask_of(pattern, context) & (natural > natural[:, None])).any())
        assert is_causal(pattern, context) == (not reads_later)
        assert declares_causal(pattern) <= is_causal(pattern, context)


def test_two_sided_draws_are_spread_over_all_blocks_that_are_neither_near_nor_first() -> None:
    query = torch.tensor([20])
    heads = [
        BigBird(1, 3, 2, 4, seed=seed, index=head, context=48, causal=False) for seed in (0, 1) for head in range(512)
    ]
    draws = torch.tensor([[int(block) for block in pattern.draws(query)] for pattern in heads])
    assert all(len(set(row)) == 4 for row in draws.tolist())
    eligible = [block for block in range(2, 48) if abs(block - 20) >= 3]
    count = torch.bincount(draws.flatten(), minlength=48)
    assert set(count.nonzero().flatten().tolist()) == set(eligible)
    mean = draws.numel() / len(eligible)
    assert bool(((count[eligible] - mean).abs() < 5 * mean**0.5).all())


# Attention


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_cpu_computes_them(pattern: Pattern, dtype: torch.dtype) -> None:
    """Lengths that are multiples of all sizes, of none, and hardly any."""
    for context in (1, 3, 31, 64, 72):
        check_against_reference("cpu", pattern, dtype, Shape(1, 4, context, 16, 16, 2), grad_lse=context > 64)


@pytest.mark.parametrize("number, pattern", [*enumerate(two_sided_patterns())], ids=str)
def test_long_contexts_are_right_too(number: int, pattern: Pattern) -> None:
    context, dtype = ((1000, torch.bfloat16), (2048, torch.float32), (777, torch.float64))[number % 3]
    check_against_reference("cpu", pattern, dtype, Shape(1, 1, context, 8, 8))


@pytest.mark.parametrize(
    "backend, context, dtype, pattern",
    [
        on("triton", (72, 37)[number % 2], (torch.float32, torch.float32, torch.bfloat16)[number % 3], pattern)
        for number, pattern in enumerate(two_sided_patterns())
    ],
    ids=str,
)
def test_the_kernels_compute_them(backend: str, context: int, dtype: torch.dtype, pattern: Pattern) -> None:
    shape = Shape(1, heads_to_see(pattern), context, 16, 16)
    check_against_reference(backend, pattern, dtype, shape, grad_lse=True, device=DEVICES[backend])


@pytest.mark.parametrize("backend", [on("cpu"), on("triton")])
def test_heads_may_differ_in_their_sides(backend: str) -> None:
    """Torch's kernel computes heads that all read everything, or all read everything before them, in whatever parts."""
    context = 21
    patterns = [Dense(), Dense(causal=False), Local(7, causal=False), Later(), Longformer(3, globals=2, causal=False)]
    shape = Shape(1, len(patterns), context, 16, 16)
    check_against_reference(backend, patterns, torch.float32, shape, device=DEVICES[backend])
    q, _, v, *_ = make_inputs(shape, torch.float32)
    earlier: list[Pattern] = [Dense(), Local(context), Strided(32), Fixed(32, 3), Column(1)]
    every = [Dense(causal=False), Local(context, causal=False), Block(32, causal=False), Column(1, causal=False)]
    for wide in (earlier, every):
        assert all(dense.fits(q, v, (pattern,)) for pattern in wide) and dense.fits(q, v, tuple(wide))
        check_against_reference("cpu", wide[:3], torch.float64, shape._replace(heads=3))
    assert not dense.fits(q, v, (Dense(), Dense(causal=False)))
    narrow = (*patterns[2:], Local(context - 1), Column(2), Local(context - 1, causal=False))
    assert not any(dense.fits(q, v, (pattern,)) for pattern in narrow)


@pytest.mark.parametrize(("context", "pattern"), CASES, ids=str)
def test_as_many_pairs_as_causal_attention_are_not_taken_for_it(context: int, pattern: Pattern) -> None:
    assert [num_pairs(each, size) == size * (size + 1) // 2 for size, each in CASES] == [True] * 3 + [False] * 3
    check_against_reference("cpu", pattern, torch.float32, Shape(1, 2, context, 16, 16))


@pytest.mark.parametrize(
    "backend, pattern",
    [
        *(on(backend, pattern) for backend in ("cpu", "reference") for pattern in two_sided_patterns()),
        *(on("triton", pattern, marks=[IN_THE_INTERPRETER]) for pattern in two_sided_patterns()[1::4]),
    ],
    ids=str,
)
def test_a_row_changes_exactly_with_what_it_reads(backend: str, pattern: Pattern) -> None:
    """In fp64 by one changed key and value at a time, early and late; gradients flow back along the same pairs."""
    context, device = 40, DEVICES[backend]
    resolved = pattern.for_head(0)
    inputs = make_inputs(Shape(1, 1, context, 16, 16), torch.float64)
    allowed = mask_of(resolved, context)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = sparse_attention(q, k, v, resolved, backend=backend, return_lse=True)
        return out, lse

    before = attention_and_gradients(attend, inputs, device)
    for key in (2, 17, 39):
        k, v = inputs.k.clone(), inputs.v.clone()
        k[:, :, key] += 1
        v[:, :, key] -= 1
        after = attention_and_gradients(attend, inputs._replace(k=k, v=v), device)
        for name in ("out", "lse", "dq"):
            changed = (after[name] != before[name])[0, 0].reshape(context, -1).any(-1)
            alone = name == "dq" and allowed.sum(1) == 1  # a weight of 1 has no gradient
            assert torch.equal(changed, allowed[:, key] & ~torch.as_tensor(alone)), (name, key)


# Documents


@pytest.mark.parametrize("backend", [on("cpu"), on("triton")])
def test_documents_kept_apart_are_contexts_of_their_own(backend: str) -> None:
    context, device = 45, DEVICES[backend]
    ends = [0, 1, 8, 31, context]
    starts = torch.tensor([[start for start, end in itertools.pairwise(ends) for _ in range(start, end)]])
    patterns = [pattern.for_head(head) for head, pattern in enumerate(two_sided_patterns())]
    if backend == "triton":
        patterns = patterns[::3]
    inputs = make_inputs(Shape(1, len(patterns), context, 16, 16), torch.float32)
    q, k, v = (x.to(device) for x in inputs[:3])
    found = selected_attention(q, k, v, within_documents(patterns, starts.to(device)), backend=backend)
    for start, end in itertools.pairwise(ends):
        rows = (x[:, :, start:end] for x in inputs[:3])
        wanted = sparse_attention(*rows, patterns, backend="reference")
        torch.testing.assert_close(found[:, :, start:end].cpu(), wanted)


# What is refused


@every_kind
def test_a_cache_has_no_later_positions(pattern: Pattern) -> None:
    q, k = torch.zeros(1, 2, 16), torch.zeros(1, 2, 24, 16)
    rule = r"^pattern=\w+\(.*causal=False\): a cache has no later positions; decode with a causal pattern$"
    for heads in (pattern, [Dense(), pattern]):
        for decode in (
            lambda both: attend_one(q, k, k, both, 3),
            lambda both: CachedAttention(k, k, both),
            lambda both: empty_cache(1, 2, 24, 16, both, device=k.device, dtype=k.dtype),
        ):
            with pytest.raises(ValueError, match=rule):
                decode(heads)


@pytest.mark.parametrize("context", [7, 64, 300])
def test_a_pattern_that_reads_later_positions_without_saying_so_is_refused(context: int) -> None:
    silent = Later(causal=True)
    rows = torch.zeros(1, 1, context, 16)
    rule = rf'^pattern="Later\(causal=True\)": position 0 of {context} reads the later position 1; declare causal'
    for use in (query_views, num_pairs, lambda pattern, _: sparse_attention(rows, rows, rows, pattern)):
        with pytest.raises(ConfigError, match=rule):
            use(silent, context)
        use(Later(), context)


class Stranger:
    """Derives from nothing of ours."""


def test_what_says_nothing_counts_as_causal() -> None:
    assert declares_causal(Stranger())
    assert declares_causal(LongNet((6,), (1,))) and not declares_causal(Later())


def test_the_causal_form_is_written_as_it_always_was() -> None:
    for pattern in two_sided_patterns():
        value = pattern_to_json(pattern)
        assert value["causal"] is False and pattern_from_json(value) == pattern
        assert "causal=False" in str(pattern)
    for kind, cls in PATTERNS.items():
        assert cls.causal is True or kind == "later"
    assert pattern_to_json(Dense()) == {"type": "dense"} and str(Dense()) == "Dense()"
    assert pattern_to_json(Block(4)) == {"type": "block", "stride": 4} and str(Block(4)) == "Block(stride=4)"
    bigbird = BigBird(4, 2, 1, 2)
    assert str(bigbird) == "BigBird(block=4, window=2, globals=1, random=2, seed=0, index=None)"
    assert list(pattern_to_json(bigbird)) == ["type", "block", "window", "globals", "random", "seed", "index"]
    assert str(Fixed(8, 2)) == "Fixed(stride=8, summary=2, num_summaries=1, index=None)"
    summary = "Summary(stride=8, summary=2, num_summaries=1, include_self=False, index=None)"
    assert str(Summary(8, 2)) == summary


DRAWS = {"type": "bigbird", "block": 4, "window": 2, "globals": 1, "random": 2}
ALIGNED = 'align="target": needs a causal pattern; remove it, or "causal": false'


@pytest.mark.parametrize(
    "value, message",
    [
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


@pytest.mark.parametrize(
    "pattern, message",
    [
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
