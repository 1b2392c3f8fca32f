"""α-entmax and attention by it against formulas written out, and what of it other attention has not.

Letters: B batch, H heads, N positions, D head width, W keys of a row.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels.patterns import pattern_from_json
from longstride.sparse_model import ModelConfig, SparseTransformer
from longstride.sparse_model.mixers import entmax as module
from longstride.sparse_model.mixers.entmax import entmax, entmax_attention
from tests.harness.configs import ATTENTIONS, small
from tests.harness.stochastic import assert_rounding_explains, with_gradients

PATTERNS = {name: each for name, each in ATTENTIONS.items() if "type" in each and "combine" not in each}
N, D = 40, 8


def by_bisection(scores: Tensor, alpha: float) -> Tensor:
    """p = [(α - 1)s - τ]₊^(1/(α - 1)) over the last axis, with τ halved in (Correia et al. 2019, section 3.1)."""
    z = (alpha - 1) * scores
    low, high = z.amax(-1, keepdim=True) - 1, z.amax(-1, keepdim=True)
    for _ in range(100):
        middle = (low + high) / 2
        over = ((z - middle).clamp_min(0) ** (1 / (alpha - 1))).sum(-1, keepdim=True) >= 1
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return (z - low).clamp_min(0) ** (1 / (alpha - 1))


def sparsemax(scores: Tensor) -> Tensor:
    """By sorting (Martins and Astudillo 2016, algorithm 1)."""
    ordered = scores.sort(-1, descending=True).values
    sums, number = ordered.cumsum(-1), torch.arange(1, scores.shape[-1] + 1)
    count = (1 + number * ordered > sums).sum(-1, keepdim=True)
    return (scores - (sums.gather(-1, count - 1) - 1) / count).clamp_min(0)


def rows(width: int, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(50, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))


def excess_of(alpha: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(alpha - 1, dtype=dtype)


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.9, 2.0])
@pytest.mark.parametrize("width", [1, 2, 7, 300])
def test_weights_are_those_of_bisection(width: int, alpha: float) -> None:
    for spread in (0.0, 0.01, 2.0, 50.0):
        scores = rows(width, spread)
        found = entmax(scores, excess_of(alpha))
        torch.testing.assert_close(found, by_bisection(scores, alpha), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.sum(-1), torch.ones(50, dtype=torch.float64), rtol=0, atol=1e-15 * width)
        single = entmax(scores.float(), excess_of(alpha, torch.float32))
        torch.testing.assert_close(single.double(), found, rtol=0, atol=4e-6)


def test_both_ends_are_softmax_and_sparsemax() -> None:
    scores = rows(60)
    torch.testing.assert_close(entmax(scores, excess_of(2.0)), sparsemax(scores), rtol=0, atol=1e-14)
    torch.testing.assert_close(entmax(scores, excess_of(1 + 1e-9)), scores.softmax(-1), rtol=1e-6, atol=0)
    distances = [float((entmax(scores, excess_of(1 + d)) - scores.softmax(-1)).abs().max()) for d in (1e-3, 1e-5)]
    assert distances[1] < distances[0] / 50


def test_low_scores_have_no_weight_and_rows_without_keys_none() -> None:
    scores = rows(80, 4.0)
    scores[:, 10:20] = -math.inf
    scores[7] = -math.inf
    counts = []
    for alpha in (1.2, 1.5, 2.0):
        found = entmax(scores, excess_of(alpha))
        assert not found[:, 10:20].any() and not found[7].any() and not found.isnan().any()
        counts.append(int((found > 0).sum()))
    assert 70 * 49 > counts[0] > counts[1] > counts[2] >= 49


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("alpha", [1.0001, 1.5, 2.0])
def test_the_threshold_is_found_in_a_few_steps(
    alpha: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows as long as can be: alike, spread in any way, and falling as each support may be another's."""
    number = torch.arange(1, module.MOST_KEYS + 1)
    given = [rows(2048)[:4], *(f(number.double())[None] for f in (torch.zeros_like, torch.log, lambda n: -(1.3**-n)))]
    for scores in given:
        wanted = entmax(scores.to(dtype), excess_of(alpha, dtype))
        with monkeypatch.context() as fewer:
            fewer.setattr(module, "STEPS", 10)
            torch.testing.assert_close(entmax(scores.to(dtype), excess_of(alpha, dtype)), wanted)


@torch.no_grad()
def threshold(scores: Tensor, excess: Tensor) -> Tensor:
    """τ of rows of a head each, (B, H, N, 1)."""
    scores = scores.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    weight = torch.stack([by_bisection(scores[:, h], 1 + float(excess[h])) for h in range(len(excess))], 1)
    # What is left of a score without what its weight says: τ, and less where the weight is 0.
    return (excess[:, None, None] * scores - weight ** excess[:, None, None]).amax(-1, keepdim=True)


