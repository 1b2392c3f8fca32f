"""A product-key memory beside that of the package `product-key-memory`, with copied weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.sparse_model.feed_forwards.product_keys import ProductKeys, ProductKeysConfig
from tests.clients.conftest import assert_rounded
from tests.harness.clients import client
from tests.harness.configs import small

WIDTH, KEYS, TOP, HEADS, HALF = 16, 12, 5, 3, 6


class Queries(nn.Module):
    """Our queries in the package's order: all heads' first halves, then all second ones."""

    def __init__(self, ours: ProductKeys) -> None:
        super().__init__()
        self.query = ours.query

    def forward(self, x: Tensor) -> Tensor:
        queries = self.query(x).unflatten(-1, (HEADS, 2 * HALF))
        return F.layer_norm(queries, (2 * HALF,)).unflatten(-1, (2, HALF)).movedim(-2, -3).flatten(-3)


@client("product-key-memory", "its search and sums for our queries, copied weights", "outputs and gradients, in fp64")
def test_a_memory_is_that_of_the_package() -> None:
    """The package normalises each half of a query by itself, and the paper both together, as here."""
    from product_key_memory import PKM

    torch.manual_seed(0)
    sizes = {"keys": KEYS, "top": TOP, "heads": HEADS, "query_width": 2 * HALF}
    ours = ProductKeys(small(width=WIDTH), ProductKeysConfig.model_validate({"type": "product_keys", **sizes})).double()
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs = PKM(WIDTH, heads=HEADS, num_keys=KEYS, topk=TOP, dim_head=HALF)
    theirs.to_queries, theirs.norm = Queries(ours), nn.Identity()
    weights = {"keys": ours.keys.weight.transpose(1, 2), "values.weight": ours.values.rows}
    x = torch.randn(3, 40, WIDTH, dtype=torch.float64, requires_grad=True)
    expected, actual = torch.func.functional_call(theirs, weights, x), ours(x).rows
    assert_rounded(actual, expected)
    slopes, tensors = torch.randn_like(expected), (x, *ours.parameters())
    gradients = [torch.autograd.grad((rows * slopes).sum(), tensors) for rows in (actual, expected)]
    for result, reference in zip(*gradients, strict=True):
        assert reference.any() and (result - reference).abs().max() <= 1e-11 * reference.abs().max()
