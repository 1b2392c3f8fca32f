"""Parameters that all layers share: the mixtures of Linformer, and biases by distance.

Letters: B batch, H heads, N positions.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longstride.kernels import ConfigError
from longstride.launcher.models.tensors import Shapes
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers.relative_bias import BiasedAttention, RelativeBias, bucket_of
from longstride.sparse_model.network import RelativePositions
from longstride.sparse_model.part import BlockContext
from tests.harness.configs import MASKED, small

DENSE = {"type": "dense", "causal": False}
MIXTURES = {"attention": {"type": "linformer", "rows": 5, "share": "layers"}}
BIASES: dict[str, Any] = {"attention": DENSE, "relative_bias": {"buckets": 8, "distance": 20}}
each = pytest.mark.parametrize("changes", [MIXTURES, BIASES], ids=["mixtures", "biases"])
TOKENS = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))


def network(**changes: Any) -> SparseTransformer:
    """Return a masked model in fp64 in which every weight matters."""
    torch.manual_seed(0)
    model = SparseTransformer(small(**{"objective": MASKED, **changes})).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def gradients(model: SparseTransformer) -> dict[str, Tensor]:
    model.zero_grad()
    model(TOKENS, return_nats=True).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_gradients_of_mixtures_are_the_sum_over_layers_that_have_equal_ones() -> None:
    model, apart = network(**MIXTURES), network(attention={**MIXTURES["attention"], "share": "keys_and_values"})
    shared = dict(model.named_parameters())
    layers = [f"blocks.{layer}.attention.mixtures" for layer in range(3)]
    with torch.no_grad():
        for name, parameter in apart.named_parameters():
            parameter.copy_(shared["shared.mixtures" if name in layers else name])
    torch.testing.assert_close(model(TOKENS), apart(TOKENS), rtol=1e-12, atol=1e-12)
    of_layers, of_model = gradients(apart), gradients(model)
    of_layers["shared.mixtures"] = sum((of_layers.pop(name) for name in layers), torch.zeros(1).double())
    assert of_layers.keys() == of_model.keys() == shared.keys()
    for name, gradient in of_model.items():
        assert gradient.any()
        torch.testing.assert_close(gradient, of_layers[name], rtol=1e-10, atol=1e-10 * float(gradient.abs().max()))


def test_weights_in_pictures_have_the_bias() -> None:
    """The mean of the values by these weights is the output of attention."""
    model = network(**BIASES)
    mixer, context = model.mixers[0], model.block_contexts(TOKENS[:1])[0]
    h = torch.randn(1, 40, 64, dtype=torch.float64)
    with torch.no_grad():
        *_, values = mixer.heads_of(mixer.query_key_value(h))  # type: ignore[operator]
        weigh = mixer.weights(h, context)
        mixed = torch.cat([weigh(torch.arange(40), head) @ values[0, head] for head in range(4)], -1)
        expected = mixer(h, context).rows[0]
        torch.testing.assert_close(mixer.projection(mixed), expected, rtol=1e-10, atol=1e-10)  # type: ignore[operator]


@each
@pytest.mark.parametrize("reversible", [False, True])
def test_recomputed_gradients_have_the_same_bits(changes: dict[str, Any], reversible: bool) -> None:
    model = network(reversible=reversible, **changes)
    results = [gradients(model)]
    for way in (partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)):
        model.activation_checkpoint = way
        results.append(gradients(model))
    for result in results[1:]:
        assert all(torch.equal(gradient, result[name]) for name, gradient in results[0].items())


@each
def test_parameters_have_one_name_and_are_counted_once(changes: dict[str, Any]) -> None:
    model = network(**changes)
    (name,) = (name for name in model.state_dict() if name.startswith("shared."))
    assert name in dict(model.named_parameters()) and Shapes.of_model(model.config).of[name]
    numbers = SparseTransformer.num_parameters(model.config)
    assert numbers == Shapes.of_model(model.config).parameters == sum(p.numel() for p in model.parameters())
    deeper = SparseTransformer.num_parameters(small(objective=MASKED, layers=4, **changes))
    assert deeper - numbers == sum(parameter.numel() for parameter in model.blocks[0].parameters())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.get_parameter(name).add_(1)
    assert not torch.equal(copied(TOKENS), model(TOKENS))


@pytest.mark.parametrize(("buckets", "last"), [(32, 128), (12, 11), (6, 300), (4, 2)])
def test_buckets_are_those_of_the_formula(buckets: int, last: int) -> None:
    half, exact = buckets // 2, buckets // 4
    distances = range(-400, 401)
    for distance, number in zip(distances, bucket_of(torch.tensor(distances), buckets, last).tolist(), strict=True):
        size = bucket = abs(distance)
        if size >= exact:  # a logarithm that should be whole may be rounded down
            share = math.log(size / exact) / math.log(last / exact)
            bucket = min(half - 1, exact + math.floor((half - exact) * share + 1e-9))
        assert number == bucket + half * (distance > 0)


def test_layers_that_share_parameters_take_no_other_attention_in_a_stage() -> None:
    for changes, other in ((MIXTURES, DENSE), ({"attention": DENSE}, MIXTURES["attention"])):
        model = network(**changes)
        with pytest.raises(ConfigError, match=r"^attention: \w+ has other parameters than model\.attention$"):
            model.use_attention(small(objective=MASKED, attention=other))


NEEDS_DENSE = 'relative_bias: needs attention of {"type": "dense", "causal": false} in all layers, as kernels read no'


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({**BIASES, "attention": [DENSE, {"type": "local", "window": 5, "causal": False}]}, NEEDS_DENSE),
        ({**BIASES, "attention": {"type": "dense"}, "objective": {"type": "autoregressive"}}, NEEDS_DENSE),
        ({**BIASES, **MIXTURES}, NEEDS_DENSE),
        ({**BIASES, "relative_bias": {"buckets": 9}}, "relative_bias.buckets=9: must be a multiple of 2"),
        ({**BIASES, "relative_bias": {"distance": 8}}, "relative_bias.distance=8: must be above buckets // 4 = 8"),
        (
            {"attention": [MIXTURES["attention"], {**MIXTURES["attention"], "rows": 6}]},
            "attention: layers that share mixtures differ in other keys; make them equal, or take",
        ),
    ],
)
def test_layers_that_cannot_share_are_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(**{"objective": MASKED, **changes})
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_gradients_of_biases_are_summed_in_more_than_16_bits() -> None:
    """A bucket's is a sum over thousands of pairs, of which bf16 would lose most."""
    part = RelativeBias(small(**BIASES, objective=MASKED, context=400), RelativePositions(buckets=8, distance=20))
    pairs = torch.arange(400)[None]
    for dtype in (torch.float64, torch.bfloat16):
        part.zero_grad()
        biases = BiasedAttention._biases(BlockContext(shared=part.to(dtype)()), pairs, pairs)
        biases.to(dtype).sum().backward()
        counts = bucket_of(pairs - pairs.T, 8, 20).flatten().bincount(minlength=8)
        expected = counts.double()[:, None].expand(8, 4)
        torch.testing.assert_close(part.biases.weight.grad.double(), expected, rtol=2**-8, atol=0)
