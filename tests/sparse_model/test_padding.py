"""Padding: what stands behind the end of a short context changes nothing that is learned.

Letters: B batch, N positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longstride.data_pipelines.order import Batch, StreamState
from longstride.kernels.patterns import PATTERNS
from longstride.launcher.training.loop import Scored, score
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.feed_forwards import FEED_FORWARDS
from longstride.sparse_model.mixers import MIXERS
from tests.harness.configs import ATTENTIONS, LATER, SYSTEMS, small

LENGTHS = (40, 17, 1)
PADDING = torch.arange(40) >= torch.tensor(LENGTHS)[:, None]  # (B, N)
NGRAMS = {"orders": [2, 4], "rows": 300}
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"attention": attention} for name, attention in ATTENTIONS.items()},
    **SYSTEMS,
    "all later parts": {**LATER, "initialization": "released", "ngrams": NGRAMS},
    "n-grams, positions of pictures": {
        "embedding": {"type": "image", "height": 4, "width": 5, "channels": 2}, "ngrams": NGRAMS,
    },
    "n-grams, a position table": {"embedding": {"type": "learned"}, "ngrams": NGRAMS},
    "experts in balance": {"feed_forward": {"type": "experts", "count": 4, "balance": 3.0}},
    "experts of little room": {"feed_forward": {"type": "experts", "count": 3, "balance": 3.0, "capacity": 0.75}},
    "reversible experts and clusters": {
        "reversible": True, "attention": SYSTEMS["routing"]["attention"],
        "feed_forward": {"type": "experts", "count": 3, "top": 1, "balance": 3.0, "capacity": 0.75},
    },
}  # fmt: skip
every_model = pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)


def types_in(value: Any) -> Iterator[str]:
    """Every ``type`` in a configuration."""
    if isinstance(value, dict):
        yield from [value["type"]] if isinstance(value.get("type"), str) else []
        value = list(value.values())
    for each in value if isinstance(value, list) else []:
        yield from types_in(each)


def test_every_part_is_among_the_models() -> None:
    assert {*MIXERS, *FEED_FORWARDS, *PATTERNS} <= set(types_in(list(MODELS.values())))


def batches() -> tuple[Tensor, Tensor]:
    """The same contexts, with other bytes behind their ends."""
    tokens, other = torch.randint(200, (2, 3, 40), generator=torch.Generator().manual_seed(1))
    return tokens.where(~PADDING, 255), other.where(PADDING, tokens)


def trained_on(model: SparseTransformer, tokens: Tensor, lengths: tuple[int, ...]) -> tuple[Scored, dict[str, Tensor]]:
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
    return scored, {name: each.clone() for name, each in found.items()}


def made(changes: dict[str, Any]) -> SparseTransformer:
    """A model in fp64 and in training, whose every weight matters."""
    torch.manual_seed(0)
    model = SparseTransformer(small(**changes)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def assert_same(found: tuple[Scored, dict[str, Tensor]], wanted: tuple[Scored, dict[str, Tensor]]) -> None:
    """But for the order of sums, in fp64: 2⁻⁴⁰ of the largest number of a tensor; statistics count exactly."""
    pairs = {"nats": (found[0].nats, wanted[0].nats), "loss": (found[0].loss, wanted[0].loss)}
    for number, both in enumerate(zip(found[0].statistics, wanted[0].statistics, strict=True)):
        pairs[f"statistics {number}"] = both
        assert torch.equal(*(each[..., -1] for each in both))
    pairs |= {name: (gradient, wanted[1][name]) for name, gradient in found[1].items()}
    assert found[1].keys() == wanted[1].keys()
    for name, (one, other) in pairs.items():
        torch.testing.assert_close(one, other, rtol=0, atol=2.0**-40 * float(other.detach().abs().max()), msg=name)


@every_model
def test_padding_changes_no_gradient_and_no_buffer(changes: dict[str, Any]) -> None:
    model = made(changes)
    found, wanted = (trained_on(model, tokens, LENGTHS) for tokens in batches())
    assert_same(found, wanted)
    assert not found[1]["embedding.tokens.weight"][255].any()  # the byte of the padding alone


@every_model
def test_a_padded_context_teaches_what_it_teaches_alone(changes: dict[str, Any]) -> None:
    """Its averages, capacities and statistics are of its own rows."""
    model, (tokens, _) = made(changes), batches()
    padded, alone = (trained_on(model, rows, (17,)) for rows in (tokens[1:2], tokens[1:2, :17]))
    assert_same(padded, alone)


@pytest.mark.parametrize("changes", [MODELS["experts of little room"], MODELS["routing"]], ids=["experts", "routing"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_gradients_of_padded_contexts_are_bitwise_equal(changes: dict[str, Any], reentrant: bool) -> None:
    model, (tokens, _) = made({**changes, "dropout": 0.3}), batches()
    _, wanted = trained_on(model, tokens, LENGTHS)
    model.activation_checkpoint = partial(checkpoint, use_reentrant=reentrant)
    _, found = trained_on(model, tokens, LENGTHS)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


def test_contexts_without_padding_have_the_bits_that_they_have_without_a_mask() -> None:
    for changes in (MODELS["experts of little room"], MODELS["routing"]):
        model, (tokens, _) = made(changes), batches()
        results = []
        for real in (None, torch.ones(3, 40, dtype=torch.bool)):
            given = model(tokens, return_nats=True, return_extras=True, real=real)
            loss = given.rows.sum() if given.auxiliary_loss is None else given.rows.sum() + given.auxiliary_loss
            results.append([loss, *given.statistics, *torch.autograd.grad(loss, list(model.parameters()))])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
