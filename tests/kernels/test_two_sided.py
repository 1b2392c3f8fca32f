"""Patterns that read later positions: on every backend, and refused where order is needed."""

import itertools
from dataclasses import dataclass

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
    Block,
    Column,
    Dense,
    Fixed,
    Local,
    Longformer,
    Pattern,
    Strided,
    Summary,
    declares_causal,
)
from longstride.kernels.patterns.base import SinglePart
from longstride.kernels.plan import query_views
from longstride.kernels.selections import within_documents
from tests.harness.backends import DEVICES, on
from tests.harness.oracles import (
    Shape,
    check_against_reference,
    example_patterns,
    make_inputs,
    mask_of,
    two_sided_patterns,
)


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


@pytest.mark.parametrize("context", [1, 21, 48, 50])
def test_a_pattern_is_causal_where_its_mask_is(context: int) -> None:
    natural = torch.arange(context)
    examples = [*example_patterns(), *two_sided_patterns(), *(each for size, each in CASES if size == context)]
    for pattern in (each.for_head(head) for each in examples for head in range(3)):
        reads_later = bool((mask_of(pattern, context) & (natural > natural[:, None])).any())
        assert declares_causal(pattern) <= (not reads_later)


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


@pytest.mark.parametrize("pattern", two_sided_patterns(), ids=str)
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
    assert declares_causal(object())  # what says nothing counts as causal
