"""The optimiser, its schedule and the moving average of the weights, as `train` configures them.

The average is stored next to the moments in the optimiser's state, so it is sharded, offloaded, saved and loaded with
them under every ZeRO stage.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from longstride.launcher.config import AdafactorConfig, MuonConfig, TrainConfig
from longstride.launcher.engine import states
from longstride.launcher.engine.muon import Muon
from longstride.launcher.models import AVERAGE
from longstride.sparse_model import SparseTransformer

_OF_OPTIMIZER = ("clip_grad", "dynamic_loss_scale")
MATRICES, VECTORS = "matrices", "vectors"
PARTS = (MATRICES, "embeddings", "output", VECTORS)  # of the network, in the order of the groups


class Group(NamedTuple):
    """Parameters with common settings."""

    names: list[str]
    decays: bool
    part: str | None  # of the network; None: grouped by weight decay alone
    trained: str | None = None  # the module's part, if a stage trains it alone


def parameter_groups(model: SparseTransformer, *, split: bool, apart: Collection[str] = ()) -> list[Group]:
    """Return the optimiser's groups in order.

    With ``split`` there is one for each part of the network: `train.optimizer` has a rate for each. Otherwise there
    are two, the parameters with weight decay (two or more dimensions) and those without (section 6). Modules' parts
    named in ``apart`` have groups of their own.
    """
    roles = model.parameter_roles()
    unknown = {role.part for role in roles.values()} - {*PARTS, "tables"}
    assert not unknown, f"{unknown} would stay untrained"
    by_part = {part: [name for name, role in roles.items() if role.part == part] for part in PARTS}
    decayed = [name for name, role in roles.items() if role.part in PARTS and role.part != VECTORS]
    groups = [Group(decayed, True, None), Group(by_part[VECTORS], False, None)]
    if split:
        groups = [Group(names, part != VECTORS, part) for part, names in by_part.items() if names]
    if not apart:
        return groups
    owners = {name: part if part in apart else None for name, part in model.parameter_parts().items()}
    divided = [
        group._replace(names=[name for name in group.names if owners[name] == owner], trained=owner)
        for group in groups
        for owner in (None, *sorted(apart))
    ]
    return [group for group in divided if group.names]


def make_optimizer(
    parameters: Mapping[str, Tensor], groups: Iterable[Group], train: TrainConfig, *, half: bool = False
) -> torch.optim.Optimizer:
    """Make the optimiser of `train.optimizer`, with decoupled weight decay.

    ``half`` says whether the run computes in half precision.
    """
    choice, settings = train.optimizer, []
    for names, decays, part, trained in groups:
        group: dict[str, Any] = {"params": [parameters[name] for name in names]}
        group["weight_decay"] = train.weight_decay if decays else 0.0
        if part:
            group["part"] = part
        if trained:
            group["trained"] = trained
        if isinstance(choice, MuonConfig) and part == MATRICES:
            group |= {"momentum": choice.momentum, "nesterov": choice.nesterov, "steps": choice.steps}
        elif isinstance(choice, AdafactorConfig):
            group |= {"beta2_decay": choice.beta2_decay, "eps": (None, choice.smallest_scale), "d": choice.clip}
        else:
            group |= {"betas": train.betas, "eps": train.eps}
        settings.append(group)
    # The rate stays 0 until the schedule is made: DeepSpeed's fp16 optimiser takes a step in its constructor.
    optimizer: torch.optim.Optimizer
    if isinstance(choice, MuonConfig):
        # Muon prefers half precision. An fp32 run must agree to fp32 rounding in every layout.
        optimizer = Muon(settings, torch.bfloat16 if half else torch.float32)
    elif isinstance(choice, AdafactorConfig):
        optimizer = torch.optim.Adafactor(settings, lr=0.0)
    else:
        optimizer = torch.optim.AdamW(settings, lr=0.0, fused=True)
    if train.trained_parts:
        leave_frozen(optimizer)
    if train.ema_decay is not None:
        keep_average(optimizer, train.ema_decay)
    return optimizer


def make_schedule(optimizer: torch.optim.Optimizer, train: TrainConfig) -> torch.optim.lr_scheduler.LambdaLR:
    """Make the schedule of the learning rates."""
    for group in optimizer.param_groups:
        group["lr"] = train.rate_of(group.get("part"))
    return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(rate_factor, train))


def rate_factor(train: TrainConfig, step: int) -> float:
    """Return the share of the learning rate at a step counted from 0: linear warm-up, then `train.schedule`.

    Where the step's stage has another highest rate, the share is of that, times it by `train.learning_rate`.
    """
    highest = train.highest_rate(step)
    return highest / train.learning_rate * _share(train, step, train.final_learning_rate / highest)


def _share(train: TrainConfig, step: int, floor: float) -> float:
    """Return the share of the highest rate at a step, falling to ``floor``."""
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    schedule, last = train.schedule, train.last_step - 1
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        done = (step - train.warmup_steps) / max(1, last - train.warmup_steps)  # 1 at the last step
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    falling = min(round(schedule.decay_fraction * train.last_step), train.last_step - train.warmup_steps)
    done = (step - last + falling) / max(1, falling)
    return 1 - (1 - floor) * min(1.0, max(0.0, done))


def rate_change(before: TrainConfig, now: TrainConfig, taken: int) -> str | None:
    """Describe in a line how the rates of the remaining steps change; None if they do not.

    ``taken`` is the number of steps that the optimiser has taken, the last one with the settings ``before``.
    """
    parts = (None, *PARTS, "tables")

    def rate(train: TrainConfig, part: str | None, step: int) -> float:
        return train.rate_of(part) * rate_factor(train, step)

    last, old_last = now.last_step - 1, before.last_step - 1
    # Schedules consist of a warm-up, a constant and a fall. If two agree at these steps, they agree at all.
    steps = {taken, (taken + last) // 2, last - 1, last, old_last - 1, old_last}
    for train in (before, now):  # a stage may have another rate
        steps |= set(accumulate(stage.steps or 0 for stage in train.context_schedule or ()))
    steps = {step for step in steps if taken <= step <= last}
    differing = [part for part in parts if any(rate(before, part, step) != rate(now, part, step) for step in steps)]
    if not differing:
        return None
    part = differing[0]
    old, new = _rate_settings(before), _rate_settings(now)
    pairs = ((key, new.get(key, "null"), old.get(key, "null")) for key in {**old, **new})
    changes = [f"{key}={value} (was {earlier})" for key, value, earlier in pairs if value != earlier]
    line = f"{', '.join(changes)}: the learning rate{f' of {part}' if part else ''}"
    if taken:
        line += f" was {rate(before, part, taken - 1):.4g} at the step before,"
    return f"{line} is {rate(now, part, taken):.4g} at the next and {rate(now, part, last):.4g} at step {now.last_step}"


def _rate_settings(train: TrainConfig) -> dict[str, str]:
    """Return the settings that determine the rates, as JSON by their paths."""
    names = ("steps", "learning_rate", "warmup_steps", "schedule", "final_learning_rate")
    content = train.model_dump(mode="json")
    values = {name: content[name] for name in names}
    for number, stage in enumerate(train.context_schedule or ()):
        values[f"context_schedule[{number}].learning_rate"] = stage.learning_rate
    for part in (*PARTS, "tables"):
        values[f"optimizer.rates.{part}"] = getattr(train.optimizer.rates, part) if train.optimizer else None
    return {f"train.{name}": json.dumps(value) for name, value in values.items()}


def leave_frozen(optimizer: torch.optim.Optimizer) -> None:
    """Let steps leave out groups marked as frozen: their weights, moments, average and counts. See ``EngineStep``."""
    left_out: list[tuple[dict[str, Any], list[Tensor]]] = []

    def take_out(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if group.get("frozen"):
                left_out.append((group, group["params"]))
                group["params"] = []

    def put_back(*_: Any) -> None:
        for group, parameters in left_out:
            group["params"] = parameters
        left_out.clear()

    optimizer.register_step_pre_hook(take_out)
    optimizer.register_step_post_hook(put_back)


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Follow every optimiser step by average = decay · average + (1 - decay) · weights.

    The average begins at the weights before the first step (the released code has decay 0.999).
    """
    before: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def remember(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Not in the state yet, since Adam initialises its moments only if the state is empty.
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
    """Yield the parameters that a step changes, which under ZeRO 3 are those of one sub-group."""
    groups = (group for group in optimizer.param_groups if not group.get("frozen"))
    return (p for group in groups for p in group["params"] if p.grad is not None)


class Settings:
    """The settings of a fresh engine, to be applied after every load.

    DeepSpeed and torch silently load some settings with the state: the clipping threshold, the loss scaler, the
    optimiser's groups and the schedule's base rates. But the configuration decides, and a checkpoint supplies only
    state.
    """

    def __init__(self, engine: DeepSpeedEngine, train: TrainConfig) -> None:
        self._train = train
        self._of_optimizer = {name: value for name, value in vars(engine.optimizer).items() if name in _OF_OPTIMIZER}
        self._scaler = copy.copy(states.loss_scaler(engine))
        self._groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in engine.basic_optimizer.param_groups
        ]

    def apply(self, engine: DeepSpeedEngine, scale: Mapping[str, float] | None) -> None:
        """Reset a loaded engine to these settings.

        ``scale`` is the checkpoint's dynamic loss scale, or None. A fixed scale ignores it.
        """
        vars(engine.optimizer).update(self._of_optimizer)
        if self._scaler is not None:
            scaler = copy.copy(self._scaler)
            if states.is_dynamic(vars(scaler)):
                if scale is not None:
                    _restore_scale(vars(scaler), scale)
            elif "cur_iter" in vars(scaler):  # a fixed scale counts steps too, and saves their number
                scaler.cur_iter = engine.global_steps
            setattr(engine.optimizer, states.scaler_name(engine), scaler)
        schedule, optimizer = engine.lr_scheduler, engine.basic_optimizer
        schedule.base_lrs = [settings["initial_lr"] for settings in self._groups]
        factor = rate_factor(self._train, schedule.last_epoch)
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(settings, lr=settings["initial_lr"] * factor)
        if self._train.ema_decay is None:  # else a stale average would be saved
            for state in optimizer.state.values():
                state.pop(AVERAGE, None)


def _restore_scale(scaler: dict[str, Any], saved: Mapping[str, float]) -> None:
    """Copy the state of a saved loss scale, within the limits of the settings."""
    for name in states.SCALE_STATE:
        if name in scaler and name in saved:
            scaler[name] = saved[name] if name == "cur_scale" else int(saved[name])
    scaler["cur_scale"] = max(scaler["cur_scale"], states.lowest_scale(scaler))
    if states.HYSTERESIS in scaler and saved.get(states.HYSTERESIS) != scaler[states.HYSTERESIS]:
        scaler["cur_hysteresis"] = scaler[states.HYSTERESIS]  # counted down from another number
