"""Image GPT (Chen et al. 2020) is a configuration: held against transformers' own with the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from longstride.sparse_model import ModelConfig, SparseTransformer
from longstride.sparse_model.norm import norm_of
from tests.harness.stochastic import assert_rounding_explains

# layers, heads, width, and the parameters that follow; the paper tells 76 M, 455 M and 1362 M.
SIZES = {
    "small": (24, 8, 512, 76_682_240),
    "medium": (36, 8, 1024, 455_489_536),
    "large": (48, 16, 1536, 1_362_914_304),
}


def image_gpt(layers: int, heads: int, width: int, context: int = 1024, colours: int = 512) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "context": context, "layers": layers, "heads": heads, "width": width, "attention": {"type": "dense"},
            "embedding": {"type": "learned"}, "vocabulary": colours, "norm": "rms", "norm_epsilon": 1e-5,
        }
    )  # fmt: skip


def test_counts_are_those_of_the_published_shapes() -> None:
    for layers, heads, width, parameters in SIZES.values():
        block = 12 * width**2 + 11 * width  # two norms without biases, four linear layers with them
        ends = (512 + 1 + 1024 + 1 + 512) * width  # tokens, start, positions, last norm, logits
        assert SparseTransformer.num_parameters(image_gpt(layers, heads, width)) == layers * block + ends == parameters


def test_learned_positions_are_a_row_each() -> None:
    model = SparseTransformer(image_gpt(1, 1, 8, context=6, colours=5)).double().eval()
    tokens = torch.tensor([[4, 0, 3, 1, 2, 2]])
    rows = model.embedding(tokens)
    known = torch.cat([model.embedding.start[None], model.embedding.tokens.weight[tokens[0, :-1]]])
    assert torch.equal(rows[0], known + model.embedding.positions[0].weight)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_epsilon_of_norms_is_the_configurations(kind: str) -> None:
    content = image_gpt(1, 1, 8, context=6, colours=5).model_dump(mode="json") | {"norm": kind, "norm_epsilon": 0.5}
    norm = norm_of(ModelConfig.model_validate(content)).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.5).sqrt()
    for rows in (slice(None), slice(0, 1)):  # a context, and a row of generation
        torch.testing.assert_close(norm(x[:, rows]), expected[:, rows], rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (norm(x), expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.clients
@pytest.mark.filterwarnings("default")  # its own warnings are its own affair
class TestAgainstTransformers:
    """Imports transformers, which is large: `make clients` installs it."""

    def test_counts_are_its_own(self) -> None:
        from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

        for layers, heads, width, parameters in SIZES.values():
            with torch.device("meta"):
                config = ImageGPTConfig(n_embd=width, n_layer=layers, n_head=heads)
                theirs = ImageGPTForCausalImageModeling(config)
            assert sum(each.numel() for each in theirs.parameters()) == parameters

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_logits_are_its_own_but_for_rounding(self, dtype: torch.dtype) -> None:
        theirs, ours = self.pair(dtype)
        exact, _ = self.pair(torch.float64)
        tokens = torch.randint(31, (3, 36), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            found = ours(tokens)
            # They take the start as a token, and no last one: as our rows do, its logits are of the next.
            begun = torch.cat([torch.full((3, 1), 31), tokens[:, :-1]], 1)
        assert found.double().std() > 0.1
        names, parameters = zip(*theirs.named_parameters(), strict=True)

        def logits(*parameters: Tensor) -> list[Tensor]:
            return [functional_call(exact, dict(zip(names, parameters, strict=True)), (begun,)).logits.detach()]

        assert_rounding_explains([found], logits, parameters)

    def pair(self, dtype: torch.dtype) -> tuple[Any, SparseTransformer]:
        """Both networks, small, with the same random weights in evaluation mode."""
        from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

        torch.manual_seed(0)
        config = ImageGPTConfig(
            vocab_size=32, n_positions=36, n_embd=32, n_layer=3, n_head=4, attn_implementation="eager"
        )
        theirs = ImageGPTForCausalImageModeling(config).eval()
        ours = SparseTransformer(image_gpt(3, 4, 32, context=36, colours=31)).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():  # all of them: norms and biases are ones and zeros else
                parameter.copy_(0.3 * torch.randn(parameter.shape) + (parameter.dim() == 1))
            copied = dict(self.copied(theirs.state_dict(), layers=3))
            ours.load_state_dict(copied)
        return theirs.to(dtype), ours.to(dtype)

    def copied(self, theirs: dict[str, Tensor], layers: int) -> Any:
        """Our names and tensors: their linear layers hold the transposed matrix."""
        tokens = theirs["transformer.wte.weight"]
        yield from (("embedding.tokens.weight", tokens[:-1]), ("embedding.start", tokens[-1]))
        yield "embedding.positions.0.weight", theirs["transformer.wpe.weight"]
        for layer in range(layers):
            here, there = f"blocks.{layer}", f"transformer.h.{layer}"
            yield f"{here}.attention_norm.weight", theirs[f"{there}.ln_1.weight"]
            yield f"{here}.feed_forward_norm.weight", theirs[f"{there}.ln_2.weight"]
            linears = {
                "attention.query_key_value": "attn.c_attn", "attention.projection": "attn.c_proj",
                "feed_forward.expand": "mlp.c_fc", "feed_forward.contract": "mlp.c_proj",
            }  # fmt: skip
            for own, other in linears.items():
                yield f"{here}.{own}.weight", theirs[f"{there}.{other}.weight"].t()
                yield f"{here}.{own}.bias", theirs[f"{there}.{other}.bias"]
        yield "norm.weight", theirs["transformer.ln_f.weight"]
        yield "logits.weight", theirs["lm_head.weight"]
