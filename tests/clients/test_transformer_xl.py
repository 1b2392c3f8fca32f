"""Transformer-XL's attention beside transformers' XLNet, which has the same scores and the same memory."""

import pytest
import torch
from torch import nn

from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers.memories.transformer_xl import MemoryAttention
from longstride.sparse_model.part import BlockContext
from tests.harness.clients import client
from tests.harness.configs import small

pytestmark = [pytest.mark.filterwarnings("default")]

BATCH, LENGTH, MEMORY, WIDTH, HEADS = 3, 14, 9, 32, 4


@client("transformers", "XLNet's memory", "three segments with copied weights, to rounding of its positions in fp32")
def test_segments_read_the_memory_that_xlnet_reads() -> None:
    import transformers

    sizes = {"vocab_size": 64, "d_model": WIDTH, "n_layer": 1, "n_head": HEADS, "d_inner": 48}
    config = transformers.XLNetConfig(**sizes, dropout=0.0, attn_type="uni", mem_len=MEMORY)
    torch.manual_seed(0)
    xlnet = transformers.XLNetModel(config).double().eval()
    theirs = xlnet.layer[0].rel_attn
    theirs.layer_norm = nn.Identity()
    kind = {"type": "transformer_xl", "memory": MEMORY, "position_channels": WIDTH, "untied": True}
    (ours,) = SparseTransformer(small(width=WIDTH, heads=HEADS, layers=1, attention=kind)).double().mixers
    assert isinstance(ours, MemoryAttention) and ours.biases is not None
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.4)
    with torch.no_grad():
        q, k, v = ours.query_key_value.weight.T.unflatten(1, (3, HEADS, -1)).unbind(1)
        copied = {"q": q, "k": k, "v": v, "r": ours.distances.T, "o": ours.projection.weight}
        copied |= {"r_w_bias": ours.biases.for_keys, "r_r_bias": ours.biases.for_distances}
        for name, weight in copied.items():
            getattr(theirs, name).copy_(weight.reshape(getattr(theirs, name).shape))
        mems, carried = None, (torch.zeros(BATCH, MEMORY, WIDTH).double(), torch.zeros(BATCH, dtype=torch.int32))
        for h in torch.randn(3, BATCH, LENGTH, WIDTH, dtype=torch.float64):
            rows, before = h.transpose(0, 1), 0 if mems is None else len(mems)
            mask = xlnet.create_mask(LENGTH, before)[:, :, None, None].double()
            r = xlnet.relative_positional_encoding(LENGTH, before + LENGTH, bsz=BATCH).double()
            expected = theirs(rows, None, mask, None, r=r, seg_mat=None, mems=mems)[0] - rows
            output = ours(h, BlockContext(carried=carried))
            torch.testing.assert_close(output.rows, expected.transpose(0, 1), rtol=1e-5, atol=1e-5)
            mems, carried = xlnet.cache_mem(rows, mems), output.carried
            torch.testing.assert_close(carried[0], mems.transpose(0, 1), rtol=0, atol=0)
