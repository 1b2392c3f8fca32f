"""Padding: what stands behind the end of a short context changes nothing that is learned.

Letters: B batch, N positions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longstride.data_pipelines.order import Batch, StreamState
from longstride.launcher.training.loop import score
from longstride.sparse_model import SparseTransformer
from tests.harness.configs import SYSTEMS
from tests.sparse_model.test_transformer import awake

MODELS = [
    {"feed_forward": {"type": "experts", "count": 3, "balance": 3.0, "capacity": 0.75}},
    SYSTEMS["routing"],
]


def contexts() -> Tensor:
    return torch.randint(200, (3, 40), generator=torch.Generator().manual_seed(1))


def trained_on(model: SparseTransformer, tokens: Tensor, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """The trainer's loss over some contexts, and all that it changes: gradients, and buffers after the step."""
    model.zero_grad()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def engine(*args: Any, **options: Any) -> Any:
        return model(*args, **options)

    vars(engine).update(module=model, device=torch.device("cpu"))
    ids, state = torch.arange(len(tokens)), StreamState("none", 0, 0, 0, len(tokens))
    torch.manual_seed(2)  # of dropout
    scored = score(engine, Batch(tokens, torch.tensor(lengths), ids, state), slice(None))  # type: ignore[arg-type]
    scored.loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for part, total in zip(model.observers, scored.statistics, strict=True):
        part.observe(total)
    for name, buffer in model.named_buffers():
        found[name] = buffer.clone()
        buffer.copy_(before[name])
    return {name: each.clone() for name, each in found.items()}


@pytest.mark.parametrize("changes", MODELS, ids=["experts", "routing"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_gradients_of_padded_contexts_are_bitwise_equal(changes: dict[str, Any], reentrant: bool) -> None:
    model, tokens = awake(**changes, dropout=0.3).double().train(), contexts()
    wanted = trained_on(model, tokens, (40, 17, 1))
    model.activation_checkpoint = partial(checkpoint, use_reentrant=reentrant)
    found = trained_on(model, tokens, (40, 17, 1))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


def test_contexts_without_padding_have_the_bits_that_they_have_without_a_mask() -> None:
    for changes in MODELS:
        model, tokens = awake(**changes).double().train(), contexts()
        results = []
        for real in (None, torch.ones(3, 40, dtype=torch.bool)):
            given = model(tokens, return_nats=True, return_extras=True, real=real)
            loss = given.rows.sum() if given.auxiliary_loss is None else given.rows.sum() + given.auxiliary_loss
            results.append([loss, *given.statistics, *torch.autograd.grad(loss, list(model.parameters()))])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
