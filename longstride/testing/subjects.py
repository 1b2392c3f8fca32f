"""Models and inputs that all checks share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longstride.sparse_model import ModelConfig, SparseTransformer
from longstride.sparse_model.part import Mixer
from longstride.testing.comparisons import BOUND, UndeclaredError

ON_GRID = 1e-9  # of reversible blocks: a last bit may move a stream by a step of its grid


def bound_of(config: ModelConfig) -> float:
    """Return how far two ways to compute one number in fp64 may lie apart."""
    return ON_GRID if config.reversible else BOUND


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return the configuration with some keys changed."""
    return ModelConfig.model_validate(config.model_dump(mode="json") | changes) if changes else config


def awake(config: ModelConfig) -> SparseTransformer:
    """Make a model in fp64 whose every weight matters, in evaluation mode; equal for equal configurations.

    Vectors are positive, as a part may bound them by 0 and have no derivative there.
    """
    torch.manual_seed(0)
    model = SparseTransformer(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        if parameter.dim() < 2:
            parameter.data.abs_()
    return model.eval()


def tokens_of(config: ModelConfig, seed: int = 1, batch: int = 2) -> Tensor:
    """Draw tokens (B, N), the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(config.vocabulary, 256), (batch, config.context), generator=generator)


def require_method(model: SparseTransformer, name: str) -> None:
    """Raise UndeclaredError where a mixer does not have one of the optional methods of ``Mixer``."""
    lacking = [type(mixer) for mixer in model.mixers if getattr(type(mixer), name) is getattr(Mixer, name)]
    if lacking:
        raise UndeclaredError(", ".join(dict.fromkeys(each.__name__ for each in lacking)))
