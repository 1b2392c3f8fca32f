"""Initial values against the paper's table, tensor by tensor."""

import math
from collections.abc import Callable

import pytest
import torch

from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.embedding import Embedding
from tests.harness.configs import small

READINGS: dict[str, Callable[[float], float]] = {
    "paper": lambda fan_in: 0.125 / math.sqrt(fan_in),
    "released": lambda fan_in: math.sqrt(0.125 / fan_in),
}

TELLING = 20_000  # values: 2 % is four standard errors of their deviation


@pytest.mark.parametrize("reading", READINGS)
def test_every_tensor_starts_as_the_paper_says(reading: str) -> None:
    torch.manual_seed(0)
    width, layers, std = 256, 3, READINGS[reading]
    config = small(
        width=width, context=8192, layers=layers, initialization=reading,
        attention={"type": "fixed", "stride": 64, "summary": 8}, embedding={"type": "text", "row_width": 64},
    )  # fmt: skip
    residual = 1 / math.sqrt(2 * layers)
    wanted = {
        "embedding.tokens.weight": std(width),
        "embedding.start": std(width),
        "embedding.positions.0.weight": std(2 * width),
        "embedding.positions.1.weight": std(2 * width),
        "logits.weight": 0.0,
        "norm.weight": 1.0,
        "norm.bias": 0.0,
    }
    for layer in range(layers):
        block = f"blocks.{layer}."
        for norm in ("attention_norm", "feed_forward_norm"):
            wanted |= {f"{block}{norm}.weight": 1.0, f"{block}{norm}.bias": 0.0}
        for projection, size in (
            ("attention.query_key_value", std(width)),
            ("attention.projection", std(width) * residual),
            ("feed_forward.expand", std(width)),
            ("feed_forward.contract", std(4 * width) * residual),
        ):
            wanted |= {f"{block}{projection}.weight": size, f"{block}{projection}.bias": 0.0}
    parameters = dict(SparseTransformer(config).named_parameters())
    assert parameters.keys() == wanted.keys()
    for name, value in wanted.items():
        tensor = parameters[name].detach()
        if value in (0.0, 1.0):
            assert bool((tensor == value).all()), name
            continue
        if tensor.numel() >= TELLING:
            assert abs(float(tensor.std()) / value - 1) < 0.02, name
        else:
            assert name in ("embedding.start", "embedding.positions.1.weight"), "the next test has those"
        assert abs(float(tensor.mean())) < 4 * value / math.sqrt(tensor.numel()), name


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize(
    "kind, tables",
    [({"type": "text", "row_width": 8}, (6, 8)), ({"type": "image", "height": 4, "width": 4}, (4, 4, 3))],
    ids=["text", "image"],
)
def test_small_tensors_pooled_over_seeds_start_as_the_paper_says(
    reading: str, kind: dict[str, object], tables: tuple[int, ...]
) -> None:
    width, std = 64, READINGS[reading]
    config = small(width=width, context=48, embedding=kind, initialization=reading)
    wanted = {"start": std(width), **{f"positions.{n}.weight": std(len(tables) * width) for n in range(len(tables))}}
    pooled: dict[str, list[torch.Tensor]] = {name: [] for name in wanted}
    embedding = Embedding(config)
    for seed in range(TELLING // width + 1):
        torch.manual_seed(seed)
        embedding.initialize()
        for name in wanted:
            pooled[name].append(embedding.get_parameter(name).detach().clone().flatten())
    assert [len(table.weight) for table in embedding.positions] == list(tables)
    for name, value in wanted.items():
        values = torch.cat(pooled[name])
        assert values.numel() >= TELLING
        assert abs(float(values.std()) / value - 1) < 0.02, name
        assert abs(float(values.mean())) < 4 * value / math.sqrt(values.numel()), name