def weights_with_gradients(scores: Tensor, excess: Tensor, tau: Tensor) -> Tensor:
    """As ``by_bisection`` of rows of a head each, (B, H, N, W): a step of Newton from τ has the derivatives of τ."""
    alpha = 1 + excess[:, None, None]
    power, allowed = 1 / (alpha - 1), scores > -math.inf
    blind = ~allowed.any(-1, keepdim=True)
    z = (alpha - 1) * scores.masked_fill(~allowed, 0.0)
    inside = (z > tau) & allowed

    def weights(tau: Tensor) -> Tensor:
        return torch.where(inside, torch.where(inside, z - tau, 1.0) ** power, 0.0)

    rise = torch.where(inside, power * torch.where(inside, z - tau, 1.0) ** (power - 1), 0.0).sum(-1, keepdim=True)
    tau = tau + (weights(tau).sum(-1, keepdim=True) - 1).masked_fill(blind, 0) / rise.detach().clamp_min(1e-300)
    return weights(tau).masked_fill(blind, 0.0)


def tensors(context: int = N, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v (2, 4, N, ·) and α - 1."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(2, context, 4, width, generator=generator).transpose(1, 2) for width in (D, D, 6)]
    excess = torch.tensor([0.03, 0.4, 0.75, 1.0], dtype=torch.promote_types(dtype, torch.float32))
    return [(2 * x).to(dtype).requires_grad_() for x in found] + [excess.requires_grad_()]


def masked_scores(q: Tensor, k: Tensor, patterns: Any) -> Tensor:
    place = torch.arange(q.shape[2])
    mask = torch.stack([pattern.mask(place[:, None], place) for pattern in patterns])
    return (q @ k.mT / math.sqrt(D)).masked_fill(~mask, -math.inf)


def densely(q: Tensor, k: Tensor, v: Tensor, excess: Tensor, patterns: Any, tau: Tensor | None = None) -> Tensor:
    scores = masked_scores(q, k, patterns)
    return weights_with_gradients(scores, excess, threshold(scores, excess) if tau is None else tau) @ v


@pytest.mark.parametrize("name", PATTERNS)
def test_attention_is_the_formula_over_the_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and every gradient, with all rows at once and few at a time."""
    pattern = pattern_from_json(PATTERNS[name])
    patterns, inputs = tuple(pattern.for_head(head) for head in range(4)), tensors()
    wanted = with_gradients(lambda *x: densely(*x, patterns), inputs)
    for limit in (module.SCORES_IN_WORK, 1):
        monkeypatch.setattr(module, "SCORES_IN_WORK", limit)
        monkeypatch.setattr(module, "BLOCK_ROWS", (16, 4) if limit == 1 else module.BLOCK_ROWS)
        module._layout.cache_clear()
        found = with_gradients(lambda *x: entmax_attention(*x, patterns), inputs)
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)
    module._layout.cache_clear()


def test_the_op_is_as_torch_wants_it() -> None:
    """With keys that heads share, which lie side by side."""
    q, k, v, excess = (x.detach() for x in tensors(16))
    inputs = [x.requires_grad_() for x in (q, k.transpose(1, 2).contiguous().transpose(1, 2)[:, :2], v[:, :2], excess)]
    torch.library.opcheck(torch.ops.longstride.entmax_attention.default, (*inputs, repr([{"type": "dense"}] * 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_as_near_as_the_precision_allows(dtype: torch.dtype) -> None:
    patterns = (pattern_from_json({"type": "strided", "stride": 8}),) * 4
    inputs = tensors(dtype=dtype)
    found = with_gradients(lambda *x: entmax_attention(*x, patterns), inputs)
    q, k, _, excess = (x.detach().double() for x in inputs)
    tau = threshold(masked_scores(q, k, patterns), excess)  # a hundred steps of bisection are none of the formula's
    assert_rounding_explains(found, lambda *x: with_gradients(lambda *y: densely(*y, patterns, tau), x), inputs)


def test_no_bit_of_a_row_depends_on_other_rows() -> None:
    scores, others = rows(30), (rows(30).flip(0) * 9, torch.zeros(50, 30, dtype=torch.float64))
    one, other = (entmax(torch.cat([scores, each]), excess_of(1.7))[:50] for each in others)
    assert torch.equal(one, other)


def test_every_head_begins_at_one_and_a_half_and_learns_as_vectors_do() -> None:
    model: Any = SparseTransformer(small(attention={"type": "entmax", "pattern": {"type": "local", "window": 9}}))
    assert all((1 + block.attention.excess()).tolist() == [1.5] * 4 for block in model.blocks)
    roles = model.parameter_roles()
    assert {role.part for name, role in roles.items() if name.endswith("excess_logits")} == {"vectors"}
    plain = SparseTransformer.num_parameters(small(attention={"type": "local", "window": 9}))
    assert SparseTransformer.num_parameters(model.config) == plain + 3 * 4
    assert ModelConfig.model_validate(model.config.model_dump(mode="json")).blocks() == model.config.blocks()
