"""The network: its published sizes, what each output may depend on, and its gradients."""

import math
from typing import Any

import pytest
import torch

from longstride.sparse_model import SparseTransformer
from tests.harness.configs import ATTENTIONS, LATER, SYSTEMS, small, types_in

CIFAR10 = {
    "context": 3072, "layers": 128, "heads": 2, "width": 256, "feed_forward_ratio": 2, "query_key_ratio": 0.5,
    "attention": [{"type": "column", "stride": 96}, *[{"type": "local", "window": 96}] * 3],
    "embedding": {"type": "image", "height": 32, "width": 32},
}  # fmt: skip
ENWIK8 = {
    "context": 12288, "layers": 30, "heads": 8, "width": 512,
    "attention": {"type": "fixed", "stride": 128, "summary": 32}, "embedding": {"type": "text", "row_width": 128},
}  # fmt: skip
IMAGENET64 = {
    "context": 12288, "layers": 48, "heads": 16, "width": 512,
    "attention": {"type": "strided", "stride": 128}, "embedding": {"type": "image", "height": 64, "width": 64},
}  # fmt: skip


def awake(**changes: Any) -> SparseTransformer:
    """A small model whose every parameter, the output logits' too, is random."""
    torch.manual_seed(0)
    model = SparseTransformer(small(**changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("config, parameters", [(CIFAR10, 59196928), (ENWIK8, 94949888), (IMAGENET64, 151645184)])
def test_the_published_models_have_exactly_their_parameters(config: dict[str, Any], parameters: int) -> None:
    assert SparseTransformer.num_parameters(small(**config)) == parameters


TEXT = {"embedding": {"type": "text", "row_width": 8}}
PICTURE = {"context": 48, "embedding": {"type": "image", "height": 4, "width": 4}}
SOUND = {"context": 64, "attention": {"type": "strided", "stride": 8, "combine": "interleaved"}, **TEXT}


@pytest.mark.parametrize("config", [TEXT, PICTURE, SOUND], ids=["text", "picture", "sound"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_loss_before_the_first_step_is_eight_bits_a_byte(config: dict[str, Any], dtype: torch.dtype) -> None:
    """Logits of zeros cost log 256 nats, to a unit in the last place, by which a logarithm in fp32 may be off."""
    model = SparseTransformer(small(dropout=0.1, **config)).to(dtype)
    tokens = torch.randint(256, (2, model.config.context))
    nats = model(tokens, return_nats=True)
    assert nats.shape == tokens.shape and nats.dtype == torch.float32
    torch.testing.assert_close(nats, torch.full_like(nats, math.log(256)), rtol=2**-23, atol=0)
    bits = nats.double().mean().item() / math.log(2)
    assert f"{bits:.4f}" == "8.0000"


@pytest.mark.parametrize("kind, nearest", [("column", 1), ("strided", 2)])  # the window has the token one stride back
def test_one_layer_reads_the_token_whole_strides_before_the_predicted_one_if_aligned_to_it(
    kind: str, nearest: int
) -> None:
    tokens = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(1))
    for align, behind in (("row", 1), ("target", 0)):
        model = awake(layers=1, attention={"type": kind, "stride": 8, "align": align})
        for changed in range(16):
            other = tokens.clone()
            other[0, changed] = (other[0, changed] + 1) % 256
            differs = (model(tokens) != model(other)).any(-1).squeeze(0)
            far = differs[changed + 8 * nearest :].nonzero().flatten()  # these far predictions change
            assert torch.equal(far, torch.arange(behind, len(differs) - changed - 8 * nearest, 8)), (align, changed)


BACKENDS = {name: ({"attention": attention}, ("cpu", "reference")) for name, attention in ATTENTIONS.items()}
BACKENDS |= {"later parts": (LATER, ("cpu", "reference"))}
BACKENDS |= {  # other backends multiply rows of a selection together, as experts do
    name: (changes, ("reference",)) for name, changes in SYSTEMS.items() if "experts" not in types_in(changes)
}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_changed_byte_changes_no_earlier_logit(name: str) -> None:
    """Not by a bit; the next logits change."""
    changes, backends = BACKENDS[name]
    tokens = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(1)) % changes.get("vocabulary", 256)
    for backend in backends:
        model = awake(backend=backend, **changes)
        before = model(tokens)
        for changed in (0, 7, 8, 23, 38):
            other = tokens.clone()
            other[0, changed] = (other[0, changed] + 1) % min(256, model.config.vocabulary)
            after = model(other)
            assert torch.equal(before[:, : changed + 1], after[:, : changed + 1])
            assert not torch.equal(before[:, changed + 1], after[:, changed + 1])


def test_a_block_is_the_papers_equation() -> None:
    block = awake(backend="reference").double().blocks[0]
    h = torch.randn(2, 40, 64, dtype=torch.float64)
    norm = torch.nn.functional.layer_norm
    first, second = block.attention_norm, block.feed_forward_norm
    a = block.attention(norm(h, (64,), first.weight, first.bias)).rows
    x = block.feed_forward.expand(norm(h + a, (64,), second.weight, second.bias))
    b = block.feed_forward.contract(x / (1 + torch.exp(-1.702 * x)))
    torch.testing.assert_close(block(h).rows, h + a + b)


def test_dropout_acts_in_training_alone() -> None:
    model = awake(dropout=0.5)
    tokens = torch.randint(256, (1, 40))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("shape", [(40,), (1, 0), (1, 41)])
def test_unfit_tokens_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be \(B, N\) with N from 1 to 40"):
        SparseTransformer(small())(torch.zeros(shape, dtype=torch.int64))


def test_embedded_tokens_stand_in_for_tokens() -> None:
    embedding = SparseTransformer(small()).embedding
    tokens = torch.randint(256, (2, 20))
    embedded = embedding.tokens(tokens[:, :-1])
    assert torch.equal(embedding(torch.zeros_like(tokens), embedded=embedded), embedding(tokens))
