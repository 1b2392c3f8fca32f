"""Padding and documents in a context: recomputed gradients, and contexts that are full. test_parts.py has the rest.

Letters: B batch, N positions.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longstride.sparse_model import SparseTransformer
from tests.harness.configs import LATER, SYSTEMS
from tests.sparse_model.test_transformer import awake

EXPERTS = {"feed_forward": {"type": "experts", "count": 3, "balance": 3.0, "capacity": 0.75}}
LENGTHS, BEGINS = torch.tensor([[40], [17], [1]]), torch.tensor([0, 13, 14, 31])
REAL = {"real": torch.arange(40) < LENGTHS}
CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "experts": (EXPERTS, REAL),
    "routing": (SYSTEMS["routing"], REAL),
    "thresholds": (SYSTEMS["experts by thresholds"], REAL),
    "documents": (
        {**LATER, "initialization": "released", "ngrams": {"orders": [2, 4], "rows": 300}},
        {"begins": torch.isin(torch.arange(40), BEGINS).expand(3, -1)},
    ),
}


def learned(model: SparseTransformer, **options: Any) -> list[Tensor]:
    """Loss, statistics and gradients of a step, as the trainer computes them."""
    tokens = torch.randint(200, (3, 40), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # of dropout
    model.zero_grad()
    output: Any = model(tokens, return_nats=True, return_extras=True, **options)
    loss = output.rows.sum() if output.auxiliary_loss is None else output.rows.sum() + output.auxiliary_loss
    loss.backward()
    return [loss, *output.statistics, *(x.grad.clone() for x in model.parameters())]


@pytest.mark.parametrize("case", CASES)
def test_recomputed_gradients_are_bitwise_equal(case: str) -> None:
    changes, options = CASES[case]
    model = awake(**changes, dropout=0.3).double().train()
    wanted = learned(model, **options)
    for reentrant in (False, True):
        model.activation_checkpoint = partial(checkpoint, use_reentrant=reentrant)
        assert all(map(torch.equal, learned(model, **options), wanted))


@pytest.mark.parametrize("case", ["experts", "routing", "thresholds"])
def test_contexts_without_padding_have_the_bits_that_they_have_without_a_mask(case: str) -> None:
    model = awake(**CASES[case][0]).double().train()
    full = learned(model, real=torch.ones(3, 40, dtype=torch.bool))
    assert all(map(torch.equal, learned(model), full))
