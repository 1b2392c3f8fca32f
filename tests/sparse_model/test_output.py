"""The loss without the logits of a whole context, against torch's own cross-entropy."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.sparse_model.embedding import Embedding
from longstride.sparse_model.output import CrossEntropyInChunks, Logits
from tests.harness.configs import small
from tests.harness.stochastic import assert_rounding_explains, with_gradients


@pytest.mark.parametrize("rows", [1, 8, 21, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_chunks_give_torchs_cross_entropy_and_gradients(rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    h, weight = (torch.randn(size, 5, dtype=torch.float64, requires_grad=True) for size in (21, 11))
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True) if has_bias else None
    inputs = (h, weight) if bias is None else (h, weight, bias)
    targets = torch.randint(11, (21,))
    found = with_gradients(lambda h, w, b=None: CrossEntropyInChunks.apply(h, w, b, targets, rows), inputs)
    expected = with_gradients(lambda *x: F.cross_entropy(F.linear(*x), targets, reduction="none"), inputs)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_chunks_are_as_precise_as_their_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    h, weight, bias = (torch.randn(size).to(dtype).requires_grad_() for size in ((200, 16), (256, 16), (256,)))
    inputs, targets = (h, weight, bias), torch.randint(256, (200,))

    def formula(*inputs: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(*inputs), targets, reduction="none")

    found = with_gradients(lambda *x: CrossEntropyInChunks.apply(*x, targets, 64), inputs)
    assert found[0].dtype == torch.float32
    assert_rounding_explains(found, lambda *x: with_gradients(formula, x), inputs)


def test_no_logits_are_kept_for_the_backward_pass() -> None:
    config = small(width=8)
    head = Logits(config, Embedding(config))
    h = torch.randn(2, 50, 8, requires_grad=True)
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        nats = head(h, torch.randint(256, (2, 50)))
    assert nats.shape == (2, 50)
    assert max(sizes) == 8 * 256  # the weight; of the 100 positions no more than their inputs and a number each
