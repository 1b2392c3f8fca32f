"""Reversible blocks: the gradients of their formula, inputs that come back to the bit, memory that is flat in depth."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longstride.sparse_model import SparseTransformer
from tests.harness.configs import small
from tests.sparse_model.test_transformer import awake

HASHED = {"attention": {"type": "lsh", "buckets": 4, "rounds": 2, "chunk": 4}}
EXPERTS = {"feed_forward": {"type": "experts", "count": 4}}


def two_streams(model: Any, tokens: Tensor) -> Tensor:
    """Nats (B, N) by the papers' equations, the sub-layers two by two."""
    x1 = x2 = model.embedding(tokens)
    for block in model.blocks:
        y1 = x1 + block.attention(block.attention_norm(x2)).rows
        y2 = x2 + block.feed_forward(block.feed_forward_norm(y1)).rows
        x1, x2 = y1, y2
    return model.logits(model.norm((x1 + x2) / 2), tokens)


@pytest.mark.parametrize("changes", [{}, HASHED], ids=["fixed", "hashed"])
def test_gradients_are_those_of_the_formula(changes: dict[str, Any]) -> None:
    """In fp64, up to the grid of the streams."""
    model = awake(reversible=True, **changes).double()
    tokens = torch.randint(256, (2, 40))
    found = model(tokens, return_nats=True)
    wanted = two_streams(model, tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(wanted.sum(), parameters)
    found.sum().backward()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-7, atol=1e-7 * float(gradient.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("changes", [HASHED, EXPERTS], ids=["hashed", "experts"])
def test_inputs_come_back_to_the_bit(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """So hashes and routers choose as they chose, and gradients are those of ordinary recomputation, with dropout."""
    model = awake(reversible=True, dropout=0.2, layers=6, **changes).to(dtype).train()
    for buffer in model.buffers():
        buffer.data = buffer.data.float()  # as in training
    seen: dict[Any, list[Tensor]] = {}
    for block in model.blocks:
        for module in (block.attention, block.feed_forward):
            module.register_forward_pre_hook(lambda module, inputs: seen.setdefault(module, []).append(inputs[0]))
    again = copy.deepcopy(model)
    again.activation_checkpoint = functools.partial(checkpoint, use_reentrant=True)
    tokens = torch.randint(256, (2, 40))
    for each in (model, again):
        torch.manual_seed(5)
        rows, auxiliary = each(tokens, return_nats=True, return_extras=True)[:2]
        (rows.sum() if auxiliary is None else rows.sum() + 10 * auxiliary).backward()
    assert all(len(inputs) == 2 and torch.equal(*inputs) for inputs in seen.values()) and len(seen) >= 12
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, other.grad)


def test_it_has_the_tensors_of_one_stream() -> None:
    shapes = [
        {name: tensor.shape for name, tensor in SparseTransformer(small(reversible=on)).state_dict().items()}
        for on in (False, True)
    ]
    assert shapes[0] == shapes[1]


def test_a_second_backward_pass_is_refused() -> None:
    loss = awake(reversible=True)(torch.randint(256, (1, 40)), return_nats=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
