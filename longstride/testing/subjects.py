"""Models and inputs for all checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longstride.sparse_model import ModelConfig, SparseTransformer
from longstride.sparse_model.part import Mixer
from longstride.testing.comparisons import BOUND, UndeclaredError

ON_GRID = 1e-9  # the bound for reversible blocks: a last bit may move a stream by a step of its grid


def bound_of(config: ModelConfig) -> float:
    """Return the relative bound on the difference of two ways to compute a number in fp64."""
    return ON_GRID if config.reversible else BOUND


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return the configuration with some keys changed."""
    return ModelConfig.model_validate(config.model_dump(mode="json") | changes) if changes else config


def awake(config: ModelConfig) -> SparseTransformer:
    """Build a model in fp64 and evaluation mode in which every weight has an effect.

    Equal configurations give equal models. Vectors are positive, as a part may clamp them at 0, without a derivative.
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
    """Raise UndeclaredError if a mixer lacks an optional method of ``Mixer``."""
    lacking = [type(mixer) for mixer in model.mixers if getattr(type(mixer), name) is getattr(Mixer, name)]
    if lacking:
        raise UndeclaredError(", ".join(dict.fromkeys(mixer.__name__ for mixer in lacking)))
