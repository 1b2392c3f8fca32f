"""Attention weights that hooks take from a running model, against a dense softmax written out here."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from longstride.launcher.drawing.attention import attention_rows
from longstride.sparse_model import SparseTransformer
from tests.harness.configs import ATTENTIONS, small


def random_model(attention: Any, **changes: Any) -> SparseTransformer:
    torch.manual_seed(0)
    model = SparseTransformer(small(attention=attention, **changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def dense_weights(model: SparseTransformer, tokens: torch.Tensor) -> list[torch.Tensor]:
    """(H, N, N) float64 of each layer: block after block by hand, a softmax over the masked scores of all pairs."""
    found = []
    with torch.no_grad():
        h = model.embedding(tokens[None].long())
        for block in model.blocks:
            projected = block.attention.query_key_value(block.attention_norm(h))[0]
            channels, heads = model.config.query_key_width, model.config.heads
            weights = []
            for head in range(heads):
                own = slice(head * channels // heads, (head + 1) * channels // heads)
                q, k = (projected[:, part : part + channels][:, own].double() for part in (0, channels))
                scores = q @ k.T / math.sqrt(channels // heads)
                place = torch.arange(len(tokens))
                scores[~block.attention.patterns[head].mask(place[:, None], place)] = -math.inf
                weights.append(torch.softmax(scores, -1).nan_to_num(0.0))
            found.append(torch.stack(weights))
            h = block(h).rows
    return found


@pytest.mark.parametrize("name", ["strided merged", "fixed multihead", "cycle"])
def test_rows_equal_a_dense_softmax(name: str) -> None:
    model = random_model(ATTENTIONS[name], context=24)
    tokens = torch.randint(256, (24,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    wanted = dense_weights(model, tokens)
    queries = [0, 5, 8, 23]
    for head in (None, 0, 3):
        rows = attention_rows(model, tokens, queries, layers=range(3), head=head)
        for layer, weights in enumerate(wanted):
            own = weights.sum(0) / weights.any(-1).sum(0)[:, None] if head is None else weights[head]
            np.testing.assert_allclose(rows[layer], own[queries].numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_row_sums_to_one_over_earlier_positions(name: str) -> None:
    model = random_model(ATTENTIONS[name])
    tokens = torch.arange(40, dtype=torch.uint8)
    place = torch.arange(40)
    for layer, rows in attention_rows(model, tokens, range(40), layers=range(3)).items():
        patterns = model.config.layer_patterns()[layer]
        has_keys = torch.stack([pattern.mask(place[:, None], place).any(-1) for pattern in patterns]).any(0)
        np.testing.assert_allclose(rows.sum(-1), has_keys.double().numpy(), rtol=1e-12)
        assert bool(has_keys.all()) or name in ("fixed interleaved", "strided aligned")
        assert not np.triu(rows, 1).any() and (rows >= 0).all()


def test_a_query_without_keys_has_a_row_of_zeros() -> None:
    model = random_model({"type": "summary", "stride": 8, "summary": 2})
    rows = attention_rows(model, torch.arange(40, dtype=torch.uint8), [0, 5, 6, 20], layers=[1])[1]
    assert rows.sum(-1).tolist() == pytest.approx([0, 0, 1, 1], rel=1e-12)


@pytest.mark.parametrize("name", ["strided merged", "fixed merged", "dense"])
def test_a_later_byte_does_not_matter(name: str) -> None:
    """Row i reads bytes before i alone: a byte at or behind the query changes no bit of its weights."""
    model = random_model(ATTENTIONS[name])
    tokens = torch.arange(40, dtype=torch.uint8)
    changed = tokens.clone()
    changed[20:] += 77
    before, after = (attention_rows(model, each, [3, 20, 21], layers=range(3)) for each in (tokens, changed))
    for layer in range(3):
        assert np.array_equal(before[layer][:2], after[layer][:2])
    assert not np.array_equal(before[2][2], after[2][2])


def test_hooks_change_nothing_and_leave() -> None:
    model = random_model(ATTENTIONS["fixed merged"])
    tokens = torch.arange(40, dtype=torch.uint8)
    with torch.no_grad():
        before = model(tokens[None], return_nats=True)
        inside = []
        handle = model.register_forward_hook(lambda module, given, output: inside.append(output))
        attention_rows(model, tokens, [39], layers=[0, 2])
        handle.remove()
        assert torch.equal(inside[0], before) and torch.equal(model(tokens[None], return_nats=True), before)
    assert not any(module._forward_hooks for module in model.modules())


def test_rows_in_pieces_are_kept_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(ATTENTIONS["strided merged"])
    tokens = torch.arange(40, dtype=torch.uint8)
    whole = attention_rows(model, tokens, range(40), layers=[1])[1]
    monkeypatch.setattr("longstride.launcher.drawing.attention.SCORES_IN_WORK", 3 * 40)
    kept = attention_rows(
        model, tokens, range(40), layers=[1], keep=lambda rows: rows.reshape(len(rows), 8, 5).sum(-1)
    )[1]
    np.testing.assert_allclose(kept, whole.reshape(40, 8, 5).sum(-1), rtol=1e-12, atol=1e-15)
