"""Product-key memories against their definition, which scores all n² slots."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.feed_forwards import dense
from longstride.sparse_model.feed_forwards.product_keys import ProductKeys, ProductKeysConfig
from tests.harness.configs import small
from tests.harness.stochastic import with_gradients

WIDTH = 16
CASES: list[dict[str, Any]] = [
    {"keys": 9, "top": 4, "heads": 3, "query_width": 10},
    {"keys": 6, "top": 6, "heads": 1, "query_width": 8},
    {"keys": 40, "top": 32, "heads": 2, "query_width": 12},
    {"keys": 5, "top": 1, "heads": 2, "query_width": 2},
]


def make(bias: bool = True, **changes: Any) -> ProductKeys:
    """A memory in fp64, every parameter of which matters."""
    config = ProductKeysConfig.model_validate({"type": "product_keys", **changes})
    module = ProductKeys(small(width=WIDTH, bias=bias), config).double()
    random = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=random)
    return module


def rows(length: int) -> Tensor:
    """(2, N, C)."""
    random = torch.Generator().manual_seed(length)
    return torch.randn(2, length, WIDTH, generator=random, dtype=torch.float64).requires_grad_()


def by_definition(module: ProductKeys, h: Tensor) -> Tensor:
    """(B, N, C), from the scores of all slots of each head."""
    config, out = module.config, torch.zeros_like(h)
    queries = h @ module.query.weight.mT
    if module.query.bias is not None:
        queries = queries + module.query.bias
    for head, query in enumerate(queries.split(config.query_width, -1)):
        query = query - query.mean(-1, keepdim=True)
        query = query / (query.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        first, second = query.split(config.query_width // 2, -1)
        keys = module.keys.weight[head]
        scores = ((first @ keys[0].mT)[..., :, None] + (second @ keys[1].mT)[..., None, :]).flatten(-2)
        chosen = scores.argsort(-1, descending=True)[..., : config.top]
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen).softmax(-1))
        out = out + weights @ module.values.rows
    return out


@pytest.mark.parametrize(("case", "bias"), [(CASES[0], False), *((case, True) for case in CASES)], ids=str)
def test_rows_and_gradients_are_those_of_all_slots(
    case: dict[str, Any], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make(bias, **case)
    if not bias:
        monkeypatch.setattr(dense, "CHUNK_ROWS", 7)
    for length in range(1, 65):
        inputs = [rows(length), *module.parameters()]
        computed = with_gradients(lambda h, *_: module(h).rows, inputs)
        expected = with_gradients(lambda h, *_: by_definition(module, h), inputs)
        torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-12)


def test_single_rows_are_those_of_contexts() -> None:
    module, h = make(**CASES[0]), rows(9)
    alone = torch.cat([module(h[:, place : place + 1]).rows for place in range(9)], 1)
    torch.testing.assert_close(alone, module(h).rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """Each sum of 2,048 values is rounded once, so it is within half a unit in the last place, and fp32's rounding."""
    module = make(keys=64, top=64, heads=32, query_width=4).to(dtype)
    h = rows(3).detach().to(dtype)
    ids, weights = module.choose(h.flatten(0, 1))
    weights = weights.to(dtype).double()
    exact = (weights[..., None] * module.values.rows.detach().double()[ids]).sum(1)
    magnitude = (weights[..., None] * module.values.rows.detach().double()[ids]).abs().sum(1)
    error = (module(h).rows.detach().flatten(0, 1).double() - exact).abs()
    assert bool((error <= torch.finfo(dtype).eps / 2 * exact.abs() + 2048 * 2.0**-24 * magnitude).all())


def test_first_values_are_those_of_the_authors_code() -> None:
    torch.manual_seed(0)
    sizes = {"keys": 64, "top": 8, "heads": 2, "query_width": 32}
    model = SparseTransformer(small(feed_forward={"type": "product_keys", **sizes}))
    memory = model.blocks[0].feed_forward
    assert isinstance(memory, ProductKeys)
    assert float(memory.values.rows.detach().std()) == pytest.approx(64**-0.5, rel=0.01)
    keys = memory.keys.weight.detach()
    assert float(keys.abs().max()) <= 0.25 and float(keys.std()) == pytest.approx(0.25 / 3**0.5, rel=0.03)
    roles = {name.rpartition("feed_forward.")[2]: role.part for name, role in model.parameter_roles().items()}
    assert roles["values.rows"] == "tables" and roles["keys.weight"] == "vectors"
    assert roles["query.weight"] == "matrices"
    zero = (
        SparseTransformer(small(feed_forward={"type": "product_keys", **sizes}, initialization="zero_outputs"))
        .blocks[0]
        .feed_forward
    )
    assert isinstance(zero, ProductKeys) and not zero.values.rows.any()


def test_cost_does_not_grow_with_the_slots() -> None:
    small_memory, large = (make(keys=keys, top=4, heads=2, query_width=8) for keys in (8, 64))
    shared = 2 * 40 * (small_memory.query.weight.numel() + 2 * 4 * WIDTH)
    for module in (small_memory, large):
        assert module.work(40, 1).forward == shared + 2 * 40 * 2 * 8 * module.config.keys
