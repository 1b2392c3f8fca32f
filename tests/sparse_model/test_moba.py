"""Attention to chosen blocks. Letters: B batch, H heads, N positions, D head width."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels.selections import chosen_blocks, selection_mask
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers import moba
from tests.harness.configs import small
from tests.harness.stochastic import with_gradients

# Positions, block, top: ragged, a block of one, the own block alone, more blocks than are there, one block.
CASES = [(40, 6, 3), (37, 1, 5), (24, 8, 1), (20, 5, 4), (7, 7, 1), (5, 8, 3)]


def attention(block: int, top: int, **changes: Any) -> Any:
    """The mixer of a model in fp64."""
    torch.manual_seed(0)
    model: Any = SparseTransformer(small(layers=1, attention={"type": "moba", "block": block, "top": top}, **changes))
    return model.double().blocks[0].attention


def by_loops(q: Tensor, k: Tensor, v: Tensor, block: int, top: int) -> tuple[Tensor, Tensor]:
    """Output (N, D) and key sets (N, N) of one head, from its definition."""
    context, rows, reads = len(q), [], []
    for i in range(context):
        own = i // block
        scored = [(float(q[i].detach() @ k.detach()[c * block : (c + 1) * block].mean(0)), -c) for c in range(own)]
        chosen = {-c for _, c in sorted(scored, reverse=True)[: top - 1]}
        keys = [j for j in range(i + 1) if j // block == own or j // block in chosen]
        weights = torch.softmax(torch.stack([q[i] @ k[j] for j in keys]) / math.sqrt(q.shape[-1]), 0)
        rows.append(weights @ v[keys])
        reads.append([j in keys for j in range(context)])
    return torch.stack(rows), torch.tensor(reads)


@pytest.mark.parametrize(("context", "block", "top"), CASES)
def test_every_query_reads_its_block_and_the_best_before_it(context: int, block: int, top: int, monkeypatch) -> None:
    """Forward, gradients and key sets; a number of scores at once that does not divide theirs changes nothing."""
    mixer = attention(min(block, 40), top)
    q, k, v = (torch.randn(2, 4, context, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    masks = torch.zeros(2, 4, context, context, dtype=torch.bool)

    def wanted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = torch.zeros_like(q)
        for b, h in itertools.product(range(2), range(4)):
            rows[b, h], masks[b, h] = by_loops(q[b, h], k[b, h], v[b, h], block, top)
        return rows

    results = (with_gradients(f, (q, k, v)) for f in (lambda *x: mixer.attend(*x).rows, wanted))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)
    numbers = moba.choices(q, moba.means(k, block), block, top)
    selection = chosen_blocks(numbers, block)
    selection.check(context)
    assert torch.equal(selection_mask(selection, context), masks)
    assert mixer.num_pairs(context) * 2 == masks.sum()
    places = torch.arange(context)
    assert all(torch.equal(mixer.allowed(q[:1], k[:1], head)(places), masks[0, head]) for head in range(4))
    monkeypatch.setattr(moba, "SCORES", 8 * 3 * max(1, context // block))
    assert torch.equal(moba.choices(q, moba.means(k, block), block, top), numbers)


def test_equal_scores_choose_the_earlier_block() -> None:
    q, k = torch.ones(1, 1, 24, 4), torch.ones(1, 1, 24, 4)
    numbers = moba.choices(q, moba.means(k, 4), 4, 3)[0, 0]
    assert numbers[::4].tolist() == [[-1, -1], [0, -1], [0, 1], [0, 1], [0, 1], [0, 1]]
