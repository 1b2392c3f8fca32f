"""Classes of documents: the head against its definition, context by context, and what each pool reads.

Letters: B contexts, N positions, C width, K classes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.sparse_model import ModelConfig, SparseTransformer
from tests.clients.conftest import assert_rounded

K, LENGTHS = 5, (24, 9, 1)
TOKENS = torch.randint(31, (3, 24), generator=torch.Generator().manual_seed(1))
REAL = torch.arange(24) < torch.tensor(LENGTHS)[:, None]
LABELS = torch.tensor([[4], [0], [2]])
EARLIER = {"attention": {"type": "local", "window": 6}, "convolution": 3}
BOTH_SIDES = {"attention": {"type": "local", "window": 4, "causal": False}}


def config(parts: dict[str, Any], **objective: Any) -> ModelConfig:
    classify = {"type": "classify", "classes": K, "causal": parts is EARLIER, **objective}
    content = {"context": 24, "layers": 2, "heads": 2, "width": 16, "embedding": {"type": "learned"}, "vocabulary": 31}
    return ModelConfig.model_validate({**content, **parts, "objective": classify})


def network(parts: dict[str, Any], **objective: Any) -> SparseTransformer:
    """A classifier in fp64, whose every parameter is random."""
    torch.manual_seed(0)
    model = SparseTransformer(config(parts, **objective)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (parameter.dim() == 1))
    return model


def logits_by_definition(model: SparseTransformer, tokens: Tensor) -> Tensor:
    """Compute the logits (K,) of a context (n,) alone, number by number after its rows."""
    output, _ = model.residual(lambda: model.embedding(tokens[None]), model.block_contexts(tokens[None]))
    rows, values = model.norm(output.rows)[0], dict(model.named_parameters())
    is_first = getattr(model.config.objective, "pool", None) == "first"
    summary = rows[0] if is_first else torch.stack(list(rows)).sum(0) / len(tokens)
    if "logits.pooler.weight" in values:
        summary = (values["logits.pooler.weight"] @ summary + values["logits.pooler.bias"]).tanh()
    return torch.stack([(values["logits.weight"][k] * summary).sum() + values["logits.bias"][k] for k in range(K)])


@pytest.mark.parametrize(
    ("parts", "objective"),
    [(BOTH_SIDES, {}), (BOTH_SIDES, {"pool": "first"}), (BOTH_SIDES, {"pooler": False}), (EARLIER, {})],
    ids=["mean", "first", "no pooler", "causal"],
)
def test_logits_nats_and_gradients_are_those_of_the_definition(parts: dict[str, Any], objective: Any) -> None:
    """Padding changes nothing."""
    model = network(parts, **objective)
    expected = torch.stack([logits_by_definition(model, row[:n]) for row, n in zip(TOKENS, LENGTHS, strict=True)])
    padded = TOKENS.masked_fill(~REAL, 30)
    assert_rounded(model(padded, real=REAL)[:, 0], expected)
    assert_rounded(model(TOKENS[:1])[0, 0], expected[0])  # without padding
    nats = -expected.log_softmax(1).gather(1, LABELS)
    scored = model(padded, real=REAL, return_nats=True, labels=LABELS)
    assert scored.shape == (3, 1)
    assert_rounded(scored, nats)
    weights, parameters = torch.tensor([[0.5], [2.0], [1.0]]), dict(model.named_parameters())
    pairs = [torch.autograd.grad((x * weights).sum(), list(parameters.values())) for x in (scored, nats)]
    for name, *gradients in zip(parameters, *pairs, strict=True):
        assert gradients[0].any(), name
        assert_rounded(*gradients)
    without = model(padded, real=REAL, return_nats=True, labels=LABELS.masked_fill(LABELS == 0, -1))
    assert without[1] == 0 and torch.equal(without[::2], scored[::2])
    assert_rounded(model(padded, real=REAL, return_nats=True)[:, 0], -expected.log_softmax(1).sum(1) / K)


def test_every_token_counts_but_the_last_of_a_causal_model() -> None:
    """Row i of a causal model holds token i - 1."""
    for parts, reads in ((BOTH_SIDES, 24), (EARLIER, 23)):
        model = network(parts)
        logits = model(TOKENS[:1])
        for place in range(24):
            changed = TOKENS[:1].clone()
            changed[0, place] = (changed[0, place] + 1) % 31
            assert torch.equal(model(changed), logits) == (place >= reads), place


def test_all_classes_are_equally_likely_at_first() -> None:
    model = SparseTransformer(config(BOTH_SIDES))
    assert torch.equal(model(TOKENS), torch.zeros(3, 1, K))
    roles = model.parameter_roles()
    assert roles["logits.weight"].part == "output" and roles["logits.pooler.weight"].part == "matrices"
    work = model.logits.work(1, 4)
    assert work.forward == 2 * (16 * 16 + 16 * K) and work.backward == 2 * work.forward


@pytest.mark.parametrize(
    ("parts", "objective", "line"),
    [
        (EARLIER, {"pool": "first"}, 'objective.pool="first": reads no other rows, as causal is true; take mean'),
        (EARLIER, {"causal": False}, "attention: local reads no later positions, and objective classify needs both"),
        (BOTH_SIDES, {"causal": True}, "attention: local reads later positions, which objective classify does not re"),
        (BOTH_SIDES, {"classes": 1}, "objective.classes=1: "),
        ({**BOTH_SIDES, "output": {"tied": True}}, {}, "output: describes logits of tokens, and objective classify"),
    ],
)
def test_what_contradicts_the_objective_is_refused(parts: dict[str, Any], objective: Any, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(parts, **objective)
    assert str(error.value).startswith(line), error.value


def test_nothing_of_tokens_is_asked_of_a_classifier() -> None:
    model = config(EARLIER)
    for check in (model.require_next_token, model.require_tokens):
        with pytest.raises(ConfigError, match=r'^model\.objective\.type="classify": predicts '):
            check()
    with pytest.raises(ConfigError, match=r"^objective: classify computes whole contexts, which processes cannot sh"):
        model.check_division(2)
