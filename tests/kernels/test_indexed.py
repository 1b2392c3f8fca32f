"""Attention to keys that an indexer chooses, against its definition with masks. Letters as in ``kernels.indexed``."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from longstride.kernels import ConfigError, indexed, sparse_attention
from longstride.kernels.backends.cpu import indexed as cpu
from longstride.kernels.indexed import choose_keys, indexed_attention, indexer_loss, last_highest
from longstride.kernels.patterns import Dense
from longstride.kernels.selections import listed_positions
from tests.harness.backends import IN_THE_INTERPRETER, WITH_TRITON
from tests.harness.stochastic import assert_rounding_explains, with_gradients

# Positions, keys, block, window, heads of keys: ragged, blocks of one key, more keys than are there.
CASES = [
    (100, 16, 2, 1, 2), (100, 16, 8, 4, 4), (100, 96, 16, 30, 1), (64, 64, 1, 1, 4), (100, 128, 8, 5, 2),
]  # fmt: skip
FAR = [(257, 32, 16, 17, 2), (257, 24, 1, 5, 2), (1_000, 64, 64, 1, 1), (1_000, 16, 1, 1, 1)]


class Inputs(NamedTuple):
    """Leaves in fp64."""

    index_q: Tensor  # (B, N, J, I)
    index_k: Tensor  # (B, N, I)
    index_weights: Tensor  # (B, N, J)
    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, K, N, D)
    v: Tensor  # (B, K, N, E)

    @classmethod
    def drawn(cls, context: int, key_heads: int, batch: int = 2, heads: int = 4) -> "Inputs":
        """Draw them: three heads of five channels choose for heads of six."""
        torch.manual_seed(0)
        index = (context, 3, 5), (context, 5), (context, 3)
        attention = (heads, context, 6), (key_heads, context, 6), (key_heads, context, 7)
        shapes = ((batch, *shape) for shape in (*index, *attention))
        return cls(*(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes))


def scores_of(x: Inputs) -> Tensor:
    """Return the indexer's scores (B, N, N) of all pairs (equation 1)."""
    return torch.einsum("btj,btjs->bts", x.index_weights, torch.einsum("btji,bsi->btjs", x.index_q, x.index_k).relu())


