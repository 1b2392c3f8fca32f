"""Dropping a step whole, whatever the ZeRO stage and precision. Imports deepspeed.

DeepSpeed drops a step by itself where a gradient is no finite number: under every stage but 0 in fp32 it then leaves
weights, moments and schedule as they are, on all ranks alike. So a batch that is not wanted gets such gradients, and
what a dropped step changes nonetheless is put back.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from longstride.launcher.engine.random_states import random_states, set_random_states
from longstride.launcher.ranks import Ranks

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class Overflow(enum.Enum):
    """Why the optimiser did not take a step whose loss was a number."""

    SCALE = enum.auto()  # fp16: the loss scale was too high and falls, as it is meant to
    FLOOR = enum.auto()  # fp16: so it was, and cannot fall
    FIXED = enum.auto()  # fp16 with a fixed scale
    GRADIENT = enum.auto()  # bf16, fp32: a gradient is no finite number by itself


class Before:
    """An engine before a step: what a dropped step changes although the weights stay."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._counters = {name: getattr(engine, name) for name in _COUNTERS}
        self._random = random_states(engine.device)
        self._overflow = getattr(engine.optimizer, "overflow", None)  # how its last step went, which it saves
        scaler = _scaler(engine)
        self._scaler: dict[str, Any] = {} if scaler is None else dict(vars(scaler))

    def put_back_scale(self) -> None:
        """Has the loss scale forget the step: a batch that was dropped on purpose is no overflow."""
        scaler = _scaler(self._engine)
        if scaler is not None:
            vars(scaler).update(self._scaler)

    def put_back(self) -> None:
        """Has the engine and the random generators forget the step."""
        self.put_back_scale()
        for name, value in self._counters.items():
            setattr(self._engine, name, value)
        if self._overflow is not None:
            self._engine.optimizer.overflow = self._overflow
        set_random_states(self._random, self._engine.device)

    def overflow(self) -> Overflow | None:
        """Why the engine has not taken its step since; None where it has."""
        if self._engine.skipped_steps == self._counters["skipped_steps"]:
            return None
        if not self._engine.fp16_enabled():
            return Overflow.GRADIENT
        now = self._scaler
        if not now.get("dynamic", now.get("dynamic_loss_scale")):
            return Overflow.FIXED
        lowest = now["min_scale"] if "min_scale" in now else now["min_loss_scale"]
        patient = now.get("delayed_shift", 1) > 1 and now["cur_hysteresis"] > 1  # the scale would have stayed anyway
        return Overflow.FLOOR if now["cur_scale"] <= lowest and not patient else Overflow.SCALE


def poisoned(loss: Tensor) -> Tensor:
    """A loss whose gradients are no finite numbers, so that the step is dropped."""
    return loss * math.nan


def leave_floor_to_guards(engine: DeepSpeedEngine) -> None:
    """Has DeepSpeed skip a step that overflows at the lowest loss scale, where it would raise under ZeRO 1 to 3.

    To be said before every step: a loaded checkpoint brings a scaler of its own.
    """
    scaler = _scaler(engine)
    if scaler is not None and "raise_error_at_min_scale" in vars(scaler):
        scaler.raise_error_at_min_scale = False


def drop_plain_step(engine: DeepSpeedEngine) -> None:
    """Drops the step of a plain optimiser (ZeRO 0 in fp32), to which DeepSpeed would give any gradient."""
    engine.zero_grad()
    engine.tput_timer.stop(global_step=True, report_speed=False)
    engine.skipped_steps += 1
    engine.global_steps += 1
    engine.global_samples += engine.train_batch_size()
    engine.micro_steps += 1


def forget_gradients(engine: DeepSpeedEngine) -> None:
    """Has ZeRO 1 and 2 forget the gradients of a step that was dropped.

    Where the optimiser is offloaded and gradients gather in another type than the model's, DeepSpeed would add those
    of every step after it to them, and drop them all.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))


def weights_are_finite(engine: DeepSpeedEngine, ranks: Ranks) -> bool:
    """Whether every weight of every rank is a finite number. All ranks must call."""
    # Under ZeRO 3 a parameter at rest is empty, and ds_tensor this rank's part of it.
    shards = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()]
    return all(ranks.gather_objects(all(bool(torch.isfinite(shard).all()) for shard in shards)))


def _scaler(engine: DeepSpeedEngine) -> Any:
    """What holds the loss scale; None where nothing does."""
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
