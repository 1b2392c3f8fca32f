"""Patterns that read later positions: computed right, or refused, and never taken for causal ones."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from longstride.kernels import CachedAttention, num_pairs, sparse_attention
from longstride.kernels.backends.cpu import dense
from longstride.kernels.forms import Bounds, Fold, Order, constant, ramp, whole
from longstride.kernels.patterns import PATTERNS, Column, Dense, Fixed, Local, Pattern, Strided
from longstride.kernels.patterns.base import PatternDefaults, PatternPart, SinglePart
from longstride.kernels.patterns.column import column_order
from longstride.kernels.plan import is_causal
from longstride.kernels.selections import rows_sent, section_reads, within_documents
from longstride.testing.patterns import require_parts_make_the_mask
from tests.harness.backends import DEVICES, on
from tests.harness.oracles import (
    Shape,
    check_against_reference,
    example_patterns,
    make_inputs,
    mask_of,
)
from tests.kernels.test_decoding import check as check_rows


@dataclass(frozen=True)
class Around(SinglePart):
    """A window of ``reach`` positions on either side."""

    reach: int

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() <= self.reach

    def by_query(self, context: int) -> Bounds:
        return Bounds(context, whole(context), ramp(-self.reach, 0, context), ramp(self.reach + 1, 0, context))

    def by_key(self, context: int) -> Bounds:
        return self.by_query(context)


@dataclass(frozen=True)
class Later(SinglePart):
    """All later positions and its own: as many pairs as dense attention has."""

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return k >= q

    def by_query(self, context: int) -> Bounds:
        return Bounds(context, whole(context), ramp(0, 0, context), constant(context))

    def by_key(self, context: int) -> Bounds:
        return Bounds(context, whole(context), constant(0), ramp(1, 1, context))


@dataclass(frozen=True)
class WholeBlock(SinglePart):
    """All positions of its block, of a stride that divides the context."""

    stride: int

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return q // self.stride == k // self.stride

    def by_query(self, context: int) -> Bounds:
        return Bounds(context, self.stride, constant(0, self.stride), constant(self.stride, self.stride))

    def by_key(self, context: int) -> Bounds:
        return self.by_query(context)


@dataclass(frozen=True)
class WholeColumn(PatternDefaults):
    """All positions of its column, likewise."""

    stride: int

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return (q - k) % self.stride == 0

    def query_order(self, context: int) -> Order:
        return column_order(context, self.stride)

    key_order = query_order

    def by_query(self, context: int) -> Bounds:
        rows = context // self.stride
        return Bounds(context, rows, constant(0, rows), constant(rows, rows))

    def by_key(self, context: int) -> Bounds:
        return self.by_query(context)

    def parts(self) -> tuple[PatternPart, ...]:
        return (self,)


@dataclass(frozen=True)
class EverySummary(PatternDefaults):
    """The last ``summary`` positions of every block, of earlier and later ones."""

    stride: int
    summary: int

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return (q == q) & (k % self.stride >= self.stride - self.summary)

    def query_order(self, context: int) -> Order:
        return None

    def key_order(self, context: int) -> Order:
        return Fold(context // self.stride * self.summary, self.summary, self.stride, 1, self.stride - self.summary)

    def by_query(self, context: int) -> Bounds:
        keys = context // self.stride * self.summary
        return Bounds(context, whole(context), constant(0), constant(keys))

    def by_key(self, context: int) -> Bounds:
        keys = context // self.stride * self.summary
        return Bounds(keys, whole(keys), constant(0), constant(context))

    def parts(self) -> tuple[PatternPart, ...]:
        return (self,)


KINDS = (Around, Later, WholeBlock, WholeColumn, EverySummary)
# Context and pattern: the first three have as many pairs as dense causal attention.
CASES: tuple[tuple[int, Pattern], ...] = (
    (21, Around(6)),
    (120, Around(35)),
    (50, Later()),
    (50, Around(9)),
    (48, WholeBlock(48)),
    (48, WholeBlock(16)),
    (48, WholeColumn(8)),
    (48, WholeColumn(2)),
    (48, EverySummary(8, 2)),
)
every_case = pytest.mark.parametrize(("context", "pattern"), CASES, ids=str)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend is handed patterns by their names."""
    for kind in KINDS:
        monkeypatch.setitem(PATTERNS, kind.__name__, kind)


