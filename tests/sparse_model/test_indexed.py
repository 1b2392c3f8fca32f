"""The mixer with a learned indexer. Letters: B batch, N positions, C width, J heads of the indexer of width I."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels.indexed import choose_keys, indexed_attention, indexer_loss
from longstride.sparse_model import BlockContext
from longstride.sparse_model.rotary import turn
from tests.sparse_model.test_transformer import awake

INDEXED = {"type": "indexed", "keys": 12, "block": 4, "window": 5, "index_heads": 3, "index_width": 6}


def model_of(attention: Any = INDEXED, **changes: Any) -> Any:
    """Make a model in fp64."""
    return awake(attention=attention, **{"layers": 2, **changes}).double()


def losses(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean nats and the indexers' loss, in training."""
    output = model.train()(tokens, return_nats=True, return_extras=True)
    return output.rows.mean(), output.auxiliary_loss


def gradients_of(loss: Tensor, model: Any) -> dict[str, Tensor | None]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True), strict=True))


@pytest.mark.parametrize("block", [1, 4])
def test_indexer_and_network_learn_from_losses_of_their_own(block: int) -> None:
    """Each has the same bits with the other's loss and without."""
    model, tokens = model_of({**INDEXED, "block": block}, rotary={}), torch.randint(256, (2, 40))
    nats, loss = losses(model, tokens)
    both = gradients_of(sum(losses(model, tokens)), model)
    network, indexer = gradients_of(nats, model), gradients_of(loss, model)
    for name, gradient in both.items():
        own, other = (indexer, network) if ".indexer." in name else (network, indexer)
        assert gradient is not None and gradient.any() and torch.equal(gradient, own[name]), name
        assert other[name] is None, name


@pytest.mark.parametrize("context", [12, 40])
def test_rows_are_projected_turned_and_scored(context: int) -> None:
    """As the equations say; 12 keys of 12 positions are dense attention."""
    model = model_of(layers=1, rotary={"base": 100})
    mixer, h = model.blocks[0].attention.train(), torch.randn(2, context, model.config.width, dtype=torch.float64)
    weight = mixer.indexer.projection.weight.detach()
    q, k, weights = (h @ weight.T).split((18, 6, 3), -1)
    angles = torch.arange(context)[:, None] * 100.0 ** -(torch.arange(3, dtype=torch.float64) / 3)
    table = torch.stack([angles.cos(), angles.sin()], -1).float()[:, None]
    q, k = q.unflatten(-1, (3, 6)), k[:, :, None]
    q, k = (turn(x.contiguous(), table.double(), torch.empty_like(x.contiguous())) for x in (q, k))
    index = q, k[:, :, 0], weights / 18**0.5
    heads = mixer.heads_of(mixer.query_key_value(h), slice(context))
    numbers = choose_keys(*index, count=3, block=4, window=5)
    rows, target = indexed_attention(*heads, numbers, block=4, return_weights=True)
    output = mixer(h)
    torch.testing.assert_close(output.rows, mixer.projection(rows.transpose(1, 2).flatten(2)))
    loss = indexer_loss(*index, (heads[0], heads[1]), numbers=numbers, block=4, target=target)
    torch.testing.assert_close(output.auxiliary_loss.double(), loss, rtol=1e-6, atol=0)
    assert mixer.eval()(h).auxiliary_loss is None


def test_loss_weight_scales_the_loss_alone() -> None:
    tokens = torch.randint(256, (1, 40))
    nats, loss = losses(model_of(), tokens)
    same, third = losses(model_of({**INDEXED, "loss_weight": 0.25}), tokens)
    assert torch.equal(nats, same)
    torch.testing.assert_close(third, loss / 4)
    assert losses(model_of({**INDEXED, "loss_weight": 0}), tokens)[1] is None


def test_documents_choose_within_themselves() -> None:
    mixer, h = model_of(layers=1).blocks[0].attention.eval(), torch.randn(1, 40, 64, dtype=torch.float64)
    places = torch.cat([torch.arange(17), torch.arange(23)])[None]
    packed = mixer(h, BlockContext(places=places)).rows
    apart = torch.cat([mixer(h[:, :17]).rows, mixer(h[:, 17:]).rows], 1)
    torch.testing.assert_close(packed, apart)


def test_pairs_are_those_that_are_read() -> None:
    mixer, h = model_of(layers=1).blocks[0].attention, torch.randn(1, 39, 64, dtype=torch.float64)
    reads = mixer.reads(h, 0)(torch.arange(39))
    assert mixer.num_pairs(39) == mixer.heads * reads.sum()
    assert torch.equal(reads, reads.tril())
    weights = mixer.weights(h)(torch.arange(39), 1)
    torch.testing.assert_close(weights.sum(-1), torch.ones(39, dtype=torch.float64))
    assert not weights[~reads].any()


@pytest.mark.parametrize("changes", [{}, {"block": 1, "window": 3}, {"keys": 40}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_of_a_row_depends_on_later_tokens(changes: dict[str, int], dtype: torch.dtype) -> None:
    model, tokens = model_of({**INDEXED, **changes}, rotary={}).to(dtype).eval(), torch.randint(256, (2, 40))
    before = model(tokens)
    for position in (1, 13, 24, 39):
        after = model(torch.cat([tokens[:, :position], (tokens[:, position:] + 1) % 256], 1))
        assert torch.equal(after[:, : position + 1], before[:, : position + 1])
        assert not torch.equal(after, before) or position == 39
