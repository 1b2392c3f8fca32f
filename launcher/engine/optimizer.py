"""AdamW and the schedule of its rate as a run's `train` object asks for them. Imports no deepspeed."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import nn

from longstride.launcher.config import TrainConfig
from longstride.launcher.engine.weight_average import keep_average


def parameter_groups(parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names of the parameters with weight decay (two or more dimensions), and of those without."""
    # Under ZeRO 3 a parameter at rest is empty; ds_shape is what it was.
    dimensions = {name: len(getattr(each, "ds_shape", each.shape)) for name, each in parameters.items()}
    return [
        [name for name, count in dimensions.items() if count >= 2],
        [name for name, count in dimensions.items() if count < 2],
    ]


def make_optimizer(parameters: Mapping[str, nn.Parameter], train: TrainConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on tensors of two or more dimensions (section 6)."""
    decayed, others = parameter_groups(parameters)
    groups = [
        {"params": [parameters[name] for name in decayed], "weight_decay": train.weight_decay},
        {"params": [parameters[name] for name in others], "weight_decay": 0.0},
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
