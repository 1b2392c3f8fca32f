"""Parts that came after the paper: each against its definition, and all of them together as the paper's are held."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import longstride.sparse_model.tiles as tiles
from longstride.sparse_model import ModelConfig, SparseTransformer
from longstride.sparse_model.feed_forwards.dense import squared_relu
from longstride.sparse_model.mixers.convolution import ShiftedSum
from longstride.sparse_model.norm import EPS, TiledRMSNorm
from longstride.sparse_model.rotary import PreparedHeads, Rotary, prepared_row
from tests.harness.configs import LATER, model_json, small
from tests.harness.stochastic import with_gradients
from tests.sparse_model.test_cache import check
from tests.sparse_model.test_transformer import awake

WIDTH, KEYS = 16, 32  # of a head, and of all queries and keys
TABLE = Rotary(21, WIDTH, 100.0).table(torch.device("cpu"))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def heads(rows: Tensor, normed: bool = True, turned: bool = True) -> Tensor:
    x = rows[..., :KEYS].unflatten(-1, (-1, WIDTH))
    if normed:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    if turned:
        cosines, sines = (part.to(x.dtype).repeat_interleave(2, -1) for part in TABLE.unbind(-1))
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        x = x * cosines + other * sines
    return torch.cat([x.flatten(-2), rows[..., KEYS:]], -1)


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    padded = F.pad(x.transpose(1, 2), (len(weight) - 1, 0))
    return x + F.conv1d(padded, weight.flip(0).t()[:, None], groups=x.shape[-1]).transpose(1, 2)


# What is computed in few passes, its definition, and the shapes that both take.
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "rms norm": (TiledRMSNorm.apply, rms_norm, [(42, 64), (64,)]),
    "normalised heads": (
        lambda rows: PreparedHeads.apply(rows, KEYS, WIDTH, True, None), lambda rows: heads(rows, turned=False),
        [(2, 21, 48)],
    ),
    "turned heads": (
        lambda rows: PreparedHeads.apply(rows, KEYS, WIDTH, False, TABLE), lambda rows: heads(rows, normed=False),
        [(2, 21, 48)],
    ),
    "both": (lambda rows: PreparedHeads.apply(rows, KEYS, WIDTH, True, TABLE), heads, [(2, 21, 48)]),
    "convolution": (ShiftedSum.apply, convolution, [(2, 21, 64), (3, 64)]),
    "longer convolution than its input": (ShiftedSum.apply, convolution, [(2, 3, 8), (5, 8)]),
    "squared relu": (squared_relu, lambda x: F.relu(x).square(), [(42, 64)]),
}  # fmt: skip


def in_precision(function: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """What a function gives in a precision, and the gradients of its inputs, all in fp64."""
    return [x.double() for x in with_gradients(function, [x.to(dtype).requires_grad_() for x in inputs])]


@pytest.mark.parametrize("tile", [tiles.TILE, 200])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_few_passes_give_what_the_definition_gives(case: Any, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, and in 16 bits with an error of at most 1.1 times that of torch's operations one after another."""
    monkeypatch.setattr(tiles, "TILE", tile)
    function, definition, shapes = case
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=random, dtype=torch.float64).bfloat16().double() for shape in shapes]
    exact = in_precision(definition, inputs, torch.float64)
    for found, true in zip(in_precision(function, inputs, torch.float64), exact, strict=True):
        torch.testing.assert_close(found, true)
    mine, plain = (in_precision(each, inputs, torch.bfloat16) for each in (function, definition))
    for found, other, true in zip(mine, plain, exact, strict=True):
        assert (found - true).square().mean() <= 1.1**2 * (other - true).square().mean() + 1e-12


def test_turned_queries_and_keys_know_their_distance_alone() -> None:
    q, k = torch.randn(2, WIDTH, dtype=torch.float64)
    table = Rotary(400, WIDTH, 100.0).table(torch.device("cpu"))
    products = [
        float((prepared_row(q.view(1, 1, -1), False, table[i]) * prepared_row(k.view(1, 1, -1), False, table[j])).sum())
        for i, j in ((7, 0), (207, 200), (399, 392), (8, 0))
    ]
    assert products[:3] == pytest.approx([products[0]] * 3, rel=1e-5)  # of a table in fp32
    assert products[3] != pytest.approx(products[0], rel=1e-3)


def test_a_block_of_later_parts_is_its_definition() -> None:
    model = awake(backend="reference", **{**LATER, "rotary": {"base": 100.0}}, heads=2, width=2 * WIDTH).double()
    block, h = model.blocks[0], torch.randn(2, 21, 2 * WIDTH, dtype=torch.float64)
    x = convolution(rms_norm(h, block.attention_norm.weight), block.attention.convolution.weight)
    rows = heads_of_all(F.linear(x, block.attention.query_key_value.weight))
    q, k, v = (part.unflatten(-1, (2, WIDTH)).transpose(1, 2) for part in rows.chunk(3, -1))
    place = torch.arange(21)
    mask = block.attention.patterns[0].mask(place[:, None], place)
    out = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
    wanted = h + F.linear(out, block.attention.projection.weight)
    inner = F.linear(rms_norm(wanted, block.feed_forward_norm.weight), block.feed_forward.expand.weight)
    wanted = wanted + F.linear(inner.relu().square(), block.feed_forward.contract.weight)
    torch.testing.assert_close(block(h).rows, wanted)


def heads_of_all(rows: Tensor) -> Tensor:
    """``heads`` of two queries and two keys."""
    first, rest = rows[..., :KEYS], rows[..., KEYS:]
    return torch.cat([heads(first), heads(rest)], -1)


def test_zero_outputs_leave_the_stream_as_it_is() -> None:
    model = SparseTransformer(small(**LATER))
    h = torch.randn(1, 40, 64)
    assert torch.equal(model.blocks[0](h).rows, h)
    model(torch.randint(256, (1, 40)), return_nats=True).mean().backward()
    others = {**LATER, "initialization": "released"}
    still = dict(SparseTransformer(small(**others)).named_parameters())
    zero = {name for name, parameter in model.named_parameters() if not parameter.any()}
    assert zero - {name for name, parameter in still.items() if not parameter.any()} == {
        f"blocks.{layer}.{name}.weight"
        for layer in range(3)
        for name in ("attention.projection", "feed_forward.contract")
    }
    assert not any(name.endswith("bias") for name in still)


def test_what_is_off_is_left_out_of_saved_json() -> None:
    """So that what older code saved has the same bytes, and the same fingerprint."""
    assert small().model_dump(mode="json") == {
        **model_json(), "vocabulary": 256, "feed_forward_ratio": 4.0, "query_key_ratio": 1.0, "dropout": 0.0,
        "initialization": "released", "backend": "auto",
    }  # fmt: skip
    assert small(norm="layer", bias=True, rotary=None, feed_forward={}) == small()
    later = small(**LATER)
    saved = later.model_dump(mode="json")
    assert {name: saved[name] for name in LATER} == LATER and ModelConfig.model_validate(saved) == later


def test_a_table_made_in_a_session_serves_training() -> None:
    model = awake(**LATER)
    check(model, 1e-4, (0,))
    model.train()(torch.randint(256, (1, 40)), return_nats=True).mean().backward()
    assert math.isfinite(float(model.blocks[0].attention.query_key_value.weight.grad.sum()))
