"""Linformer's attention beside the package `linformer`, with copied weights.

Its ``share_kv`` is left out: it takes keys for values (V = K), while the paper shares the projections alone (E = P).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers.linformer import MixtureAttention
from tests.clients.conftest import assert_rounded
from tests.harness.clients import client
from tests.harness.configs import small

N, R, HEADS, WIDTH = 24, 5, 4, 32
D = WIDTH // HEADS


@client("linformer", "its layers with copied weights", "outputs and gradients, to rounding in fp64; not `share_kv`")
@pytest.mark.parametrize(("share", "key_value_heads"), [("nothing", HEADS), ("heads", HEADS), ("heads", 1)])
@pytest.mark.parametrize("length", [N, 17])
def test_attention_is_that_of_the_package(share: str, key_value_heads: int, length: int) -> None:
    """The package has the same projections in all heads: with others in each, it has a layer for each head."""
    from linformer import LinformerSelfAttention

    torch.manual_seed(0)
    attention = {"type": "linformer", "rows": R, "share": share, "key_value_heads": key_value_heads}
    sizes = {"context": N, "heads": HEADS, "width": WIDTH, "layers": 1, "bias": False}
    (ours,) = SparseTransformer(small(attention=attention, objective={"type": "masked"}, **sizes)).double().mixers
    assert isinstance(ours, MixtureAttention)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(3, length, WIDTH, dtype=torch.float64, requires_grad=True)
    slopes = torch.randn(3, length, WIDTH, dtype=torch.float64)

    def theirs(heads: range, projections: int) -> Tensor:
        """Return their output of some heads, with the projections of this number."""
        options = {"heads": len(heads), "dim_head": D, "one_kv_head": key_value_heads == 1}
        channels = slice(heads.start * D, heads.stop * D)
        q, k, v = ours.query_key_value.weight.split(ours.widths)
        of_keys, of_values = ours.mixtures, ours.of_values
        assert of_keys is not None and of_values is not None
        weights = {"to_q.weight": q[channels], "to_k.weight": k[channels], "to_v.weight": v[channels]}
        weights |= {"proj_k": of_keys[projections].T, "proj_v": of_values[projections].T}
        weights |= {"to_out.weight": ours.projection.weight[:, channels], "to_out.bias": torch.zeros(WIDTH).double()}
        layer = LinformerSelfAttention(WIDTH, N, k=R, **options)
        assert weights.keys() == dict(layer.named_parameters()).keys()
        output: Tensor = torch.func.functional_call(layer, weights, (x,))
        return output

    groups = [range(head, head + 1) for head in range(HEADS)] if share == "nothing" else [range(HEADS)]
    expected = torch.stack([theirs(heads, number) for number, heads in enumerate(groups)]).sum(0)
    actual = ours(x).rows
    assert_rounded(actual, expected)
    tensors = x, *ours.parameters()
    gradients = [torch.autograd.grad((rows * slopes).sum(), tensors) for rows in (actual, expected)]
    for result, reference in zip(*gradients, strict=True):
        assert reference.any() and (result - reference).abs().max() <= 1e-11 * reference.abs().max()
