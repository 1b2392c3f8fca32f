"""The network of BERT (Devlin et al. 2019) is a configuration: held against its formula, and transformers' own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.sparse_model import ModelConfig, SparseTransformer
from tests.clients.conftest import assert_rounded

BLOCK = 7_087_872  # parameters of a block of BERT base
CLASSIFIER: dict[str, Any] = {
    "objective": {"type": "classify", "classes": 3, "pool": "first"},
    "attention": {"type": "dense", "causal": False}, "output": None,
}  # fmt: skip


def bert(layers: int, heads: int, width: int, context: int, vocabulary: int, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "context": context, "layers": layers, "heads": heads, "width": width, "attention": {"type": "dense"},
            "embedding": {"type": "learned"}, "vocabulary": vocabulary, "norm_epsilon": 1e-12,
            "norm_position": "after", "embedding_norm": True, "feed_forward": {"activation": "gelu"},
            "output": {"tied": True, "transform": True, "bias": True}, **changes,
        }
    )  # fmt: skip


def small_bert(**changes: Any) -> SparseTransformer:
    """A network of two blocks in fp64, whose every parameter is random."""
    torch.manual_seed(0)
    model = SparseTransformer(bert(2, 4, 32, 24, 31, **changes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (parameter.dim() == 1))
    return model


TOKENS = torch.randint(31, (3, 24), generator=torch.Generator().manual_seed(1))


def test_counts_are_those_of_the_published_shapes() -> None:
    """BERT base has 109,514,298 with its masked head: two rows of token types (1,536), and no start (768).

    With a pooler in place of the head it has 109,482,240, of which we have all but the token types.
    """
    width, inner, vocabulary, positions = 768, 3072, 30_522, 512
    attention = 4 * (width**2 + width)
    feed_forward = 2 * width * inner + inner + width
    assert attention + feed_forward + 2 * 2 * width == BLOCK
    config = bert(12, 12, width, positions, vocabulary)
    ends = (vocabulary + positions + 1) * width + 2 * width  # tokens, positions, start, norm
    ends += width**2 + width + 2 * width + vocabulary  # linear layer, norm, bias of the output
    assert SparseTransformer.num_parameters(config) == 12 * BLOCK + ends == 109_513_530
    assert 109_513_530 + 1_536 - 768 == 109_514_298
    masked = {"objective": {"type": "masked"}, "attention": {"type": "dense", "causal": False}}
    masked_config = bert(12, 12, width, positions, vocabulary - 1, **masked)  # a row of the table stands for masks
    assert SparseTransformer.num_parameters(masked_config) == 109_514_298 - 1_536 - 1  # and has no bias of the output
    classifier = bert(12, 12, width, positions, vocabulary, **CLASSIFIER)
    classes = CLASSIFIER["objective"]["classes"] * (width + 1)
    pooled = SparseTransformer.num_parameters(classifier) - classes
    assert pooled == 12 * BLOCK + (vocabulary + positions + 2) * width + (width**2 + width) == 109_482_240 - 1_536
    untied = config.model_copy(update={"output": config.output.model_copy(update={"tied": False})})
    assert SparseTransformer.num_parameters(untied) == 109_513_530 + vocabulary * width


def logits_by_formula(values: dict[str, Tensor], tokens: Tensor, config: ModelConfig) -> Tensor:
    """Compute logits (B, N, V) from tensors by name, with products and a mask."""

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ values[f"{name}.weight"].T + values[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        return x * values[f"{name}.weight"] + values[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return x * (1 + torch.erf(x / 2**0.5)) / 2

    batch, length = tokens.shape
    table = values["embedding.tokens.weight"]
    start = values["embedding.start"].expand(batch, 1, -1)
    h = norm(
        torch.cat([start, table[tokens[:, :-1]]], 1) + values["embedding.positions.0.weight"][:length], "embedding.norm"
    )
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    for block in (f"blocks.{number}" for number in range(config.layers)):
        rows = linear(h, f"{block}.attention.query_key_value").view(batch, length, 3, config.heads, -1)
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        h = norm(h + linear(mixed, f"{block}.attention.projection"), f"{block}.attention_norm")
        inner = gelu(linear(h, f"{block}.feed_forward.expand"))
        h = norm(h + linear(inner, f"{block}.feed_forward.contract"), f"{block}.feed_forward_norm")
    h = norm(gelu(linear(h, "logits.transform.dense")), "logits.transform.norm")
    return h @ values.get("logits.weight", table).T + values["logits.bias"]


@pytest.mark.parametrize("tied", [True, False])
def test_logits_nats_and_gradients_are_those_of_the_formula(tied: bool) -> None:
    model = small_bert(output={"tied": tied, "transform": True, "bias": True})
    values = dict(model.named_parameters())
    assert ("logits.weight" in values) != tied
    expected = logits_by_formula(values, TOKENS, model.config)
    assert_rounded(model(TOKENS), expected)
    nats = F.cross_entropy(expected.flatten(0, 1), TOKENS.flatten(), reduction="none").view(TOKENS.shape)
    scored = model(TOKENS, return_nats=True)
    assert_rounded(scored, nats)
    weights = torch.rand(TOKENS.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    pairs = [torch.autograd.grad((rows * weights).sum(), list(values.values())) for rows in (scored, nats)]
    for name, *gradients in zip(values, *pairs, strict=True):
        assert gradients[0].any(), name
        assert_rounded(*gradients)


def test_the_transform_alone_reads_the_rows_of_the_blocks() -> None:
    """Without it, and without a bias, tied logits are products of rows and table."""
    model = small_bert(output={"tied": True})
    output, _ = model.residual(lambda: model.embedding(TOKENS), model.block_contexts(TOKENS))
    assert_rounded(model(TOKENS), output.rows @ model.embedding.tokens.weight.T)
    assert "logits" not in "".join(dict(model.named_parameters()))


@pytest.mark.clients
@pytest.mark.filterwarnings("default")  # its own warnings are its own affair
class TestAgainstTransformers:
    """Imports transformers, which is large: `make clients` installs it."""

    def test_counts_are_its_own(self) -> None:
        from transformers import BertConfig, BertForMaskedLM

        with torch.device("meta"):
            theirs = BertForMaskedLM(BertConfig())
        assert sum(parameter.numel() for parameter in theirs.parameters()) == 109_514_298
        blocks = theirs.bert.encoder.parameters()
        assert sum(parameter.numel() for parameter in blocks) == 12 * BLOCK == 85_054_464

    def test_rows_logits_and_gradients_of_masked_tokens_are_its_own(self) -> None:
        theirs = small_of_transformers("BertForMaskedLM", 32)
        with torch.no_grad():
            theirs.cls.predictions.bias[-1] = -torch.inf  # a mask is no token, so we have no logit of it
        ours = small_bert(objective={"type": "masked", "share": 0.4}, attention={"type": "dense", "causal": False})
        ours.load_state_dict(dict(copied({name: p.detach() for name, p in theirs.named_parameters()}, types=True)))
        numbers, lengths = torch.arange(3), torch.tensor([24, 24, 24])
        corrupted = ours.config.objective.corrupt(TOKENS, lengths, numbers, 0, 31)
        assert corrupted is not None and (corrupted.inputs == 31).any()

        inputs, predicted = corrupted.inputs.long(), corrupted.predicted
        output, _ = ours.residual(lambda: ours.embedding(inputs), ours.block_contexts(inputs))
        assert_rounded(output.rows, theirs.bert(inputs).last_hidden_state)
        logits = theirs(inputs).logits
        assert_rounded(ours(inputs), logits[..., :31])
        F.cross_entropy(logits[predicted], TOKENS[predicted]).backward()
        (ours(TOKENS, return_nats=True, **corrupted._asdict()).sum() / predicted.sum()).backward()
        assert_gradients(ours, theirs)

    def test_pooler_logits_and_gradients_of_classes_are_its_own(self) -> None:
        theirs = small_of_transformers("BertForSequenceClassification", 31)
        ours = small_bert(**CLASSIFIER)
        ours.load_state_dict(dict(copied({name: p.detach() for name, p in theirs.named_parameters()}, types=True)))
        labels, lengths = torch.tensor([2, 0, 1]), torch.tensor([24, 1, 11])
        real = torch.arange(24) < lengths[:, None]
        output = theirs(TOKENS, attention_mask=real.long(), labels=labels)
        assert_rounded(ours(TOKENS, real=real)[:, 0], output.logits)
        output.loss.backward()
        (ours(TOKENS, real=real, return_nats=True, labels=labels[:, None]).sum() / 3).backward()
        assert_gradients(ours, theirs)


def small_of_transformers(name: str, vocabulary: int) -> Any:
    """Make their model of the shape of ``small_bert``, whose every parameter is random."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=24, attn_implementation="eager", num_labels=3,
        pad_token_id=None,  # no gradient of a table has its row
    )  # fmt: skip
    theirs = getattr(transformers, name)(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (parameter.dim() == 1))
    return theirs


