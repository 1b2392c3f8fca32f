"""Several documents in one context; tests/sparse_model/test_parts.py computes each as it would be alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longstride.kernels import ConfigError
from longstride.sparse_model import SparseTransformer
from tests.harness.configs import LATER, SYSTEMS
from tests.sparse_model.test_transformer import awake

BEGINS = ((0, 13, 14, 31), (5, 24))  # of two contexts of 40; position 0 begins one in any case


def made(changes: dict[str, Any]) -> tuple[SparseTransformer, Tensor, Tensor]:
    """A model in fp64 whose every weight matters, two contexts, and where documents begin in them."""
    begins = torch.zeros(2, 40, dtype=torch.bool)
    for row, places in zip(begins, BEGINS, strict=True):
        row[list(places)] = True
    return awake(**changes).double(), torch.randint(256, (2, 40)), begins


def test_recomputed_gradients_of_documents_are_bitwise_equal() -> None:
    model, tokens, begins = made({**LATER, "initialization": "released", "ngrams": {"orders": [2, 4], "rows": 300}})
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
