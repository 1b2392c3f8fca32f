"""Initial values against the paper's table, tensor by tensor."""

import math
from collections.abc import Callable

import pytest
import torch

from sparse_model import SparseTransformer
from tests.sparse_model.configs import small

READINGS: dict[str, Callable[[float], float]] = {
    "paper": lambda fan_in: 0.125 / math.sqrt(fan_in),
    "released": lambda fan_in: math.sqrt(0.125 / fan_in),
}


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
        # 2 % where the tensor is large enough to tell, else four standard errors of an estimated deviation.
        allowed = max(0.02, 4 / math.sqrt(2 * tensor.numel()))
        assert abs(float(tensor.std()) / value - 1) < allowed, name
        assert abs(float(tensor.mean())) < 4 * value / math.sqrt(tensor.numel()), name