def assert_gradients(ours: SparseTransformer, theirs: Any) -> None:
    """Assert that all our gradients, of which none is 0, are theirs."""
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    expected = dict(copied(gradients, types=False))
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and parameter.grad.any()
        assert_rounded(parameter.grad, expected.pop(name))
    assert not expected


def copied(theirs: dict[str, Tensor], types: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield our names with their weights or gradients; ``types`` adds their row of token types to the positions."""
    yield "embedding.tokens.weight", theirs["bert.embeddings.word_embeddings.weight"]
    positions = theirs["bert.embeddings.position_embeddings.weight"]
    first_type = theirs["bert.embeddings.token_type_embeddings.weight"][0]
    yield "embedding.positions.0.weight", positions + first_type if types else positions
    layers = {"embedding.norm": "bert.embeddings.LayerNorm"}
    if "classifier.weight" in theirs:
        layers |= {"logits": "classifier", "logits.pooler": "bert.pooler.dense"}
    else:
        yield "logits.bias", theirs["cls.predictions.bias"][:-1]
        transform = "cls.predictions.transform"
        layers |= {"logits.transform.dense": f"{transform}.dense", "logits.transform.norm": f"{transform}.LayerNorm"}
    for layer in range(2):
        here, there = f"blocks.{layer}", f"bert.encoder.layer.{layer}"
        layers |= {
            f"{here}.attention.projection": f"{there}.attention.output.dense",
            f"{here}.attention_norm": f"{there}.attention.output.LayerNorm",
            f"{here}.feed_forward.expand": f"{there}.intermediate.dense",
            f"{here}.feed_forward.contract": f"{there}.output.dense",
            f"{here}.feed_forward_norm": f"{there}.output.LayerNorm",
        }
        for kind in ("weight", "bias"):
            parts = (theirs[f"{there}.attention.self.{name}.{kind}"] for name in ("query", "key", "value"))
            yield f"{here}.attention.query_key_value.{kind}", torch.cat(list(parts))
    for here, there in layers.items():
        yield from ((f"{here}.{kind}", theirs[f"{there}.{kind}"]) for kind in ("weight", "bias"))
