"""MPNet's network beside transformers' own, which reads all tokens and permutes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longstride.launcher.config import load_config
from longstride.sparse_model import ModelConfig, SparseTransformer
from longstride.sparse_model.mixers.relative_bias import bucket_of
from longstride.sparse_model.network import OutputConfig
from tests.clients.conftest import assert_rounded
from tests.harness.clients import client

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # its own warnings are its own affair

FIRST = 2  # of its rows of positions: those before are for padding


def mpnet(**changes: Any) -> ModelConfig:
    """Return the preset, which has no rows of padding and no pooler, with some keys changed."""
    return load_config("mpnet_bytes").model.model_copy(update=changes)


def test_counts_are_its_own() -> None:
    """Its tables have as many rows as positions, and 2 for padding."""
    from transformers import MPNetConfig, MPNetForMaskedLM, MPNetModel

    with torch.device("meta"):
        encoder, model = MPNetModel(MPNetConfig(), add_pooling_layer=False), MPNetForMaskedLM(MPNetConfig())
    assert MPNetConfig().max_position_embeddings == 512
    counts = [sum(parameter.numel() for parameter in theirs.parameters()) for theirs in (encoder, model)]
    vocabulary = MPNetConfig().vocab_size - 1  # a row of our table stands for masks
    tied = OutputConfig(tied=True)
    assert counts[0] == SparseTransformer.num_parameters(mpnet(vocabulary=vocabulary, output=tied)) == 108_894_336
    assert counts[1] == SparseTransformer.num_parameters(mpnet(vocabulary=vocabulary)) + 1  # a mask has no bias


@client("transformers", "MPNet's encoder", "rows and gradients with copied weights, to rounding in fp64")
@pytest.mark.parametrize("length", [150, 9])
def test_rows_and_gradients_are_its_own(length: int) -> None:
    from transformers import MPNetConfig, MPNetModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 33, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 128, "max_position_embeddings": FIRST + 150, "attn_implementation": "eager"}
    theirs = MPNetModel(MPNetConfig(**sizes), add_pooling_layer=False).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (parameter.dim() == 1))
    sizes = {"context": 150, "layers": 2, "heads": 4, "width": 32, "vocabulary": 32}
    ours = SparseTransformer(mpnet(**sizes)).double().eval()
    ours.load_state_dict(dict(copied(dict(theirs.named_parameters()))), strict=False)
    nn.init.normal_(ours.logits.transform.dense.weight)  # of no use here
    tokens = torch.randint(FIRST, 33, (2, length), generator=torch.Generator().manual_seed(1))  # also masks

    output, _ = ours.residual(lambda: ours.embedding(tokens), ours.block_contexts(tokens))
    expected = theirs(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
    assert_rounded(output.rows, expected)
    slopes = torch.randn(expected.shape, dtype=torch.float64)
    for rows in (output.rows, expected):
        (rows * slopes).sum().backward()
    names = dict(ours.named_parameters())
    gradients = dict(copied({name: parameter.grad for name, parameter in theirs.named_parameters()}))
    assert names.keys() - gradients.keys() == {name for name in names if name.startswith("logits")}
    for name, gradient in gradients.items():
        assert gradient.any() and (names[name].grad - gradient).abs().max() <= 1e-11 * gradient.abs().max(), name


def test_buckets_are_its_own() -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distances = torch.arange(-1_000, 1_001)
    theirs = MPNetEncoder.relative_position_bucket(distances, num_buckets=32, max_distance=128)
    assert torch.equal(bucket_of(distances, 32, 128), theirs)


def copied(theirs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield our names with their weights or gradients."""
    yield "embedding.tokens.weight", theirs["embeddings.word_embeddings.weight"]
    yield "embedding.positions.0.weight", theirs["embeddings.position_embeddings.weight"][FIRST:]
    yield "shared.biases.weight", theirs["encoder.relative_attention_bias.weight"]
    layers = {"embedding.norm": "embeddings.LayerNorm"}
    for layer in range(2):
        here, there = f"blocks.{layer}", f"encoder.layer.{layer}"
        layers |= {
            f"{here}.attention.projection": f"{there}.attention.attn.o",
            f"{here}.attention_norm": f"{there}.attention.LayerNorm",
            f"{here}.feed_forward.expand": f"{there}.intermediate.dense",
            f"{here}.feed_forward.contract": f"{there}.output.dense",
            f"{here}.feed_forward_norm": f"{there}.output.LayerNorm",
        }
        for kind in ("weight", "bias"):
            parts = (theirs[f"{there}.attention.attn.{name}.{kind}"] for name in "qkv")
            yield f"{here}.attention.query_key_value.{kind}", torch.cat(list(parts))
    for here, there in layers.items():
        yield from ((f"{here}.{kind}", theirs[f"{there}.{kind}"]) for kind in ("weight", "bias"))
