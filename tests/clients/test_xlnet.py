"""The permuted objective beside transformers' XLNet: the same rows read the same rows.

Its positions are relative and its norms stand behind its layers. So attention is compared layer by layer, without
positions, and networks by what they read. Letters: B contexts, N positions, b predicted tokens.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.objectives import Layout
from tests.harness.clients import client
from tests.harness.configs import small
from tests.sparse_model.test_permuted import DENSE, XLNET

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # its own warnings are its own affair

N, V = 14, 64


def theirs() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": V, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "dropout": 0.0, "mem_len": None}
    model = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**sizes)).double().eval()
    positions = model.transformer.relative_positional_encoding  # which are in fp32
    model.transformer.relative_positional_encoding = lambda *args, **options: positions(*args, **options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def ours() -> SparseTransformer:
    changes = {"embedding": {"type": "tokens"}, "attention": DENSE, "bias": False, "backend": "reference"}
    model = SparseTransformer(small(context=N, layers=2, width=32, vocabulary=V, objective=XLNET, **changes)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def drawn(model: SparseTransformer) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], Layout]:
    """Return tokens (3, N), what our model takes besides, what theirs takes besides, and the rows of ours."""
    objective, tokens = model.config.objective, torch.randint(V, (3, N), generator=torch.Generator().manual_seed(1))
    corrupted = objective.corrupt(tokens, torch.full((3,), N), torch.arange(3), 5, V)
    layout, order = objective.layout(tokens, *corrupted, None), corrupted.predicted
    assert layout is not None
    unread = (order[:, None, :] > 0) & (order[:, :, None] <= order[:, None, :])  # query i does not read token j
    masks = {"perm_mask": unread.double(), "target_mapping": F.one_hot(layout.targets, N).double()}
    return tokens, corrupted._asdict(), masks, layout


@client("transformers", "XLNet's two streams", "attention of each layer with copied weights, to rounding in fp64")
def test_both_streams_of_each_layer_are_those_of_xlnet() -> None:
    xlnet, model = theirs(), ours()
    tokens, _, masks, layout = drawn(model)
    passes: list[tuple[Any, Any]] = []
    for layer in xlnet.transformer.layer:
        attention = layer.rel_attn
        for positions in (attention.r, attention.r_w_bias, attention.r_r_bias):
            positions.data.zero_()
        attention.layer_norm = nn.Identity()
        attention.register_forward_hook(lambda _, inputs, outputs: passes.append((inputs[:2], outputs[:2])))
    with torch.no_grad():
        xlnet(tokens, **masks)
        assert len(passes) == 2
        for layer, block, context, (before, after) in zip(
            xlnet.transformer.layer, model.blocks, model.layout_contexts(layout), passes, strict=True
        ):
            weights = [getattr(layer.rel_attn, name).flatten(1) for name in "qkv"]
            block.attention.query_key_value.weight.copy_(torch.cat(weights, 1).T)
            block.attention.projection.weight.copy_(layer.rel_attn.o.flatten(1))
            h, expected = (torch.cat(streams).transpose(0, 1) for streams in (before, after))
            torch.testing.assert_close(h + block.attention(h, context).rows, expected, rtol=1e-10, atol=1e-10)


@client("transformers", "XLNet's permutations", "a changed token changes the same predictions, and no others by a bit")
def test_a_token_changes_the_predictions_that_it_changes_in_xlnet() -> None:
    xlnet, model = theirs(), ours()
    tokens, extra, masks, layout = drawn(model)
    rows = torch.arange(3)[:, None]
    with torch.no_grad():
        before = xlnet(tokens, **masks).logits, model(tokens, **extra)[rows, layout.targets]
        counts = []
        for place in range(N):
            others = tokens.clone()
            others[:, place] = (others[:, place] + 1) % V
            inputs = torch.where(extra["predicted"] > 0, extra["inputs"], others)
            after = xlnet(others, **masks).logits, model(others, **extra | {"inputs": inputs})[rows, layout.targets]
            changed = [(new != old).any(-1) for new, old in zip(after, before, strict=True)]
            assert torch.equal(*changed), place
            counts.append(int(changed[0].sum()))
        assert {0, 3 * layout.targets.shape[1]} & set(counts) and len(set(counts)) > 2
