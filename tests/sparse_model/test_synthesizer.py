"""Synthesized scores against the paper's formulas written out, and what of a synthesizer other attention has not."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from longstride.launcher.planning.costs import parameter_parts, work
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers.synthesizer import KINDS
from tests.harness.configs import small
from tests.harness.stochastic import with_gradients
from tests.sparse_model.test_transformer import awake

SUMMARY = {"type": "summary", "stride": 8, "summary": 2, "num_summaries": 2}  # heads differ, and some rows are blind
MIXTURES: list[Any] = [*KINDS[:4], ["random", "attention"], ["dense", "attention"], ["random", "dense"], list(KINDS)]
C, H, N = 64, 4, 40


def synthesizer(kind: Any, **changes: Any) -> dict[str, Any]:
    return {"attention": {"type": "synthesizer", "kind": kind, **changes}}


def scores_of(mixer: Any, x: Tensor, context: int) -> Tensor:
    """(B, H, n, n) of rows x (B, n, C), by the formulas of section 3 of Tay et al. 2020."""
    at = dict(zip(mixer.widths, mixer.rows.weight.split(list(mixer.widths.values())), strict=True))
    bias = dict(zip(mixer.widths, mixer.rows.bias.split(list(mixer.widths.values())), strict=True))

    def projected(name: str) -> Tensor:
        return (x @ at[name].T + bias[name]).unflatten(-1, (H, -1))  # (B, n, H, ·)

    n = x.shape[1]
    found: list[Tensor] = []
    for kind in mixer.kinds:
        if kind == "random":
            found.append(mixer.random[None, :, :n, :n])
        elif kind == "factorized_random":
            found.append(torch.einsum("hik,hjk->hij", mixer.random_queries, mixer.random_keys)[None, :, :n, :n])
        elif kind == "dense":
            found.append(torch.einsum("bihf,hjf->bhij", projected("dense").relu(), mixer.dense_keys)[..., :n])
        elif kind == "factorized_dense":
            a = torch.einsum("bihf,huf->bhiu", projected("blocks").relu(), mixer.block_keys)
            b = torch.einsum("bihf,huf->bhiu", projected("places").relu(), mixer.place_keys)
            columns = torch.arange(context)
            found.append((a[..., columns // b.shape[-1]] * b[..., columns % b.shape[-1]])[..., :n])
        else:
            q, k = projected("queries"), projected("keys")
            found.append(torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1]))
    shares = [1.0] if len(found) == 1 else mixer.mixing.exp() / mixer.mixing.exp().sum()
    return sum(share * each for share, each in zip(shares, found, strict=True))  # type: ignore[return-value]


def weights_of(mixer: Any, x: Tensor, context: int) -> Tensor:
    """(B, H, n, n): a softmax over the keys that the pattern allows, 0 where there are none."""
    place = torch.arange(x.shape[1])
    mask = torch.stack([pattern.mask(place[:, None], place) for pattern in mixer.patterns])
    exponents = scores_of(mixer, x, context).exp() * mask
    return exponents / exponents.sum(-1, keepdim=True).clamp_min(1e-300)


@pytest.mark.parametrize("pattern", [None, SUMMARY], ids=["dense", "summary"])
@pytest.mark.parametrize("kind", MIXTURES, ids=str)
def test_it_is_the_papers_formula(kind: Any, pattern: Any) -> None:
    """Rows and every gradient, at the whole context and below it."""
    model = awake(layers=1, **synthesizer(kind, **({} if pattern is None else {"pattern": pattern}))).double()
    mixer: Any = model.blocks[0].attention
    parameters = list(mixer.parameters())
    values = list(mixer.widths).index("values")
    for n in (N, 27):
        x = torch.randn(3, n, C, dtype=torch.float64, requires_grad=True)

        def formula(x: Tensor, *_: Tensor) -> Tensor:
            weight, bias = (y.split(list(mixer.widths.values()))[values] for y in (mixer.rows.weight, mixer.rows.bias))
            weighed = weights_of(mixer, x, N) @ (x @ weight.T + bias).unflatten(-1, (H, -1)).transpose(1, 2)
            return mixer.projection(weighed.transpose(1, 2).flatten(2))

        found, wanted = (with_gradients(f, [x, *parameters]) for f in (lambda x, *_: mixer(x).rows, formula))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "more", "own"),
    [
        ("random", {}, H * N * N),
        ("random", {"fixed": True}, 0),
        ("factorized_random", {"rank": 3}, 2 * H * N * 3),
        ("factorized_random", {}, 2 * H * N * 8),
        ("dense", {}, C * C + C + H * N * 16),  # W1 for all heads, its bias, and a table
        ("dense", {"hidden": 5}, C * 20 + 20 + H * N * 5),
        ("factorized_dense", {"blocks": 4}, 2 * (C * C + C) + H * (4 + 10) * 16),
        (["random", "attention"], {}, H * N * N + 2 * (C * C + C) + 2),
    ],
)
def test_queries_and_keys_are_not_in_the_count(kind: Any, more: Any, own: int) -> None:
    """Beside its own: values, the projection, and their biases."""
    config = small(layers=2, **synthesizer(kind, **more))
    assert parameter_parts(config)["synthesizer"] == 2 * (2 * (C * C + C) + own)


def test_optimisers_take_tables_for_embeddings() -> None:
    """A table is no matrix between layers: Muon leaves it to AdamW. The projections are matrices, each of its own."""
    roles = SparseTransformer(small(**synthesizer(list(KINDS)))).parameter_roles()
    parts = {name.partition("attention.")[2]: role for name, role in roles.items() if "0.attention." in name}
    assert {name for name, role in parts.items() if role.part == "matrices"} == {"rows.weight", "projection.weight"}
    assert parts["rows.weight"].rows == (C,) * 6
    tables = {"random", "random_queries", "random_keys", "dense_keys", "block_keys", "place_keys"}
    assert {name for name, role in parts.items() if role.part == "embeddings"} == tables
    assert parts["mixing"].part == "vectors"


@pytest.mark.parametrize("kind", MIXTURES, ids=str)
def test_it_begins_near_the_mean_of_all_values(kind: Any) -> None:
    torch.manual_seed(0)
    mixer: Any = SparseTransformer(small(layers=1, **synthesizer(kind))).blocks[0].attention
    scores = scores_of(mixer, torch.randn(2, N, C), N)
    assert 0.001 < scores.std() < 0.5
    assert mixer.mixing is None or not mixer.mixing.any()


def test_fixed_tables_are_drawn_and_not_trained() -> None:
    torch.manual_seed(0)
    model = SparseTransformer(small(**synthesizer(["random", "factorized_random"], fixed=True)))
    buffers = dict(model.named_buffers())
    assert {name.rpartition(".")[2] for name in buffers} == {"random", "random_queries", "random_keys"}
    assert all(table.std() > 0.01 for table in buffers.values())
    first, second = (buffers[f"blocks.{layer}.attention.random"] for layer in (0, 1))
    assert not torch.equal(first, second)
    halves = model.to(torch.bfloat16)
    halves(torch.randint(256, (1, N)), return_nats=True).sum().backward()


def test_operations_are_those_that_torch_counts() -> None:
    """Of products over all pairs; those of a pattern are counted as attention's are, inside an op."""
    config = small(**synthesizer(["factorized_dense", "dense", "attention"], blocks=4, hidden=8))
    model, tokens = SparseTransformer(config), torch.randint(256, (1, N))
    with FlopCounterMode(display=False) as forward:
        nats = model(tokens, return_nats=True)
    with FlopCounterMode(display=False) as backward:
        nats.sum().backward()
    planned = work(config).total
    assert forward.get_total_flops() == planned.forward
    assert backward.get_total_flops() == planned.backward
    products = work(small(**synthesizer(["dense", "factorized_random"], hidden=8, rank=3))).total
    assert (planned.pairs, planned.scores) == (products.pairs, 0)
    assert (products.scores, products.values) == (2 * products.pairs * (8 + 3), 2 * products.pairs * 16)
