"""Heads of queries that share heads of keys and values: what mixers compute, keep and refuse then.

``test_systems`` has what such models share with all others.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.launcher.planning.costs import parameter_parts, work
from longstride.sparse_model import SparseTransformer
from tests.harness.configs import ATTENTIONS, small
from tests.sparse_model.test_transformer import awake

OPTIONS: dict[str, Any] = {"rotary": {"base": 1000}, "query_key_norm": True, "query_key_ratio": 0.5}
MIXERS: dict[str, Any] = {
    "heads": ATTENTIONS["heads"],
    "fixed": ATTENTIONS["fixed merged"],
    "chosen blocks": {"type": "moba", "block": 6, "top": 3},
    "spans": {"type": "adaptive_span", "ramp": 5, "penalty": 0.0, "initial": 9.5},
    "entmax": {"type": "entmax", "pattern": {"type": "strided", "stride": 8}},
}


def expanded(projection: Tensor, key_value_heads: int, widths: tuple[int, int]) -> Tensor:
    """Rows or biases of queries, keys and values, of four heads each; ``widths`` of queries and values."""
    kept = [width * key_value_heads // 4 for width in widths]
    q, k, v = projection.split([widths[0], *kept])
    own = (
        x.unflatten(0, (key_value_heads, -1)).repeat_interleave(4 // key_value_heads, 0).flatten(0, 1) for x in (k, v)
    )
    return torch.cat([q, *own])


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "prepared"])
@pytest.mark.parametrize("key_value_heads", [1, 2])
@pytest.mark.parametrize("attention", MIXERS.values(), ids=MIXERS)
def test_sharing_is_having_equal_keys_and_values(
    attention: dict[str, Any], key_value_heads: int, options: dict[str, Any]
) -> None:
    """The same rows, weights for pictures and gradients as a model whose heads have equal keys and values each."""
    changes = {"layers": 1, **options}
    shared = awake(attention={**attention, "key_value_heads": key_value_heads}, **changes).double()
    own = awake(attention=attention, **changes).double()
    values = dict(shared.named_parameters())
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            value = values[name]
            if "query_key_value" in name:
                value = expanded(value, key_value_heads, (shared.config.query_key_width, 64))
            parameter.copy_(value)
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    logits = [model(tokens) for model in (shared, own)]
    torch.testing.assert_close(*logits, rtol=1e-11, atol=1e-11)
    h = torch.randn(1, 40, 64, dtype=torch.float64)
    for head in range(4):
        rows = [model.blocks[0].attention.weights(h)(torch.arange(40), head) for model in (shared, own)]
        torch.testing.assert_close(*rows, rtol=1e-11, atol=1e-11)
    for each in logits:
        each.square().sum().backward()
    for (name, parameter), other in zip(own.named_parameters(), shared.parameters(), strict=True):
        gradient = other.grad
        if "query_key_value" in name:  # the gradient of a shared row is the sum of those of its copies
            numbers = torch.arange(len(other), dtype=torch.float64)
            place = expanded(numbers, key_value_heads, (shared.config.query_key_width, 64)).long()
            found = torch.zeros_like(other).index_add_(0, place, parameter.grad)
        else:
            found = parameter.grad
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("attention", MIXERS.values(), ids=MIXERS)
def test_as_many_as_heads_is_the_same_model(attention: dict[str, Any]) -> None:
    models = []
    for more in ({}, {"key_value_heads": 4}):
        torch.manual_seed(5)
        models.append(SparseTransformer(small(attention={**attention, **more})))
    first, second = (dict(model.named_parameters()) for model in models)
    assert list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("attention", MIXERS.values(), ids=MIXERS)
def test_what_is_kept_and_projected_is_less_and_the_pairs_are_the_same(attention: dict[str, Any]) -> None:
    models = [SparseTransformer(small(attention={**attention, "key_value_heads": count})) for count in (4, 1)]
    kept = []
    for model in models:
        state = model.new_states(2, 40, torch.device("cpu"), torch.float32)[0]
        kept.append(state.keys.numel() + state.values.numel())
        assert state.keys.shape == (2, model.blocks[0].attention.key_value_heads, 40, 16)
    assert kept[0] == 4 * kept[1] == 2 * 2 * 40 * 64
    parts = [parameter_parts(model.config) for model in models]
    saved = {name: parts[0][name] - parts[1][name] for name in parts[0]}
    assert {name for name in saved if saved[name]} == {models[0].blocks[0].attention.part}
    assert sum(saved.values()) == 3 * 2 * 48 * (64 + 1)  # of each layer, 48 channels of keys and of values less
    works = [work(model.config).total for model in models]
    assert works[0].linear - works[1].linear == 2 * 40 * 3 * 2 * 48 * 64
    assert (works[0].pairs, works[0].scores, works[0].values) == (works[1].pairs, works[1].scores, works[1].values)
    assert models[1].blocks[0].attention.stacked_rows == {"query_key_value": (64, 16, 16)}
