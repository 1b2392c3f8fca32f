"""Attention to chosen blocks. Letters: B batch, H heads, N positions, D head width."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels.selections import chosen_blocks, selection_mask
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers import moba
from tests.harness.configs import small
from tests.sparse_model.test_config import assert_refused

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
    out = mixer.attend(q, k, v).rows
    wanted, reads = zip(
        *(by_loops(q[b, h], k[b, h], v[b, h], block, top) for b in range(2) for h in range(4)), strict=True
    )
    torch.testing.assert_close(out, torch.stack(wanted).view_as(out), rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(rows, (q, k, v), grad) for rows in (out, torch.stack(wanted).view_as(out)))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    numbers = moba.choices(q, moba.means(k, block), block, top)
    selection = chosen_blocks(numbers, block)
    selection.check(context)
    masks = torch.stack(reads).view(2, 4, context, context)
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


def test_the_future_changes_no_bit() -> None:
    """Key sets and rows, whatever comes after: within the block and in blocks to come.

    Rows by the specification: others take rows together as the selection has it, and products round by their size.
    """
    mixer = attention(6, 3, backend="reference")
    q, k, v = torch.randn(3, 2, 4, 40, 16, dtype=torch.float64)
    for half in (18, 21):
        others = [torch.cat([x[:, :, :half], torch.randn_like(x[:, :, half:])], 2) for x in (q, k, v)]
        masks = [
            selection_mask(chosen_blocks(moba.choices(a, moba.means(b, 6), 6, 3), 6), 40)
            for a, b in ((q, k), others[:2])
        ]
        assert torch.equal(*(mask[:, :, :half] for mask in masks)) and not torch.equal(*masks)
        assert torch.equal(mixer.attend(q, k, v).rows[:, :, :half], mixer.attend(*others).rows[:, :, :half])


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"block": 41, "top": 1}, "attention.block=41: must be at most context 40"),
        ({"block": 8, "top": 6}, "attention.top=6: context 40 has 5 blocks; at most 5"),
        ({"block": 8, "top": 0}, "attention.top=0: must be "),
        ({"block": 8}, "attention.top: required, and missing"),
    ],
)
def test_blocks_that_do_not_fit_are_named(changes: dict[str, Any], line: str) -> None:
    assert_refused(line, attention={"type": "moba", **changes})
