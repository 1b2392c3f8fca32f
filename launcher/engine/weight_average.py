"""A moving average of the weights, kept beside Adam's moments in the optimiser's own state.

So it is sharded as they are under every ZeRO stage, offloaded where they are, and saved and loaded with them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

AVERAGE = "ema"  # its key in the optimiser's state, and what it is called on a command line
TRAINED = "trained"
WEIGHTS_KINDS = (TRAINED, AVERAGE)


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Lets every step of the optimiser be followed by average = decay · average + (1 - decay) · weights.

    The average begins at the weights before the first step (the released code has decay 0.999).
    """
    before: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def remember(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Not put into the state yet: Adam takes one that is not empty for one that has begun.
        before.update({p: p.detach().clone() for p in _stepped(optimizer) if AVERAGE not in optimizer.state[p]})

    @torch.no_grad()
    def follow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in _stepped(optimizer):
            state = optimizer.state[parameter]
            if parameter in before:
                state[AVERAGE] = before.pop(parameter)
            state[AVERAGE].lerp_(parameter, 1 - decay)

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(follow)


def forget_average(optimizer: torch.optim.Optimizer) -> None:
    """Removes what a checkpoint brought: an average that is no longer kept would be saved as if it were."""
    for state in optimizer.state.values():
        state.pop(AVERAGE, None)


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The parameters that a step changes; under ZeRO 3 they are those of one sub-group."""
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    """The option that says which weights of a checkpoint are meant."""
    parser.add_argument(
        "--weights",
        choices=WEIGHTS_KINDS,
        default=TRAINED,
        help=f"as they were trained, or their moving average of train.ema_decay (default: {TRAINED})",
    )
