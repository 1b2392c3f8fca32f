"""Adaptive spans against the paper's formula written out, and what of them other attention has not.

Letters: B batch, H heads, N positions, D head width, R ramp, z span.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels.patterns import Dense, Local
from longstride.launcher.planning.costs import parameter_parts, work
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers import adaptive_span
from longstride.sparse_model.mixers.adaptive_span import Bounded, span_attention
from tests.harness.configs import small
from tests.harness.stochastic import assert_rounding_explains, with_gradients
from tests.sparse_model.test_transformer import awake

SPANS = {  # of three heads, in a context of 37
    "within the ramp": (0.25, 3.5, 4.875),
    "far and near": (36.5, 0.75, 11.2),
    "whole": (0.0, 8.0, 37.0),
}


def spans_config(**changes: Any) -> dict[str, Any]:
    return {"attention": {"type": "adaptive_span", "ramp": 5, "penalty": 0.01, **changes}}


def weights_of(q: Tensor, k: Tensor, spans: Tensor, ramp: int) -> Tensor:
    """Section 2.2 of Sukhbaatar et al. 2019, (B, H, N, N)."""
    position = torch.arange(q.shape[2])
    distance = position[:, None] - position
    mask = ((ramp + spans[:, None, None] - distance) / ramp).clamp(0, 1).masked_fill(distance < 0, 0)
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).exp() * mask
    return weights / weights.sum(-1, keepdim=True)


def by_definition(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, ramp: int) -> Tensor:
    return weights_of(q, k, spans, ramp) @ v


def tensors(context: int, spans: tuple[float, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v (2, H, N, ·) and the spans."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, context, len(spans), width, generator=generator).transpose(1, 2) for width in (8, 8, 6)]
    wide = torch.promote_types(dtype, torch.float32)
    return [*(x.to(dtype).requires_grad_() for x in rows), torch.tensor(spans, dtype=wide, requires_grad=True)]


@pytest.mark.parametrize("pieces", [False, True], ids=["at once", "block by block"])
@pytest.mark.parametrize("ramp", [2, 5, 24])
@pytest.mark.parametrize("name", SPANS)
def test_it_is_the_papers_formula(name: str, ramp: int, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and every gradient, that of the spans too where the formula has one."""
    if pieces:
        monkeypatch.setattr(adaptive_span, "SCORES_IN_WORK", 1)
    inputs = tensors(37, SPANS[name])
    found = with_gradients(lambda *x: span_attention(*x, ramp, 40), inputs)
    wanted = with_gradients(lambda *x: by_definition(*x, ramp), inputs)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-12)
    gradients = slice(1, 4 if name == "whole" else 5)
    torch.testing.assert_close(found[gradients], wanted[gradients], rtol=1e-10, atol=1e-11)


def test_a_whole_span_grows_as_its_right_hand_difference_says() -> None:
    """But for the key at distance z + R, whose weight is 0 so far."""
    *rows, spans = tensors(30, (0.0, 7.0, 12.0))
    direction = torch.randn(2, 3, 30, 6, dtype=torch.float64)
    ramp, step = 6, 1e-7
    out = (span_attention(*rows, spans, ramp, 30) * direction).sum()
    (found,) = torch.autograd.grad(out, spans)
    for head in range(3):
        # The formula with the weight of that key left out: it would take part as soon as the span grows.
        moved = [by_definition_without(rows, z, head, ramp, step) for z in (spans[head], spans[head] + step)]
        slope = ((moved[1] - moved[0]) * direction[:, head]).sum() / step
        torch.testing.assert_close(found[head], slope, rtol=1e-5, atol=1e-6)


def by_definition_without(rows: list[Tensor], z: Tensor, head: int, ramp: int, step: float) -> Tensor:
    """Of one head, (B, N, Dv), without keys whose m is not above the step."""
    q, k, v = (x[:, head] for x in rows)
    position = torch.arange(q.shape[1])
    distance = position[:, None] - position
    mask = ((ramp + z - distance) / ramp).clamp(0, 1).masked_fill(distance < 0, 0)
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).exp() * mask.masked_fill(mask * ramp <= 2 * step, 0)
    return weights / weights.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_as_near_as_the_precision_allows(dtype: torch.dtype) -> None:
    inputs = tensors(64, tuple(0.25 + 1.5 * head for head in range(24)), dtype)
    found = with_gradients(lambda *x: span_attention(*x, 8, 64), inputs)
    assert_rounding_explains(found, lambda *x: with_gradients(lambda *y: by_definition(*y, 8), x), inputs)


