"""Tokens predicted in a random order: who reads whom, against masks and sums that are written out.

Letters: B batch, N positions, R rows of the network, V vocabulary.
"""

import copy
import itertools
import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longstride.kernels import ConfigError
from longstride.kernels.selections import selection_mask
from longstride.launcher.planning import costs
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.objectives import Masked, Permuted
from tests.harness.backends import DEVICES, on
from tests.harness.configs import small

V = 200
MPNET = {"type": "permuted", "share": 0.3, "span": 2}
XLNET = {**MPNET, "span": 1, "random": 0, "unchanged": 0, "compensate": False}
both = pytest.mark.parametrize("objective", [MPNET, XLNET], ids=["MPNet", "XLNet"])
Row = tuple[str, int]  # ("token", position), or ("mask" or "query", number in the order from 0)


DENSE = {"type": "dense", "causal": False}


def network(objective: dict[str, Any] = MPNET, **changes: Any) -> SparseTransformer:
    """Return a model in fp64 in which every weight matters."""
    torch.manual_seed(0)
    options = {"context": 20, "layers": 2, "vocabulary": V, "attention": DENSE, "backend": "reference", **changes}
    model = SparseTransformer(small(objective=objective, **options)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def contexts(objective: dict[str, Any], lengths: tuple[int, ...] = (20, 20, 13, 0)) -> tuple[Tensor, dict[str, Tensor]]:
    """Return tokens (B, 20), and what else the model takes."""
    tokens, of = torch.randint(V, (len(lengths), 20), generator=torch.Generator().manual_seed(1)), torch.tensor(lengths)
    corrupted = Permuted.model_validate(objective).corrupt(tokens, of, torch.arange(len(lengths)), 3, V)
    return tokens, {**corrupted._asdict(), "real": torch.arange(20) < of[:, None]}


def rows_read(order: list[int], is_mpnet: bool) -> dict[Row, set[Row]]:
    """Return which rows each row of a context reads, by the tables of the papers.

    ``order`` has each position's number in the order of prediction from 1, or 0.
    """
    predicted = [order.index(number) for number in range(1, max(order) + 1)]  # positions in their order
    tokens: list[Row] = [("token", place) for place in predicted]
    masks: list[Row] = [("mask", number) for number in range(len(predicted) if is_mpnet else 0)]
    unpredicted: set[Row] = {("token", place) for place, number in enumerate(order) if not number}
    reads: dict[Row, set[Row]] = {row: unpredicted | set(masks) for row in (*unpredicted, *masks)}
    for t, row in enumerate(tokens):
        reads[row] = unpredicted | set(tokens[: t + 1]) | set(masks[t + 1 :])
        reads["query", t] = unpredicted | set(tokens[:t]) | set(masks[t:])
    return reads


BIAS = {"relative_bias": {"buckets": 12, "distance": 11}}
EARLIER = [0, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5]  # the buckets of earlier keys, from 3 to 11 at logarithms


def bucket(distance: int) -> int:
    """Return the bucket of a key at this distance from a query."""
    return EARLIER[min(abs(distance), 11)] + 6 * (distance > 0)


def definition(model: SparseTransformer, tokens: Tensor, inputs: Tensor, order: Tensor) -> Tensor:
    """Return the logits (m, V) of the predicted tokens of one context (N,), in their order, by dense sums."""
    is_mpnet = model.config.objective.compensate
    reads = rows_read(order.tolist(), is_mpnet)
    rows = list(reads)
    predicted = order.where(order > 0, len(order) + 1).argsort()
    places = torch.tensor([place if kind == "token" else int(predicted[place]) for kind, place in rows])
    values = torch.where(torch.tensor([kind == "token" for kind, _ in rows]), tokens[places], inputs[places])
    allowed = torch.tensor([[key in reads[row] for key in rows] for row in rows])
    embedding = model.embedding
    h = F.embedding(values, embedding.tokens.weight)
    if len(embedding.positions):
        lines, columns = embedding.positions
        h = h + lines.weight[places // 8] + columns.weight[places % 8]
    for block in model.blocks:
        normed = block.attention_norm(h)
        q, k, v = (x[0] for x in block.attention.heads_of(block.attention.query_key_value(normed)[None], places[None]))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if model.shared is not None:
            numbers = places.tolist()
            buckets = torch.tensor([[bucket(key - row) for key in numbers] for row in numbers])
            scores = scores + model.shared.biases.weight[buckets].permute(2, 0, 1)
        scores = scores.masked_fill(~allowed, -torch.inf)
        h = h + block.attention.projection((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        h = h + block.feed_forward(block.feed_forward_norm(h)).rows
    queries = [rows.index(("query", number)) for number in range(int(order.max()))]
    return model.logits(model.norm(h[queries]))


def gradients(model: SparseTransformer, nats: Tensor) -> list[Tensor]:
    model.zero_grad()
    nats.sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_masks_are_those_of_the_published_figure() -> None:
    """Song et al., figure 2: z = 1 3 5 4 6 2, of which the last three are predicted; XLNet's has no masks."""
    order = torch.tensor([[0, 3, 0, 1, 0, 2]], dtype=torch.int32)
    # Tokens 1 3 5, predicted tokens 4 6 2 and masks of 4 6 2 that each row reads, which is named alike.
    mpnet = {
        "token 1": "111 000 111", "token 3": "111 000 111", "token 5": "111 000 111",
        "mask 4": "111 000 111", "mask 6": "111 000 111", "mask 2": "111 000 111",
        "token 4": "111 100 011", "token 6": "111 110 001", "token 2": "111 111 000",
        "query 4": "111 000 111", "query 6": "111 100 011", "query 2": "111 110 001",
    }  # fmt: skip
    xlnet = {row: reads[:-4] for row, reads in mpnet.items() if not row.startswith("mask")}
    for compensate, expected in ((True, mpnet), (False, xlnet)):
        objective = Permuted(type="permuted", share=0.5, compensate=compensate, random=0, unchanged=0)
        layout = objective.layout(order, torch.full_like(order, V), order, None)
        names = [f"token {place}" for place in range(1, 7)]
        names += [f"{kind} {place}" for kind in ("mask", "query")[not compensate :] for place in (4, 6, 2)]
        layout.selection.check(len(names))
        mask = selection_mask(layout.selection, len(names))[0, 0]
        columns = [name for kind in ("token", "mask") for name in expected if name.startswith(kind)]
        assert set(names) == set(expected)
        for name, row in zip(names, mask, strict=True):
            reads = {column for column, bit in zip(columns, expected[name].replace(" ", ""), strict=True) if bit == "1"}
            assert {names[column] for column in row.nonzero().flatten()} == reads, name
        assert [place + 1 for place in layout.places[0].tolist()] == [int(name[-1]) for name in names]
        assert int(mask.sum()) == objective.num_pairs(6)


def test_spans_are_predicted_in_any_order_and_their_tokens_from_left_to_right() -> None:
    """Of 9 tokens 5 are predicted, in spans of 2, 2 and 1: each order of them is as likely as another."""
    objective, count = Permuted(type="permuted", share=0.55, span=2), 4_000
    tokens, lengths, numbers = torch.zeros(count, 9).int(), torch.full((count,), 9), torch.arange(count)
    inputs, predicted = objective.corrupt(tokens, lengths, numbers, 0, V)
    masked = Masked(type="masked", share=0.55, span=2).corrupt(tokens, lengths, numbers, 0, V)
    assert torch.equal(masked.inputs, inputs) and torch.equal(masked.predicted, predicted > 0)
    found = Counter(tuple(number for number in row if number) for row in predicted.tolist())
    expected: Counter[tuple[int, ...]] = Counter()
    for sizes, turns in itertools.product(((1, 2, 2), (2, 1, 2), (2, 2, 1)), itertools.permutations(range(3))):
        before = [sum(sizes[other] for other in turns[: turns.index(span)]) for span in range(3)]
        expected[tuple(before[span] + i for span in range(3) for i in range(1, 1 + sizes[span]))] += 1
    assert found.keys() == expected.keys()
    for order, times in expected.items():
        mean = count * times / expected.total()
        assert abs(found[order] - mean) < 5 * mean**0.5


@both
@pytest.mark.parametrize(
    "changes", [{}, {"rotary": {"base": 100}, "embedding": {"type": "tokens"}}, BIAS], ids=["", "rotary", "bias"]
)
def test_nats_and_gradients_are_those_of_the_definition(objective: dict[str, Any], changes: dict[str, Any]) -> None:
    model, (tokens, extra) = network(objective, **changes), contexts(objective)
    nats = model(tokens, return_nats=True, **extra)
    logits = model(tokens, **extra)
    expected = []
    for row, length in enumerate(extra["real"].sum(1).tolist()):  # each alone, without padding
        order = extra["predicted"][row, :length]
        at = order > 0
        assert int(at.sum()) == (model.config.objective.num_predicted(length) if length else 0)
        assert not nats[row, :length][~at].any() and not nats[row, length:].any()
        if length:
            target = definition(model, tokens[row, :length], extra["inputs"][row, :length], order)
            number = order[at].long() - 1
            torch.testing.assert_close(logits[row, :length][at], target[number], rtol=1e-9, atol=1e-11)
            expected.append(F.cross_entropy(target[number], tokens[row, :length][at], reduction="none"))
            torch.testing.assert_close(nats[row, :length][at], expected[-1], rtol=1e-9, atol=1e-11)
    wanted_of_all = gradients(model, torch.cat(expected))
    for found, wanted in zip(gradients(model, nats), wanted_of_all, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10 * float(wanted.abs().max()))


@both
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_token_changes_the_logits_of_those_predicted_after_it_alone(
    objective: dict[str, Any], layers: int, backend: str
) -> None:
    """To the bit. What stands for it in masks and queries stays: with ``unchanged`` it is the token."""
    model, (tokens, extra) = network(objective, layers=layers, backend=backend), contexts(objective, (20, 17))
    order = extra["predicted"]
    with torch.no_grad():
        before = model(tokens, **extra)
        for place in range(17):
            new_tokens, inputs = tokens.clone(), extra["inputs"].clone()
            new_tokens[:, place] = (tokens[:, place] + 1) % V
            inputs[:, place] = torch.where(order[:, place] > 0, inputs[:, place], new_tokens[:, place])
            changed = (model(new_tokens, **extra | {"inputs": inputs}) != before).any(-1)
            assert torch.equal(changed, order > order[:, place, None]), place
        padding = tokens.clone()
        padding[1, 17:] = 5
        assert torch.equal(model(padding, **extra), before)


@pytest.mark.parametrize(
    ("backend", "dtype", "bound", "objective"),
    [
        *(on("cpu", torch.float64, 1e-10, each) for each in (MPNET, XLNET)),
        on("cpu", torch.float32, 1e-4, MPNET),
        on("cpu", torch.bfloat16, 0.15, XLNET),
        on("reference", torch.bfloat16, 0.15, MPNET),
        on("triton", torch.float32, 1e-4, XLNET),
        on("triton", torch.bfloat16, 0.15, MPNET, marks=[pytest.mark.campaign]),
    ],
)
def test_every_backend_and_precision_agrees(
    backend: str, dtype: torch.dtype, bound: float, objective: dict[str, Any]
) -> None:
    assert_agree(network(objective), network(objective, backend=backend).to(DEVICES[backend], dtype), bound=bound)


@both
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_biases_agree_in_every_precision(objective: dict[str, Any], dtype: torch.dtype, bound: float) -> None:
    model = network(objective, **BIAS)
    assert_agree(model, copy.deepcopy(model).to(DEVICES["triton"], dtype), bound=bound)


def assert_agree(*models: SparseTransformer, bound: float) -> None:
    """Assert that the second model has the nats and gradients of the first."""
    tokens, extra = contexts(models[0].config.objective.model_dump(), (20, 13))
    results = []
    for model in models:
        device = model.norm.weight.device
        nats = model(tokens.to(device), return_nats=True, **{name: x.to(device) for name, x in extra.items()})
        results.append([x.double().cpu() for x in (nats.detach(), *gradients(model, nats))])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).abs().max() <= bound * wanted.abs().max()


@both
@pytest.mark.parametrize("changes", [{"dropout": 0.3, **BIAS}, {"reversible": True}], ids=["recomputed", "reversible"])
def test_recomputed_gradients_have_the_same_bits(objective: dict[str, Any], changes: dict[str, Any]) -> None:
    model, (tokens, extra) = network(objective, **changes).train(), contexts(objective)
    ways: list[Any] = [lambda block, *inputs: block(*inputs), partial(checkpoint, use_reentrant=True)]
    ways.append(None if model.config.reversible else partial(checkpoint, use_reentrant=False))
    results = []
    for way in ways:
        torch.manual_seed(2)
        model.activation_checkpoint = way
        results.append(gradients(model, model(tokens, return_nats=True, **extra)))
    assert all(torch.equal(plain, other) for plain, *others in zip(*results, strict=True) for other in others)


@both
def test_experts_count_no_rows_that_stand_for_nothing(objective: dict[str, Any]) -> None:
    changes = {"feed_forward": {"type": "experts", "count": 3, "balance": 1.0}}
    model, (tokens, extra) = network(objective, **changes).train(), contexts(objective, (13,))
    short = {name: x[:, :13] for name, x in extra.items()}
    padded, alone = (
        model(x, return_nats=True, return_extras=True, **more) for x, more in ((tokens, extra), (tokens[:, :13], short))
    )
    torch.testing.assert_close(padded.auxiliary_loss, alone.auxiliary_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(padded.rows[:, :13], alone.rows, rtol=1e-9, atol=1e-11)


def test_without_predicted_tokens_the_network_is_an_encoder_of_all_which_predicts_a_mask_alike() -> None:
    """A single predicted token has the logits that a masked model has for it."""
    objective = {**MPNET, "share": 0.05}
    model, (tokens, extra) = network(objective), contexts(objective, (20, 20))
    encoded = model(extra["inputs"])
    at = extra["predicted"] > 0
    assert at.sum(1).tolist() == [1, 1]
    torch.testing.assert_close(model(tokens, **extra)[at], encoded[at], rtol=1e-9, atol=1e-11)
    other = extra["inputs"].clone()
    other[:, 9] = (other[:, 9] + 1) % V
    assert (model(other) != encoded).any(-1).all()


@both
def test_work_counts_the_rows_and_pairs_of_both_streams(objective: dict[str, Any]) -> None:
    model = network(objective)
    config, (tokens, extra) = model.config, contexts(objective, (20,))
    layout = config.objective.layout(tokens, extra["inputs"], extra["predicted"], None)
    rows, pairs = layout.tokens.shape[1], int(selection_mask(layout.selection, layout.tokens.shape[1]).sum())
    assert rows == {MPNET["span"]: 20 + 2 * 6, XLNET["span"]: 20 + 6}[objective["span"]]
    counted = costs.work(config)
    weights = sum(x.numel() for name, x in model.named_parameters() if name.startswith("blocks") and x.dim() > 1)
    assert counted.blocks.linear == 2 * rows * weights
    assert counted.total.linear - counted.blocks.linear == 2 * 6 * model.logits.weight.numel()
    assert counted.blocks.pairs == 2 * 4 * pairs  # layers and heads
    assert counted.blocks.scores == counted.blocks.values == 2 * counted.blocks.pairs * config.width // config.heads


PACKED = 'permuted permutes whole contexts; take data.packing {"attend": "context"}'


def test_documents_and_shared_contexts_are_refused() -> None:
    config = network(MPNET).config
    with pytest.raises(ConfigError, match=f"^objective: {re.escape(PACKED)}$"):
        config.require("documents")
    with pytest.raises(ConfigError, match=r"^objective: permuted computes whole contexts, which processes"):
        config.check_division(2)
