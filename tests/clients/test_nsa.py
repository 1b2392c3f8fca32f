"""Native sparse attention beside the reference functions of the package `fla-core`.

Its blocks of summaries are the chosen ones and do not overlap, and its branches share keys and values: here each
function gets the rows of our branch. Its window needs a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers.memories.nsa import NativeSparseAttention
from tests.harness.clients import client
from tests.harness.configs import small

N, BLOCK, SELECTED, HEADS, WIDTH = 40, 4, 5, 4, 64
ROUNDING = 2.0**-23 * 64  # fla computes in fp32: sums of up to 40 products, and their softmax


@client("fla-core", "`naive_nsa_topk`, `_selection`, `_compression`", "our chosen blocks; both branches, in its fp32")
@pytest.mark.filterwarnings("ignore")  # of what its import lacks
@pytest.mark.parametrize("key_value_heads", [1, 2, HEADS])
def test_branches_are_those_of_the_package(key_value_heads: int) -> None:
    from fla.ops.nsa.naive import naive_nsa_compression, naive_nsa_selection, naive_nsa_topk

    attention = {
        "type": "nsa", "block": BLOCK, "distance": BLOCK, "selected_block": BLOCK, "selected": SELECTED, "window": 7,
        "key_value_heads": key_value_heads,
    }  # fmt: skip
    torch.manual_seed(1)
    (ours,) = SparseTransformer(small(context=N, heads=HEADS, width=WIDTH, layers=1, attention=attention)).mixers
    assert isinstance(ours, NativeSparseAttention)
    q, keys, values = ours.branch_heads(8 * torch.randn(3, N, WIDTH), slice(N))
    with torch.no_grad():
        selected, _, compressed = ours.branches(q, keys, values, None)
        grid = ours.compression.grid(N, None, q.device)
        summaries = ours.compression(keys[2], values[2], grid)
        numbers = ours.choices(q, summaries[0], grid, N // BLOCK - 1)

    def theirs(x: Tensor) -> Tensor:
        return x.detach().transpose(1, 2).contiguous()  # heads after positions

    scale = q.shape[3] ** -0.5
    chosen = naive_nsa_topk(theirs(q), theirs(summaries[0]), SELECTED, BLOCK, scale)
    own = (torch.arange(N) // BLOCK).expand(*numbers.shape[:2], N)[..., None]
    assert torch.equal(torch.cat([numbers, own], -1).sort(-1).values, chosen.transpose(1, 2).sort(-1).values)
    for output, expected in (
        (selected, naive_nsa_selection(theirs(q), theirs(keys[0]), theirs(values[0]), chosen, BLOCK)),
        (compressed, naive_nsa_compression(theirs(q), *map(theirs, summaries), BLOCK, scale)[0]),
    ):
        assert (theirs(output) - expected).abs().max() <= ROUNDING * expected.abs().max()
