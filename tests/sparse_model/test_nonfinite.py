"""A stream that is not finite somewhere: its position is lost, and other contexts keep their bits.

Letters: B batch, N positions, C width.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.sparse_model import SparseTransformer
from tests.harness.configs import ATTENTIONS, LATER
from tests.sparse_model.test_transformer import awake

BAD = 24
MODELS: dict[str, dict[str, Any]] = {
    "local": {"attention": {"type": "local", "window": 5}},
    "fixed merged": {"attention": ATTENTIONS["fixed merged"]},
    "all later parts": LATER,
}


def nats_and_gradients(model: SparseTransformer, tokens: Tensor, value: float) -> tuple[Tensor, Tensor]:
    """Nats (B, N) and their gradient by what the embedding gives (B, N, C), where this value is added to one row."""
    added = torch.zeros(*tokens.shape, model.config.width)
    added[1, BAD] = value
    added.requires_grad_()
    hook = model.embedding.register_forward_hook(lambda module, inputs, rows: rows + added)
    nats = model(tokens, return_nats=True)
    hook.remove()
    return nats.detach(), torch.autograd.grad(nats.sum(), added)[0]


@pytest.mark.parametrize("name", MODELS)
def test_nan_stays_in_its_context(name: str) -> None:
    model = awake(layers=2, **MODELS[name])
    tokens = torch.randint(256, (2, 40))
    nats, gradients = nats_and_gradients(model, tokens, 1.0)
    for value in (math.nan, math.inf):
        bad_nats, bad_gradients = nats_and_gradients(model, tokens, value)
        assert not bad_nats[1, BAD].isfinite() and torch.equal(bad_nats[0], nats[0])
        assert not bad_gradients[1, BAD].isfinite().any() and torch.equal(bad_gradients[0], gradients[0])
