"""The optimiser, the schedule of its rates and a moving average of the weights, as a run's `train` object asks.

The average is kept beside the moments in the optimiser's own state. So it is sharded as they are under every ZeRO
stage, offloaded where they are, and saved and loaded with them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstride.launcher.config import AdafactorConfig, MuonConfig, OptimizerConfig, TrainConfig
from longstride.launcher.engine.muon import Muon
from longstride.launcher.models import AVERAGE
from longstride.sparse_model import SparseTransformer

MATRICES, VECTORS = "matrices", "vectors"
PARTS = (MATRICES, "embeddings", "output", VECTORS)  # of the network, in the order of their groups


class Group(NamedTuple):
    """Parameters that the optimiser treats alike."""

    names: list[str]
    decays: bool
    part: str | None  # of the network; None: all parameters that decay, or all that do not


def parameter_groups(model: SparseTransformer, asked: OptimizerConfig | None) -> list[Group]:
    """The optimiser's groups in their order: by part of the network where `train.optimizer` is given.

    Otherwise they are the parameters with weight decay (two or more dimensions), and those without (section 6).
    """
    roles = model.parameter_roles()
    unknown = {role.part for role in roles.values()} - {*PARTS, "tables"}
    assert not unknown, f"{unknown} would stay untrained"
    by_part = {part: [name for name, role in roles.items() if role.part == part] for part in PARTS}
    if asked is not None:
        return [Group(names, part != VECTORS, part) for part, names in by_part.items() if names]
    decayed = [name for name, role in roles.items() if role.part in PARTS and role.part != VECTORS]
    return [Group(decayed, True, None), Group(by_part[VECTORS], False, None)]


def make_optimizer(
    parameters: Mapping[str, Tensor], groups: Iterable[Group], train: TrainConfig, *, half: bool = False
) -> torch.optim.Optimizer:
    """The optimiser that `train.optimizer` asks for, of parameters by name, with decoupled weight decay.

    ``half``: the run computes in half precision.
    """
    settings: list[dict[str, Any]] = [
        {"params": [parameters[name] for name in names], "weight_decay": train.weight_decay if decays else 0.0}
        | ({"part": part} if part else {})
        | _settings(train, part)
        for names, decays, part in groups
    ]
    # The rate stays 0 until the schedule is made: DeepSpeed's fp16 optimiser takes a step in its constructor.
    optimizer: torch.optim.Optimizer
    if isinstance(train.optimizer, MuonConfig):
        # Half precision is Muon's own choice. A run in fp32 is to be the same to its own rounding in every layout.
        optimizer = Muon(settings, torch.bfloat16 if half else torch.float32)
    elif isinstance(train.optimizer, AdafactorConfig):
        optimizer = torch.optim.Adafactor(settings, lr=0.0)
    else:
        optimizer = torch.optim.AdamW(settings, lr=0.0, fused=True)
    if train.ema_decay is not None:
        keep_average(optimizer, train.ema_decay)
    return optimizer


def _settings(train: TrainConfig, part: str | None) -> dict[str, Any]:
    """What the optimiser's algorithm takes for a part, rate and weight decay apart."""
    asked = train.optimizer
    if isinstance(asked, MuonConfig) and part == MATRICES:
        return {"momentum": asked.momentum, "nesterov": asked.nesterov, "steps": asked.steps}
    if isinstance(asked, AdafactorConfig):
        return {"beta2_decay": asked.beta2_decay, "eps": (None, asked.smallest_scale), "d": asked.clip}
    return {"betas": train.betas, "eps": train.eps}


def make_schedule(optimizer: torch.optim.Optimizer, train: TrainConfig) -> torch.optim.lr_scheduler.LambdaLR:
    """The rate of each step of the optimiser, from the first on."""
    for group in optimizer.param_groups:
        group["lr"] = train.rate_of(group.get("part"))
    return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(rate_factor, train))


def rate_factor(train: TrainConfig, step: int) -> float:
    """The share of the learning rate at a step counted from 0: linear warm-up, then as `train.schedule` says."""
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    schedule, last = train.schedule, train.last_step - 1
    floor = train.final_learning_rate / train.learning_rate
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        done = (step - train.warmup_steps) / max(1, last - train.warmup_steps)  # 1 at the last step
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    falling = min(round(schedule.decay_fraction * train.last_step), train.last_step - train.warmup_steps)
    done = (step - last + falling) / max(1, falling)
    return 1 - (1 - floor) * min(1.0, max(0.0, done))


def rate_change(before: TrainConfig, now: TrainConfig, taken: int) -> str | None:
    """Describe in a line how the rates of the steps to come are others than before; None where none is.

    Args:
        before: the settings that the last step was taken with.
        taken: how many steps the optimiser has taken.
    """
    parts = (None, *PARTS, "tables")

    def rate(train: TrainConfig, part: str | None, step: int) -> float:
        return train.rate_of(part) * rate_factor(train, step)

    last, old_last = now.last_step - 1, before.last_step - 1
    # Each schedule is a warm-up, a constant and a fall, so two that agree at these steps agree at all.
    steps = {taken, (taken + last) // 2, last - 1, last, old_last - 1, old_last}
    steps = {step for step in steps if taken <= step <= last}
    differing = [part for part in parts if any(rate(before, part, step) != rate(now, part, step) for step in steps)]
    if not differing:
        return None
    part = differing[0]
    old, new = _rate_settings(before), _rate_settings(now)
    changes = [f"{key}={new[key]} (was {old[key]})" for key in new if new[key] != old[key]]
    told = f"{', '.join(changes)}: the learning rate{f' of {part}' if part else ''}"
    if taken:
        told += f" was {rate(before, part, taken - 1):.4g} at the step before,"
    return f"{told} is {rate(now, part, taken):.4g} at the next and {rate(now, part, last):.4g} at step {now.last_step}"


def _rate_settings(train: TrainConfig) -> dict[str, str]:
    """By its path, each value that decides about rates, as a configuration writes it."""
    names = ("steps", "learning_rate", "warmup_steps", "schedule", "final_learning_rate")
    content = train.model_dump(mode="json")
    values = {name: content[name] for name in names}
    for part in (*PARTS, "tables"):
        values[f"optimizer.rates.{part}"] = getattr(train.optimizer.rates, part) if train.optimizer else None
    return {f"train.{name}": json.dumps(value) for name, value in values.items()}


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