def test_a_query_reads_no_key_beyond_its_span_and_ramp() -> None:
    *rows, spans = (x.detach() for x in tensors(40, (2.0, 9.5, 30.0)))
    wanted = span_attention(*rows, spans, 5, 40)[:, :, 39]
    for head, reach in enumerate(adaptive_span.reaches(spans, 5)):
        unread = [x.clone() for x in rows]
        for x in unread[1:]:
            x[:, head, : 40 - reach] = 1e4
        assert torch.equal(span_attention(*unread, spans, 5, 40)[:, head, 39], wanted[:, head])
        unread[2][:, head, 40 - reach] += 1
        assert not torch.equal(span_attention(*unread, spans, 5, 40)[:, head, 39], wanted[:, head])


def test_steps_read_no_key_beyond_the_span_and_ramp() -> None:
    """Of caches whose other rows are no numbers. Heads of a group read as far as the longest of them."""
    *rows, spans = (x.detach() for x in tensors(40, (30.0, 2.0, 9.5)))
    wanted = span_attention(*rows, spans, 5, 40)
    keys, values = (torch.full_like(x, math.nan) for x in rows[1:])
    cache = adaptive_span.RecentKeyValues(keys, values, spans, 5, 40, "auto")
    assert [bias.shape[1] for _, bias in cache.groups] == [7, 15, 35]
    for position in range(40):
        found = cache.step(*(x[:, :, position] for x in rows), position)
        torch.testing.assert_close(found, wanted[:, :, position], rtol=1e-12, atol=1e-12)
        for heads, bias in cache.groups:
            behind = max(0, position + 2 - bias.shape[1])
            keys[:, heads, :behind], values[:, heads, :behind] = math.nan, math.nan


def test_the_penalty_is_the_mean_span_and_part_of_no_nats() -> None:
    model = awake(layers=2, **spans_config(penalty=0.25, initial=3)).double()
    for block, shares in zip(model.blocks, ([0.1, 0.2, 0.3, 0.9], [-0.5, 0.0, 1.0, 1.5]), strict=True):
        mixer: Any = block.attention
        mixer.spans.data.copy_(torch.tensor(shares))
    tokens = torch.randint(256, (2, 40))
    nats, auxiliary = model(tokens, return_nats=True, return_extras=True)[:2]
    assert auxiliary is None
    trained, auxiliary = model.train()(tokens, return_nats=True, return_extras=True)[:2]
    assert torch.equal(nats, trained)
    torch.testing.assert_close(auxiliary, torch.tensor(0.25 * (0.375 + 0.5) * 40, dtype=torch.float64))


def test_a_span_at_an_end_can_come_back() -> None:
    shares = torch.tensor([-0.1, -0.1, 0.0, 0.0, 0.5, 1.0, 1.0, 1.2, 1.2], requires_grad=True)
    cut = Bounded.apply(shares)
    assert cut.tolist() == [0, 0, 0, 0, 0.5, 1, 1, 1, 1]
    (grad,) = torch.autograd.grad(cut, shares, torch.tensor([1.0, -1, 1, -1, 1, 1, -1, 1, -1]))
    assert grad.tolist() == [0, -1, 0, -1, 1, 1, 0, 1, 0]


def test_it_begins_as_it_is_asked_and_trains_as_vectors_do() -> None:
    model: Any = SparseTransformer(small(**spans_config(initial=10, limit=20)))
    for block in model.blocks:
        assert block.attention.positions_read().tolist() == [10] * 4
    roles = model.parameter_roles()
    assert {role.part for name, role in roles.items() if name.endswith("spans")} == {"vectors"}
    assert roles["blocks.0.attention.query_key_value.weight"].rows == (64, 64, 64)
    plain = SparseTransformer.num_parameters(small(attention={"type": "dense"}))
    assert SparseTransformer.num_parameters(model.config) == plain + 3 * 4
    assert parameter_parts(model.config)["adaptive_span"] > 0


def test_pairs_are_those_of_the_spans_or_of_the_limit() -> None:
    config = small(layers=1, **spans_config(limit=12))
    mixer: Any = awake(layers=1, **spans_config(limit=12)).blocks[0].attention
    for spans in ([0.0, 2.5, 6.0, 12.0], [12.0] * 4):
        mixer.spans.data.copy_(torch.tensor(spans) / 12)
        q = torch.zeros(1, 4, 40, 16)
        masks = [mixer.allowed(q, q, head)(torch.arange(40)) for head in range(4)]
        assert mixer.num_pairs(40) == sum(int(mask.sum()) for mask in masks)
    planned = work(config).blocks
    assert planned.pairs == mixer.num_pairs(40) and planned.bound == "spans of at most 12 positions"
    assert set(config.layer_patterns()[0]) == {Local(17)}
    assert set(small(**spans_config()).layer_patterns()[0]) == {Dense()}
