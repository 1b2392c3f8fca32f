"""The settings of an engine: the configuration decides them, and a checkpoint supplies only state.

DeepSpeed and torch save some settings beside the state, and load them in silence: the threshold of clipping, the loss
scaler, the optimiser's groups and the base rates of the schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from deepspeed import DeepSpeedEngine

from longstride.launcher.config import TrainConfig
from longstride.launcher.engine import states
from longstride.launcher.engine.optimizer import rate_factor
from longstride.launcher.models import AVERAGE

_OF_OPTIMIZER = ("clip_grad", "dynamic_loss_scale")


class Settings:
    """The settings of a fresh engine, to be applied after every load."""

    def __init__(self, engine: DeepSpeedEngine, train: TrainConfig) -> None:
        self._train = train
        self._of_optimizer = {name: value for name, value in vars(engine.optimizer).items() if name in _OF_OPTIMIZER}
        self._scaler = copy.copy(states.loss_scaler(engine))
        self._groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in engine.basic_optimizer.param_groups
        ]

    def apply(self, engine: DeepSpeedEngine, scale: Mapping[str, float] | None) -> None:
        """Bring a loaded engine to these settings.

        Args:
            scale: the checkpoint's dynamic loss scale; None if it has none. It is not taken over by a fixed one.
        """
        vars(engine.optimizer).update(self._of_optimizer)
        if self._scaler is not None:
            scaler = copy.copy(self._scaler)
            if states.is_dynamic(vars(scaler)):
                if scale is not None:
                    _take_scale(vars(scaler), scale)
            elif hasattr(scaler, "cur_iter"):  # under ZeRO 0 a fixed scale counts steps too, and saves their number
                scaler.cur_iter = states.loss_scaler(engine).cur_iter
            setattr(engine.optimizer, states.scaler_name(engine), scaler)
        schedule, optimizer = engine.lr_scheduler, engine.basic_optimizer
        schedule.base_lrs = [settings["initial_lr"] for settings in self._groups]
        factor = rate_factor(self._train, schedule.last_epoch)
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(settings, lr=settings["initial_lr"] * factor)
        if self._train.ema_decay is None:  # an average that is no longer updated would be saved as if it were
            for state in optimizer.state.values():
                state.pop(AVERAGE, None)


def _take_scale(scaler: dict[str, Any], saved: Mapping[str, float]) -> None:
    """Take over the state of a saved loss scale, within the limits of the settings."""
    for name in states.SCALE_STATE:
        if name in scaler and name in saved:
            scaler[name] = saved[name] if name == "cur_scale" else int(saved[name])
    scaler["cur_scale"] = max(scaler["cur_scale"], states.lowest_scale(scaler))
    if states.HYSTERESIS in scaler and saved.get(states.HYSTERESIS) != scaler[states.HYSTERESIS]:
        scaler["cur_hysteresis"] = scaler[states.HYSTERESIS]  # counted down from another number