def mask_of(scores: Tensor, count: int, block: int, window: int, starts: Tensor) -> Tensor:
    """Return which keys each query reads, (B, N, N) bool, by sorting the blocks of each query."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    for entry, rows in enumerate(scores.detach().float()):
        for query, row in enumerate(rows.tolist()):
            start = int(starts[entry, query])
            ranked = []
            for first in range(start, query + 1, block):
                keys = range(first, min(first + block, query + 1))
                is_near = keys[-1] > query - window
                ranked.append((math.inf if is_near else max(row[key] for key in keys), first))
            for _, first in sorted(ranked)[-count:]:
                mask[entry, query, first : min(first + block, query + 1)] = True
    return mask


def defined(x: Inputs, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention with a mask (B, N, N), and the loss of the indexer."""
    k, v = (rows.repeat_interleave(x.q.shape[1] // rows.shape[1], 1) for rows in (x.k, x.v))
    weights = ((x.q @ k.mT) / math.sqrt(6)).masked_fill(~mask[:, None], -1e30).softmax(-1)
    target = weights.detach().mean(1)
    log_index = scores_of(x).masked_fill(~mask, -1e30).log_softmax(-1).masked_fill(~mask, 0.0)
    return weights @ v, (torch.xlogy(target, target) - target * log_index).sum(-1).mean()


def gradients(out: Tensor, loss: Tensor, x: Inputs) -> list[Tensor]:
    return [out.detach(), loss.detach(), *torch.autograd.grad(out.sin().sum() + 3 * loss, x)]


def check(case: tuple[int, int, int, int, int], starts: Tensor | None, backend: str) -> None:
    """Require choice, output, loss and all gradients of a case to be those of the definition."""
    context, keys, block, window, key_heads = case
    x = Inputs.drawn(context, key_heads)
    limits = torch.zeros(2, context, dtype=torch.int64) if starts is None else starts
    mask = mask_of(scores_of(x), keys // block, block, window, limits)
    expected = gradients(*defined(x, mask), x)
    numbers = choose_keys(*x[:3], count=keys // block, block=block, window=window, starts=starts, backend=backend)
    block = block if starts is None else 1
    places = listed_positions(numbers, block, torch.arange(context))
    read = torch.zeros(2, context, context + 1, dtype=torch.int64)
    read.scatter_add_(2, places.where(places >= 0, context), torch.ones_like(places))
    assert torch.equal(read[..., :-1], mask.long())  # each key once
    out, target = indexed_attention(*x[3:], numbers, block=block, backend=backend, return_weights=True)
    loss = indexer_loss(*x[:3], (x.q, x.k), numbers=numbers, block=block, target=target)
    torch.testing.assert_close(gradients(out, loss, x), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(target.sum(-1), torch.ones(2, context, dtype=torch.float64))
    if keys >= context:
        loss = indexer_loss(*x[:3], (x.q, x.k), starts=starts)
        if starts is None:
            out = sparse_attention(*x[3:], Dense(), backend=backend)
        else:
            out = defined(x, mask)[0]
        torch.testing.assert_close(gradients(out, loss, x), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_choice_output_loss_and_gradients_are_those_of_the_definition(case: Any, backend: str) -> None:
    check(case, None, backend)


@pytest.mark.parametrize("case", [(8, 1, 3, 4), (12, 4, 3, 2), (16, 8, 9, 1)], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_context_of_1_to_64_positions_is_that_of_the_definition(case: Any, backend: str) -> None:
    for context in range(1, 65):
        check((context, *case), None, backend)


@WITH_TRITON
@IN_THE_INTERPRETER
@pytest.mark.parametrize("case", [(17, 8, 1, 3, 4), (40, 16, 8, 9, 1)], ids=str)
@pytest.mark.parametrize("fewest", [0, 1 << 18], ids=["in tiles", "listed"])
def test_triton(case: Any, fewest: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(indexed, "SHORTEST_IN_TILES", 2)
    monkeypatch.setattr(indexed, "FEWEST_IN_TILES", fewest)
    check(case, None, "triton")


@pytest.mark.parametrize("case", FAR, ids=str)
def test_far_contexts(case: Any) -> None:
    check(case, None, "cpu")


@pytest.mark.parametrize("case", [(40, 8, 1, 3, 4), (40, 16, 8, 9, 1), (41, 64, 4, 2, 2)], ids=str)
def test_documents_are_contexts_of_their_own(case: Any) -> None:
    position = torch.arange(case[0])
    check(case, torch.stack([position // 13 * 13, position // 5 * 5]), "cpu")


@pytest.mark.parametrize("case", [(100, 16, 2, 1, 2), (100, 16, 8, 4, 4)], ids=str)
def test_pieces_and_tiles_change_nothing(case: Any, monkeypatch: Any) -> None:
    """Of few queries, and where each gathers its keys."""
    monkeypatch.setattr(indexed, "SCORES", {"cpu": 3 * 64 * 7})
    monkeypatch.setattr(cpu, "TILE", 500)
    monkeypatch.setattr(cpu, "MOST_LISTED", 16 * 17)
    check(case, None, "cpu")
    monkeypatch.setattr(cpu, "GATHERED", 2)
    check(case, None, "cpu")


def test_of_equal_scores_the_later_keys_are_chosen() -> None:
    """Also where all heads are silent, by their ReLU, and weights have any sign."""
    index = torch.ones(1, 9, 2, 4), -torch.ones(1, 9, 4), torch.tensor([1.0, -1.0]).expand(1, 9, 2)
    numbers = choose_keys(*index, count=3)[0]
    assert [sorted(row) for row in numbers.tolist()] == [
        [-1, -1, 0], [-1, 0, 1], *([place - 2, place - 1, place] for place in range(2, 9))
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["spread", "equal", "few"])
def test_many_of_far_more_keys_are_the_highest(kind: str) -> None:
    """Beside a plain sort, where scores are compared span by span."""
    scores = torch.randn(5, 1_000, generator=torch.Generator().manual_seed(0))
    if kind == "equal":
        scores = scores.round()
    elif kind == "few":
        scores[:, torch.arange(1_000) % 17 > 0] = -torch.inf
    expected = [sorted(range(1_000), key=lambda place: (row[place], place))[-65:] for row in scores.tolist()]
    for row, found, of_plain in zip(scores, last_highest(scores, 65), expected, strict=True):
        assert sorted(found.tolist()) == sorted(place if row[place] > -torch.inf else -1 for place in of_plain)


def test_a_few_queries_behind_keys_choose_as_in_a_whole_context() -> None:
    x = Inputs.drawn(50, 1)
    whole = choose_keys(*x[:3], count=4, block=4, window=6)
    some = choose_keys(x.index_q[:, 33:], x.index_k, x.index_weights[:, 33:], count=4, block=4, window=6, first=33)
    assert torch.equal(some.sort(-1).values, whole[:, 33:].sort(-1).values)


@pytest.mark.parametrize("block", [1, 8])
def test_a_query_without_keys_gets_nothing(block: int) -> None:
    x = Inputs.drawn(20, 4)
    numbers = torch.full((2, 20, 2), -1, dtype=torch.int32)
    numbers[:, 9:, 0] = 0
    out = indexed_attention(*x[3:], numbers, block=block)
    assert not out[:, :, :9].any() and out[:, :, 9:].any()
    grads = torch.autograd.grad(out.sum(), x[3:])
    assert all(grad.isfinite().all() for grad in grads) and not grads[0][:, :, :9].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [1, 8])
def test_half_precision(dtype: torch.dtype, block: int) -> None:
    x = Inputs.drawn(70, 2)
    numbers = choose_keys(*x[:3], count=16 // block, block=block, window=2)
    inputs = [each.detach().to(dtype).requires_grad_() for each in x[3:]]
    mask = mask_of(scores_of(x), 16 // block, block, 2, torch.zeros(2, 70, dtype=torch.int64))

    def formula(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        rows = x._replace(q=q, k=k, v=v)
        return with_gradients(lambda *_: defined(rows, mask)[0], (q, k, v))

    found = with_gradients(lambda *rows: indexed_attention(*rows, numbers, block=block), inputs)
    assert_rounding_explains(found, formula, inputs)


def test_padding_is_left_out_of_the_loss() -> None:
    x = Inputs.drawn(12, 4)
    real = torch.arange(12) < torch.tensor([[12], [5]])
    whole = indexer_loss(*(each[:1] for each in x[:3]), (x.q[:1], x.k[:1]))
    short = indexer_loss(*(each[1:, :5] for each in x[:3]), (x.q[1:, :, :5], x.k[1:, :, :5]))
    expected = (12 * whole + 5 * short) / 17
    torch.testing.assert_close(indexer_loss(*x[:3], (x.q, x.k), real=real), expected)


def test_mistakes() -> None:
    x = Inputs.drawn(12, 4)
    with pytest.raises(ValueError, match=r"numbers \(2, 12, 3\) torch.int64 must be \(2, 12, T\) int32"):
        indexed_attention(*x[3:], torch.zeros(2, 12, 3, dtype=torch.int64))
    with pytest.raises(ConfigError, match="backend"):
        indexed_attention(*x[3:], torch.zeros(2, 12, 3, dtype=torch.int32), backend="flex")
