"""Options of attention by which a query can give less than a mean of its keys' values."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.sparse_model import SparseTransformer
from tests.harness.configs import small

CONTEXT, HEADS, WIDTH = 24, 4, 32


def attention_of(**changes: Any) -> Any:
    """Return an attention over windows in fp64 in which every parameter has an effect."""
    sizes: dict[str, Any] = {"context": CONTEXT, "heads": HEADS, "width": WIDTH, "layers": 1}
    torch.manual_seed(0)
    (mixer,) = SparseTransformer(small(attention={"type": "local", "window": 5}, **sizes, **changes)).double().mixers
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


def scores_of(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores (B, H, N, N) of a window, -inf for keys outside, and the values (B, H, N, D)."""
    parts = mixer.query_key_value(x).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    scores = (q @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill((distance < 0) | (distance >= 5), -torch.inf)
    return scores, v


def assert_equal_results(actual: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    """Compare two ways to compute rows, and all their gradients."""
    slopes = torch.randn_like(expected)
    results = [[rows, *torch.autograd.grad((rows * slopes).sum(), tensors)] for rows in (actual, expected)]
    for result, reference in zip(*results, strict=True):
        largest = float(reference.detach().abs().max())
        assert largest > 0
        torch.testing.assert_close(result, reference, rtol=0, atol=1e-12 * largest)


@pytest.mark.parametrize("length", [1, 7, CONTEXT])
def test_gates_multiply_what_heads_give(length: int) -> None:
    """Rows are W_o (concat(head) · sigmoid(W_g x)), as Qiu et al. 2025 place the gate."""
    mixer = attention_of(output_gate=True)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    scores, values = scores_of(mixer, x)
    joined = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
    gate = torch.sigmoid(x @ mixer.output_gate.weight.T + mixer.output_gate.bias)
    expected = (joined * gate) @ mixer.projection.weight.T + mixer.projection.bias
    tensors = [
        x,
        mixer.output_gate.weight,
        mixer.output_gate.bias,
        mixer.projection.weight,
        mixer.query_key_value.weight,
    ]
    assert_equal_results(mixer(x).rows, expected, tensors)


@pytest.mark.parametrize("length", [1, 7, CONTEXT])
def test_sinks_are_logits_without_values(length: int) -> None:
    mixer = attention_of(sinks=True)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    scores, values = scores_of(mixer, x)
    sinks = mixer.sinks[:, None, None].expand(2, -1, length, 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    expected = mixer.projection((weights @ values).transpose(1, 2).flatten(2))
    tensors = [x, mixer.sinks, mixer.projection.weight, mixer.query_key_value.weight]
    assert_equal_results(mixer(x).rows, expected, tensors)
    for head in range(HEADS):  # what `show attention` draws
        shown = mixer.weights(x[:1].detach())(torch.arange(length), head)
        torch.testing.assert_close(shown, weights[0, head], rtol=1e-12, atol=1e-12)


def test_sinks_begin_at_zero_and_have_a_number_for_each_head() -> None:
    plain, sunk = (SparseTransformer(small(sinks=sinks)) for sinks in (False, True))
    values = sunk.state_dict()
    added = {name: values[name] for name in values if name not in plain.state_dict()}
    assert set(added) == {f"blocks.{block}.attention.sinks" for block in range(3)}
    assert all(value.shape == (4,) and not value.any() for value in added.values())
    assert "sinks" not in plain.config.model_dump(mode="json")


def test_models_without_gates_have_the_names_values_and_json_that_they_had() -> None:
    plain, gated = (small(output_gate=gate) for gate in (False, True))
    assert "output_gate" not in plain.model_dump(mode="json") and gated.model_dump(mode="json")["output_gate"] is True
    names = [set(SparseTransformer(config).state_dict()) for config in (plain, gated)]
    added = {f"blocks.{block}.attention.output_gate.{kind}" for block in range(3) for kind in ("weight", "bias")}
    assert names[1] - names[0] == added and names[0] < names[1]
    counts = [SparseTransformer.num_parameters(config) for config in (plain, gated)]
    assert counts[1] - counts[0] == 3 * (64 * 64 + 64)
