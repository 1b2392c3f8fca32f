"""Attention in which keys travel to the section of a context that reads them, held against whole contexts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels import sparse_attention
from longstride.kernels.patterns import BigBird, Column, Dense, Fixed, Local, Longformer, Pattern, Strided
from longstride.kernels.selections import section_reads
from longstride.sparse_model import Division
from longstride.sparse_model.mixers.sections import section_attention
from longstride.testing.threads import ThreadDivision, in_sections
from tests.harness.oracles import (
    RESULTS,
    Inputs,
    Shape,
    all_patterns,
    allowed_by,
    assert_within_precision,
    attention_and_gradients,
    make_inputs,
)

MIXED = (Local(30), Fixed(8, 2), Column(8), BigBird(4, 2, 1, 2, index=2), Dense(), Longformer(5, 2, 3))


def divided(inputs: Inputs, patterns: tuple[Pattern, ...], size: int, backend: str = "auto") -> dict[str, Tensor]:
    """Output and gradients of all sections together; what they have sent is what was predicted."""
    q, k, v, grad_out, _ = inputs

    def work(division: ThreadDivision) -> tuple[Tensor, ...]:
        own = division.section(q.shape[2])
        rows = [x[:, :, own].clone().requires_grad_() for x in (q, k, v)]
        out = section_attention(*rows, patterns, division, backend)
        told = division.traffic(q.shape[2], q.shape[1], k.shape[1], (k.shape[3], v.shape[3]), patterns)
        predicted = len(q) * q.element_size() * told.sent[division.rank]
        assert (told.exchange, division.calls, division.sent_bytes) == ("keys", told.calls, predicted)
        grads = torch.autograd.grad(out, rows, grad_out[:, :, own])
        assert division.calls == 2 * told.calls
        return out.detach(), *grads, torch.tensor([division.sent_bytes, predicted])

    sections = in_sections(size, work, "keys")
    *results, sent = zip(*sections, strict=True)
    everything, forward = torch.stack(sent).sum(0).tolist()
    assert everything == 2 * forward  # gradients go the same way back
    found = dict(zip(("out", "dq", "dk", "dv"), (torch.cat(each, 2) for each in results), strict=True))
    whole = attention_and_gradients(lambda *rows: sparse_attention(*rows, patterns, return_lse=True), inputs)
    return {name: found.get(name, whole["lse"]) for name in RESULTS}


# Of 8 heads no 3 are alike, and U is more than the heads; windows are longer than a section, and no stride divides it.
@pytest.mark.parametrize(("context", "size"), [(48, 2), (51, 3), (40, 4), (48, 8)])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_each_pattern_is_exact(context: int, size: int, key_heads: int) -> None:
    """tests/kernels/test_sections.py has the pairs of every pattern in each of its sections."""
    cases = all_patterns()[context % 5 :: 5] if key_heads == 4 else [Strided(8), Fixed(9, 2, num_summaries=3)]
    inputs = make_inputs(Shape(2, 4, context, 6, 5, key_heads), torch.float64)
    for pattern in cases:
        patterns = tuple(pattern.for_head(head) for head in range(4))
        assert_within_precision(divided(inputs, patterns, size), inputs, patterns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_heads_that_differ_are_within_their_precision(dtype: torch.dtype) -> None:
    """As undivided ones are, though pieces are rounded before they are merged; six heads do not divide by four."""
    for key_heads in (2, 6):
        inputs = make_inputs(Shape(1, 6, 96, 16, 16, key_heads), dtype)
        assert_within_precision(divided(inputs, MIXED, 4), inputs, MIXED)


def test_the_reference_backend_divides_as_well() -> None:
    inputs = make_inputs(Shape(1, 6, 48, 8, 8, 3), torch.float64)
    assert_within_precision(divided(inputs, MIXED, 3, "reference"), inputs, MIXED)


def test_nan_reaches_what_reads_it_and_no_earlier_section() -> None:
    inputs = make_inputs(Shape(1, 6, 48, 8, 8), torch.float32)
    inputs.k[0, :, 13] = torch.nan
    readers = allowed_by(MIXED, 6, 48)[:, :, 13]
    found = divided(inputs, MIXED, 4)
    for name in ("out", "dq"):
        assert not found[name][0][readers].isfinite().any(), name
        assert found[name][:, :, :12].isfinite().all(), name


def test_training_may_use_what_an_evaluation_has_made() -> None:
    """Lists of keys are kept, and torch differentiates through nothing that inference mode has made."""
    section_reads.cache_clear()
    patterns = (Local(9), Fixed(8, 2))

    def work(division: ThreadDivision) -> bool:
        rows = [torch.randn(1, 2, 12, 4, requires_grad=True) for _ in range(3)]
        with torch.inference_mode():
            section_attention(*rows, patterns, division, "auto")
        section_attention(*rows, patterns, division, "auto").sum().backward()
        return all(x.grad is not None for x in rows)

    assert all(in_sections(2, work, "keys"))


def test_auto_takes_what_sends_less() -> None:
    local, dense = (Local(8),) * 4, (Dense(),) * 4

    def taken(exchange: Any, patterns: tuple[Pattern, ...] | None, size: int = 8, key_heads: int = 8) -> str:
        patterns = None if patterns is None else 2 * patterns
        return Division(1, size, exchange=exchange).traffic(480, 8, key_heads, (16, 16), patterns).exchange

    assert [taken(each, local) for each in ("auto", "keys", "heads")] == ["keys", "keys", "heads"]
    assert [taken(each, dense) for each in ("auto", "keys", "heads")] == ["heads", "keys", "heads"]
    assert taken("auto", dense, key_heads=1) == "keys"  # which are less than queries and outputs
    assert taken("auto", dense, size=6) == "keys"  # as 6 processes do not divide 8 heads
    assert taken("keys", None) == "heads"  # where content decides
    assert Division().traffic(480, 8, 8, (16, 16), 2 * local) == ("heads", 0, (0,))
    # Of a window of 8, 7 rows go to the next section; heads send their n rows' shares of q, k, v and the output.
    assert Division(0, 2, exchange="keys").traffic(480, 8, 4, (16, 12), 2 * local) == ("keys", 1, (7 * 4 * 28, 0))
    assert Division(0, 2, exchange="heads").traffic(480, 8, 4, (16, 12), None) == (
        "heads",
        2,
        (120 * (8 + 4) * 28,) * 2,
    )
