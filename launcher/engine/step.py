"""One optimiser step of DeepSpeed's engine, which can be dropped or undone under every ZeRO stage and precision.

DeepSpeed drops a step if a gradient is not finite. Except for ZeRO 0 in fp32, that leaves weights, moments and schedule
unchanged on all ranks. An unwanted batch therefore gets such gradients, and this module restores the other changes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from longstride.launcher.engine.device import random_states, set_random_states
from longstride.launcher.engine.states import is_dynamic, loss_scaler, lowest_scale

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class StepPart(enum.Enum):
    """The parts of a step, with their names in a trace of torch's profiler."""

    STEP = "longstride: step"  # contains the others
    DATA = "longstride: data"
    FORWARD = "longstride: forward"
    BACKWARD = "longstride: backward"
    OPTIMIZER = "longstride: optimizer"

    @contextmanager
    def marked(self, device: torch.device) -> Iterator[None]:
        """Mark the block in a trace. While the profiler records, wait at the end for the device."""
        with torch.profiler.record_function(self.value):
            yield
            if device.type != "cpu" and torch.autograd.profiler._is_profiler_enabled:
                torch.accelerator.synchronize(device)


class Overflow(enum.Enum):
    """Why the optimiser did not take a step with a finite loss."""

    SCALE = enum.auto()  # fp16: the loss scale was too high and falls, as intended
    FLOOR = enum.auto()  # fp16: the loss scale was too high, and cannot fall further
    FIXED = enum.auto()  # fp16 with a fixed scale
    GRADIENT = enum.auto()  # bf16, fp32: a gradient is not finite


class EngineStep:
    """One step: ``accumulate`` the losses of all micro-batches but the last, then ``take`` with the last loss."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._scaler = loss_scaler(engine)
        # State that a dropped step changes although the weights stay.
        self._counters = {name: getattr(engine, name) for name in _COUNTERS}
        self._random = random_states(engine.device)
        self._overflow = getattr(engine.optimizer, "overflow", None)  # of its last step; it is saved
        self._scaler_before: dict[str, Any] = {} if self._scaler is None else dict(vars(self._scaler))
        self.learning_rate = float(engine.get_lr()[0])
        self._steps_taken = engine.lr_scheduler.last_epoch  # by the optimiser before this step
        self._is_unfused = isinstance(engine.optimizer, FP16_UnfusedOptimizer)  # fp16 under ZeRO 0
        self.loss_scale = 1.0  # outside fp16
        if engine.fp16_enabled():
            holder = engine.optimizer.loss_scale_config if self._is_unfused else engine.optimizer
            self.loss_scale = float(holder.cur_scale)

    @contextmanager
    def only(self, part: str | None) -> Iterator[None]:
        """Freeze everything but one part of the network in a block that takes the step; None: nothing.

        Parameters without ``requires_grad`` take no part in the backward pass, so blocks are not recomputed in it.
        Between steps all parameters have it, since DeepSpeed saves others twice.
        """
        if part is None:
            yield
            return
        engine, model = self._engine, self._engine.module
        owners, recompute = model.parameter_parts(), model.activation_checkpoint
        frozen = [parameter for name, parameter in model.named_parameters() if owners[name] != part]
        groups = [group for group in engine.basic_optimizer.param_groups if group.get("trained") != part]
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            for group in groups:
                group["frozen"] = True
            engine.held.freeze(True)
            model.activation_checkpoint = lambda block, *inputs: block(*inputs)
            yield
        finally:
            model.activation_checkpoint = recompute
            engine.held.freeze(False)
            for group in groups:
                del group["frozen"]
            for parameter in frozen:
                parameter.requires_grad_(True)

    def accumulate(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch that is not the last."""
        self._backward(loss)
        self._engine.step()

    def take(self, loss: Tensor, *, drop: bool = False) -> float | None:
        """Run the last backward pass and the optimiser's step; return the norm of the unclipped, unscaled gradients.

        None means that the step was dropped and counted in ``engine.skipped_steps``: with ``drop``, or if the norm is
        not finite.
        """
        engine = self._engine
        self._backward(loss * math.nan if drop else loss)
        with StepPart.OPTIMIZER.marked(engine.device):
            norm = None
            engine.held.reduce(self.loss_scale)
            # ZeRO 0 in fp32: DeepSpeed clips, but does not store the norm.
            if isinstance(engine.optimizer, torch.optim.Optimizer):
                gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
                norm = float(engine.held.total_norm(gradients))
                if not math.isfinite(norm):  # DeepSpeed would step with it
                    engine.zero_grad()
                    engine.held.forget()
                    engine.tput_timer.stop(global_step=True, report_speed=False)
                    engine.skipped_steps += 1
                    engine.global_steps += 1
                    engine.global_samples += engine.train_batch_size()
                    engine.micro_steps += 1
                    return None
            engine.step()
            skipped = engine.skipped_steps > self._counters["skipped_steps"]
            if norm is None:
                norm = float(engine.get_global_grad_norm())
                if self._is_unfused:
                    norm /= self.loss_scale
            if skipped:
                engine.held.forget()
                optimizer = engine.optimizer
                if isinstance(optimizer, DeepSpeedZeroOptimizer):
                    # ZeRO 1 and 2 must forget the gradients. With an offloaded optimiser and gradients in another dtype
                    # than the model's, DeepSpeed would add those of later steps to them, and drop these steps too.
                    optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))
            else:
                engine.held.step(self._steps_taken, norm)
            return norm if math.isfinite(norm) else None

    def overflow(self) -> Overflow | None:
        """Return why the engine has dropped the step by itself; None if it has taken it."""
        if self._engine.skipped_steps == self._counters["skipped_steps"]:
            return None
        if not self._engine.fp16_enabled():
            return Overflow.GRADIENT
        before = self._scaler_before
        if not is_dynamic(before):
            return Overflow.FIXED
        # With remaining hysteresis the scale would not fall anyway.
        has_hysteresis = before.get("delayed_shift", 1) > 1 and before["cur_hysteresis"] > 1
        return Overflow.FLOOR if before["cur_scale"] <= lowest_scale(before) and not has_hysteresis else Overflow.SCALE

    def undo_scale(self) -> None:
        """Restore the loss scale: a batch that was dropped on purpose is no overflow."""
        if self._scaler is not None:
            vars(self._scaler).update(self._scaler_before)

    def undo(self) -> None:
        """Restore the engine and the random generators after a dropped step."""
        self.undo_scale()
        for name, value in self._counters.items():
            setattr(self._engine, name, value)
        if self._overflow is not None:
            self._engine.optimizer.overflow = self._overflow
        set_random_states(self._random, self._engine.device)

    def _backward(self, loss: Tensor) -> None:
        """Run ``engine.backward``, and apply the loss scale that DeepSpeed omits in fp16 under ZeRO 0.

        Its unfused fp16 optimiser divides gradients by a scale that the loss was never multiplied by.
        """
        with StepPart.BACKWARD.marked(self._engine.device):
            self._engine.backward(loss * self.loss_scale if self._is_unfused else loss)
