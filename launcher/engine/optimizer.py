"""AdamW, the schedule of its rate and a moving average of the weights, as a run's `train` object asks for them.

The average is kept beside Adam's moments in the optimiser's own state. So it is sharded as they are under every ZeRO
stage, offloaded where they are, and saved and loaded with them. Imports no deepspeed.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longstride.launcher.config import TrainConfig

AVERAGE = "ema"  # its key in the optimiser's state, and what it is called on a command line
TRAINED = "trained"


def parameter_groups(parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of the parameters with weight decay (two or more dimensions), and of those without."""
    # Under ZeRO 3 a parameter at rest is empty; ds_shape is what it was.
    dimensions = {name: len(getattr(each, "ds_shape", each.shape)) for name, each in parameters.items()}
    return [
        [name for name, count in dimensions.items() if count >= 2],
        [name for name, count in dimensions.items() if count < 2],
    ]


def make_optimizer(parameters: Mapping[str, nn.Parameter], train: TrainConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on tensors of two or more dimensions (section 6)."""
    groups = [
        {"params": [parameters[name] for name in names], "weight_decay": decay}
        for names, decay in zip(parameter_groups(parameters), (train.weight_decay, 0.0), strict=True)
    ]
    # The rate stays 0 until the schedule is made: DeepSpeed's fp16 optimiser takes a step in its constructor.
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=train.betas, eps=train.eps, fused=True)
    if train.ema_decay is not None:
        keep_average(optimizer, train.ema_decay)
    return optimizer


def make_schedule(optimizer: torch.optim.Optimizer, train: TrainConfig) -> torch.optim.lr_scheduler.LambdaLR:
    """The rate of each step of the optimiser, from the first on."""
    for group in optimizer.param_groups:
        group["lr"] = train.learning_rate
    return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(rate_factor, train))


def rate_factor(train: TrainConfig, step: int) -> float:
    """The share of the learning rate at a step counted from 0: linear warm-up, then cosine or constant."""
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return 1.0
    floor = train.final_learning_rate / train.learning_rate
    done = (step - train.warmup_steps) / max(1, train.last_step - 1 - train.warmup_steps)  # 1 at the last step
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Has every step of the optimiser followed by average = decay · average + (1 - decay) · weights.

    The average begins at the weights before the first step (the released code has decay 0.999).
    """
    before: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def remember(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Not put into the state yet: Adam takes a state that is not empty for one that it has begun.
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


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The parameters that a step changes; under ZeRO 3 they are those of one sub-group."""
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    """The option that chooses among the weights of a checkpoint."""
    parser.add_argument(
        "--weights",
        choices=(TRAINED, AVERAGE),
        default=TRAINED,
        help=f"as they were trained, or their moving average of train.ema_decay (default: {TRAINED})",
    )
