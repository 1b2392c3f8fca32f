"""Every initial value in one place (Child et al. 2019, section 5.2; the released code).

The paper writes N(0, 0.125/√d). Read as a standard deviation ("paper") that is 0.125/√d; the authors' later code
takes it for a variance ("released"), std = √(0.125/d).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from longstride.sparse_model.config import ModelConfig


def initialize(model: nn.Module, config: ModelConfig) -> None:
    """Set every parameter of a SparseTransformer, from torch's global generator.

    Linear weights and embeddings are normal, biases and output logits 0, norms 1 and 0. The two projections that write
    into the residual stream are scaled by 1/√(2·layers), so that the stream keeps its size with depth.
    """
    residual = 1 / math.sqrt(2 * config.layers)
    tables = len(config.embedding.table_sizes(config.context))
    for name, parameter in model.named_parameters():
        owner = name.rsplit(".", 2)[-2]
        if name == "logits.weight" or name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif owner.endswith("norm"):
            nn.init.ones_(parameter)
        elif name.startswith("embedding.positions."):
            nn.init.normal_(parameter, std=standard_deviation(config, config.width * tables))
        elif name.startswith("embedding."):
            nn.init.normal_(parameter, std=standard_deviation(config, config.width))
        else:
            scale = residual if owner in ("projection", "contract") else 1.0
            nn.init.normal_(parameter, std=scale * standard_deviation(config, parameter.shape[1]))


def standard_deviation(config: ModelConfig, fan_in: int) -> float:
    """The standard deviation of a tensor with this many inputs, by the chosen reading."""
    if config.initialization == "paper":
        return 0.125 / math.sqrt(fan_in)
    return math.sqrt(0.125 / fan_in)


def num_parameters(config: ModelConfig) -> int:
    """Parameters of the model of a configuration, without allocating it."""
    from longstride.sparse_model.transformer import SparseTransformer  # it imports this file

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in SparseTransformer(config).parameters())
