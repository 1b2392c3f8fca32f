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


LOCAL = {"local": {"heads": 2, "window": 6}}


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


@pytest.mark.parametrize("key_value_heads", [4, 2])
@pytest.mark.parametrize("keys", [12, 40])
@pytest.mark.parametrize("documents", [False, True])
def test_local_heads_read_a_window_and_have_no_part_in_the_choice(
    documents: bool, keys: int, key_value_heads: int
) -> None:
    """Rows, the loss, their gradients and the measures are those of attention under masks, which are written out."""
    attention = {**INDEXED, **LOCAL, "keys": keys, "key_value_heads": key_value_heads}
    mixer = model_of(attention, layers=1).blocks[0].attention.train()
    h = torch.randn(2, 40, 64, dtype=torch.float64, requires_grad=True)
    context, position = BlockContext(), torch.arange(40)
    starts, real = position.new_zeros(2, 40), torch.ones(2, 40, dtype=torch.bool)
    if documents:
        starts, real[1, 30:] = torch.stack([position // 17 * 17, position // 30 * 30]), False
        tokens = torch.zeros(2, 40, dtype=torch.uint8)
        selection = mixer.selection_of(tokens, position - starts)
        context = BlockContext(places=position - starts, real=real, selection=selection)
    q, index_k, weights = mixer.indexer(h, slice(40))
    numbers = choose_keys(q, index_k, weights, count=keys // 4, block=4, window=5, starts=starts)
    chosen = torch.zeros(2, 40, 41, dtype=torch.bool).scatter_(2, numbers.long().where(numbers >= 0, 40), True)
    behind = position[:, None] - position
    allowed = (behind >= 0) & (position >= starts[..., None])  # (B, N, N)
    masks = torch.stack([*[allowed & (behind < 6)] * 2, *[chosen[..., :40]] * 2], 1)

    def defined() -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, loss and the share of dense attention on chosen keys (B, N)."""
        heads = mixer.heads_of(mixer.query_key_value(h))
        k, v = (x.repeat_interleave(4 // key_value_heads, 1) for x in heads[1:])
        scores = heads[0] @ k.mT / 4
        attended = scores.masked_fill(~masks, -torch.inf).softmax(-1)
        rows = mixer.projection((attended @ v).transpose(1, 2).flatten(2))
        target = attended.detach()[:, 2:].mean(1)
        products = torch.einsum("btji,bsi->btjs", q, index_k).relu()
        logs = torch.einsum("btj,btjs->bts", weights, products).masked_fill(~masks[:, 2], -torch.inf).log_softmax(-1)
        loss = (torch.xlogy(target, target) - target * logs.where(masks[:, 2], 0)).sum(-1)[real].mean()
        dense = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)[:, 2:].mean(1)
        return rows, loss, (dense * chosen[..., :40]).sum(-1)

    output = mixer(h, context)
    rows, loss, mass = defined()
    torch.testing.assert_close(output.rows[real], rows[real], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(output.auxiliary_loss.double(), loss, rtol=1e-6, atol=0)
    inputs = [h, *mixer.parameters()]
    found, expected = (
        torch.autograd.grad(each[0][real].sin().sum() + each[1], inputs) for each in (output, (rows, loss))
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    mixer.eval().measures = {}
    mixer(h, context)
    chooses = (position - starts >= keys) & real
    measured = {"indexer_mass": mass[chooses].mean().item()} if chooses.any() else {}
    assert len(mixer.measures) == 2 * len(measured)
    assert {name: mixer.measures[name] for name in measured} == pytest.approx(measured, rel=1e-5)


@pytest.mark.parametrize("changes", [{}, LOCAL], ids=str)
def test_pairs_are_those_that_are_read(changes: dict[str, Any]) -> None:
    mixer = model_of({**INDEXED, **changes}, layers=1).blocks[0].attention
    h = torch.randn(1, 39, 64, dtype=torch.float64)
    reads = [mixer.reads(h, head)(torch.arange(39)) for head in range(4)]
    assert mixer.num_pairs(39) == mixer.visited_pairs(39, h) == sum(each.sum() for each in reads)
    assert all(torch.equal(each, each.tril()) for each in reads)
    for head in (1, 2):
        weights = mixer.weights(h)(torch.arange(39), head)
        torch.testing.assert_close(weights.sum(-1), torch.ones(39, dtype=torch.float64))
        assert not weights[~reads[head]].any()


@pytest.mark.parametrize("changes", [{}, LOCAL, {**LOCAL, "key_value_heads": 2}], ids=str)
def test_caches_have_the_channels_that_are_declared(changes: dict[str, Any]) -> None:
    model = model_of({**INDEXED, **changes}, layers=1, query_key_ratio=0.5)
    state = model.new_states(2, 40, torch.device("cpu"), torch.float64)[0]
    rows = [state.keys, state.values, state.index_keys, *([state.local.keys, state.local.values] if changes else [])]
    (block,) = model.config.blocks()
    widths = block.mixer.head_widths(model.config)
    channels = (widths.kept_heads or 4) * (widths.query_key + widths.value) + widths.extra_cached
    assert sum(each.numel() for each in rows) == 2 * 40 * channels


@pytest.mark.parametrize("changes", [{}, {"block": 1, "window": 3}, {"keys": 40}, LOCAL], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_of_a_row_depends_on_later_tokens(changes: dict[str, int], dtype: torch.dtype) -> None:
    model, tokens = model_of({**INDEXED, **changes}, rotary={}).to(dtype).eval(), torch.randint(256, (2, 40))
    before = model(tokens)
    for position in (1, 13, 24, 39):
        after = model(torch.cat([tokens[:, :position], (tokens[:, position:] + 1) % 256], 1))
        assert torch.equal(after[:, : position + 1], before[:, : position + 1])
        assert not torch.equal(after, before) or position == 39
