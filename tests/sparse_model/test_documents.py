"""Several documents in one context: each is computed as it would be alone. Letters: B batch, N positions."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longstride.kernels import ConfigError
from longstride.sparse_model import SparseTransformer
from tests.harness.configs import ATTENTIONS, LATER, SYSTEMS, small

BEGINS = ((0, 13, 14, 31), (5, 24))  # of two contexts of 40; position 0 begins one in any case
EDGES = ((0, 13, 14, 31, 40), (0, 5, 24, 40))
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"attention": attention} for name, attention in ATTENTIONS.items()},
    "all later parts": {**LATER, "initialization": "released", "ngrams": {"orders": [2, 4], "rows": 300}},
    "position tables and rotary": {"rotary": {"base": 1000}, "ngrams": {"orders": [3], "rows": 50}},
    "keys and values that heads share": {"attention": {**ATTENTIONS["fixed merged"], "key_value_heads": 2}},
    "feed-forwards alone too": {"layers": 2, "order": "f s2 f"},
    "experts": SYSTEMS["experts every other layer"],
}


def made(changes: dict[str, Any]) -> tuple[SparseTransformer, Tensor, Tensor]:
    """A model in fp64 whose every weight matters, two contexts, and where documents begin in them."""
    torch.manual_seed(0)
    model = SparseTransformer(small(**changes)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    begins = torch.zeros(2, 40, dtype=torch.bool)
    for row, places in zip(begins, BEGINS, strict=True):
        row[list(places)] = True
    return model, torch.randint(256, (2, 40)), begins


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_a_document_is_computed_as_it_is_alone(changes: dict[str, Any]) -> None:
    model, tokens, begins = made(changes)
    names, parameters = zip(*model.named_parameters(), strict=True)
    packed = model(tokens, return_nats=True, begins=begins)
    gradients = torch.autograd.grad(packed.sum(), parameters)
    alone = [
        torch.cat([model(row[None, a:b], return_nats=True)[0] for a, b in pairwise(edges)])
        for row, edges in zip(tokens, EDGES, strict=True)
    ]
    torch.testing.assert_close(packed, torch.stack(alone), rtol=1e-11, atol=1e-11)
    wanted = torch.autograd.grad(sum(each.sum() for each in alone), parameters, allow_unused=True)
    for name, gradient, other in zip(names, gradients, wanted, strict=True):
        other = torch.zeros_like(gradient) if other is None else other
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9, msg=name)
    # Not a bit of another document; but the size of an expert's products goes by all of them.
    rounding = 1e-13 if changes is SYSTEMS["experts every other layer"] else 0.0
    changed = tokens.clone()
    changed[0, 13:14], changed[0, 31:], changed[1, :24] = 7, 8, 9
    again = model(changed, return_nats=True, begins=begins)
    for place in ((0, slice(14, 31)), (1, slice(24, 40))):
        torch.testing.assert_close(again[place], packed[place], rtol=0, atol=rounding)
    assert not torch.equal(again[0, 31:], packed[0, 31:])


def test_recomputed_gradients_of_documents_are_bitwise_equal() -> None:
    model, tokens, begins = made(MODELS["all later parts"])
    gradients = []
    for recompute in (None, partial(checkpoint, use_reentrant=True)):
        model.activation_checkpoint = recompute
        loss = model(tokens, return_nats=True, begins=begins).sum()
        gradients.append(torch.autograd.grad(loss, list(model.blocks.parameters())) if recompute is None else None)
        if recompute is not None:
            loss.backward()
    for gradient, parameter in zip(gradients[0] or (), model.blocks.parameters(), strict=True):
        assert parameter.grad is not None and torch.equal(gradient, parameter.grad)


def test_a_mixer_that_reads_whole_contexts_is_refused() -> None:
    model, tokens, begins = made(SYSTEMS["products of a synthesizer"])
    rule = r'^attention: synthesizer reads whole contexts; take patterns, or data.packing \{"attend": "context"\}$'
    with pytest.raises(ConfigError, match=rule):
        model(tokens, begins=begins)
