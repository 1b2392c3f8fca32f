"""Feed-forward in chunks against the plain graph."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import longstride.sparse_model.feed_forwards.dense as feed_forward
from longstride.sparse_model.feed_forwards.dense import DenseFeedForward, FeedForwardInChunks, sigmoid_gelu
from tests.harness.configs import small
from tests.harness.stochastic import assert_rounding_explains, with_gradients


def tensors(dtype: torch.dtype, width: int = 5, inner: int = 7) -> list[Tensor]:
    """h (21, width), and the parameters."""
    random = torch.Generator().manual_seed(0)
    shapes = ((21, width), (inner, width), (inner,), (width, inner), (width,))
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def gelu(x: Tensor) -> Tensor:
    """Multiply by the normal distribution, as the error function defines it."""
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def plain(kind: str, h: Tensor, expand: Tensor, expand_bias: Tensor, contract: Tensor, contract_bias: Tensor) -> Tensor:
    activation = {"sigmoid_gelu": sigmoid_gelu, "gelu": gelu}[kind]
    return F.linear(activation(F.linear(h, expand, expand_bias)), contract, contract_bias)


@pytest.mark.parametrize("rows", [1, 8, 21, 100])
@pytest.mark.parametrize("kind", ["sigmoid_gelu", "gelu"])
def test_chunks_give_the_plain_graphs_gradients(kind: str, rows: int) -> None:
    inputs = tensors(torch.float64)
    found = with_gradients(lambda *x: FeedForwardInChunks.apply(*x, kind, rows), inputs)
    torch.testing.assert_close(found, with_gradients(lambda *x: plain(kind, *x), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["sigmoid_gelu", "gelu"])
def test_chunks_are_as_precise_as_their_dtype(kind: str, dtype: torch.dtype) -> None:
    inputs = tensors(dtype, 64, 96)
    found = with_gradients(lambda *x: FeedForwardInChunks.apply(*x, kind, 8), inputs)
    assert all(each.dtype == dtype for each in found)
    assert_rounding_explains(found, lambda *x: with_gradients(lambda *y: plain(kind, *y), x), inputs)


def test_long_inputs_go_in_chunks_and_keep_nothing_of_the_inner_width(monkeypatch: pytest.MonkeyPatch) -> None:
    module = DenseFeedForward(small(), "sigmoid_gelu")
    h = torch.randn(2, 40, 64, requires_grad=True)
    outputs, kept = [], []
    for limit in (80, 79):
        monkeypatch.setattr(feed_forward, "LONG_ROWS", limit)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            outputs.append(module(h).rows)
        kept.append(sum(size for size in saved if size % 80 == 0 and size >= 80 * 64))
    torch.testing.assert_close(*outputs)
    assert kept[1] < kept[0] / 4


def test_long_inputs_reach_what_stands_around_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As adapters do."""
    module = DenseFeedForward(small(), "sigmoid_gelu")
    module.contract = torch.nn.Sequential(module.contract, torch.nn.Tanh())  # type: ignore[assignment]
    h = torch.randn(2, 40, 64)
    expected = module(h).rows
    monkeypatch.setattr(feed_forward, "LONG_ROWS", 79)
    assert torch.equal(module(h).rows, expected)
