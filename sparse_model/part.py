"""What each part of the network has beside its forward pass: its first values, and the count of its operations.

A part is a module with ``part``, the name under which its parameters are counted. Where it has parameters to set,
``initialize()`` does so. Where it computes products, ``work(positions, pairs, batch)`` counts them. One that remembers
earlier positions has ``new_state(batch, length, device, dtype)``: what generation keeps of it, with ``begin``, ``step``
and ``rearrange``. Whoever needs one of these asks the part, and knows no names of modules or tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from longstride.sparse_model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of one pass over one context. A multiplication and an addition are two."""

    linear: int = 0  # 2 a weight and position
    scores: int = 0  # of attention: queries times keys
    values: int = 0  # of attention: weights times values
    again: int = 0  # of ``linear``, what the backward pass computes again in any case

    def __add__(self, other: Work) -> Work:
        return Work(
            self.linear + other.linear,
            self.scores + other.scores,
            self.values + other.values,
            self.again + other.again,
        )

    @property
    def forward(self) -> int:
        """The forward pass."""
        return self.linear + self.scores + self.values

    @property
    def backward(self) -> int:
        """The backward pass: the gradients of both factors, and once more the scores and what is not kept."""
        return 2 * self.forward + self.scores + self.again


def draw(parameter: Tensor, config: ModelConfig, fan_in: int, *, into_stream: bool = False) -> None:
    """Set a tensor with this many inputs to normal values from torch's global generator (section 5.2).

    The paper writes N(0, 0.125/√d). Read as a standard deviation ("paper") that is 0.125/√d; the authors' later code
    takes it for a variance ("released"), std = √(0.125/d).

    Args:
        parameter: is overwritten.
        config: says how the formula is read.
        fan_in: the formula's d.
        into_stream: what it gives is added to the residual stream: scaled by 1/√(2·layers), so that the stream keeps
            its size with depth; 0 where ``initialization`` is "zero_outputs" (Zhang et al. 2019, Fixup).
    """
    if into_stream and config.initialization == "zero_outputs":
        nn.init.zeros_(parameter)
        return
    std = 0.125 / math.sqrt(fan_in) if config.initialization == "paper" else math.sqrt(0.125 / fan_in)
    scale = 1 / math.sqrt(2 * config.layers) if into_stream else 1.0
    nn.init.normal_(parameter, std=scale * std)


def draw_linear(linear: nn.Linear, config: ModelConfig, *, into_stream: bool = False) -> None:
    """Set a linear layer: its weight as ``draw`` does, its bias, if it has one, to 0."""
    draw(linear.weight, config, linear.in_features, into_stream=into_stream)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