@every_case
def test_the_cases_are_patterns(context: int, pattern: Pattern) -> None:
    require_parts_make_the_mask(pattern, context)
    assert not is_causal(pattern, context)
    assert [num_pairs(each, size) == size * (size + 1) // 2 for size, each in CASES] == [True] * 3 + [False] * 6


@pytest.mark.parametrize("context", [1, 21, 48, 50])
def test_a_pattern_is_causal_where_its_mask_is(context: int) -> None:
    natural = torch.arange(context)
    examples = [each for each in example_patterns() if not isinstance(each, KINDS)]
    examples += [each for size, each in CASES if size == context]
    for pattern in (each.for_head(head) for each in examples for head in range(3)):
        assert is_causal(pattern, context) == (not (mask_of(pattern, context) & (natural > natural[:, None])).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [2, 1])
@every_case
def test_the_cpu_computes_them(context: int, pattern: Pattern, key_heads: int, dtype: torch.dtype) -> None:
    check_against_reference("cpu", pattern, dtype, Shape(2, 2, context, 16, 16, key_heads))


@pytest.mark.parametrize("backend", [on("triton")])
@every_case
def test_the_kernels_compute_them(backend: str, context: int, pattern: Pattern) -> None:
    shape = Shape(1, 1, context, 16, 16)
    check_against_reference(backend, pattern, torch.float32, shape, grad_lse=True, device=DEVICES[backend])


def test_heads_that_read_everything_before_them_and_others_that_read_as_much() -> None:
    """All of a call go to torch's kernel, or none; it is what reads all that is before it, in whatever parts."""
    context = 21
    check_against_reference("cpu", [Dense(), Around(6), Later()], torch.float32, Shape(2, 3, context, 16, 16))
    q, _, v, *_ = make_inputs(Shape(1, 1, context, 16, 16), torch.float32)
    wide: list[Pattern] = [Dense(), Local(context), Strided(32), Fixed(32, 3), Column(1)]
    assert all(dense.fits(q, v, (pattern,)) for pattern in wide)
    assert not any(dense.fits(q, v, (pattern,)) for pattern in (Around(6), Later(), Local(context - 1), Column(2)))


@pytest.mark.parametrize("backend", [on(name) for name in ("cpu", "reference", "triton")])
@every_case
def test_a_row_reads_what_its_pattern_allows(backend: str, context: int, pattern: Pattern) -> None:
    positions = list(range(0, context, 7))
    check_rows(backend, pattern, torch.float32, Shape(1, 1, context, 16, 16), positions=positions)


@pytest.mark.parametrize("backend", [on(name) for name in ("cpu", "reference", "triton")])
def test_a_cache_whose_later_rows_change_is_read_anew(backend: str) -> None:
    """Rows behind the last query may be written at any time, and blocks of them are no copies that are kept."""
    context, pattern, device = 48, EverySummary(8, 2), DEVICES[backend]
    q, k, v = (x.to(device) for x in make_inputs(Shape(1, 1, context, 16, 16), torch.float32)[:3])
    keys, values = torch.randn_like(k), torch.randn_like(v)
    cached = CachedAttention(keys, values, pattern, backend=backend)
    for position in range(context):
        keys[:, :, position], values[:, :, position] = k[:, :, position], v[:, :, position]
        wanted = sparse_attention(q, keys, values, pattern, backend="reference" if device == "cpu" else backend)
        torch.testing.assert_close(cached(q[:, :, position], position), wanted[:, :, position])


@every_case
def test_sections_and_documents_refuse_them(context: int, pattern: Pattern) -> None:
    starts = torch.zeros(1, context, dtype=torch.int64)
    for patterns in ((pattern,), (Dense(), pattern)):
        for refused in (
            lambda both: within_documents(both, starts),
            lambda both: rows_sent(both, len(both), context, 3),
            lambda both: section_reads(both, len(both), context, 3, 1, torch.device("cpu")),
        ):
            with pytest.raises(
                ValueError, match=r"^pattern=\w+\(.*\): reads positions after the query; give a causal pattern"
            ):
                refused(patterns)
