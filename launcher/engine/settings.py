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
from longstride.launcher.engine.optimizer import rate_factor
from longstride.launcher.models import AVERAGE

SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # of a dynamic loss scale
HYSTERESIS = "delayed_shift"  # DeepSpeed's name of the setting that ``cur_hysteresis`` counts down from
_OF_OPTIMIZER = ("clip_grad", "dynamic_loss_scale")


class Settings:
    """The settings of a fresh engine, to be applied after every load."""

    def __init__(self, engine: DeepSpeedEngine, train: TrainConfig) -> None:
        self._train = train
        self._of_optimizer = {name: value for name, value in vars(engine.optimizer).items() if name in _OF_OPTIMIZER}
        self._scaler = copy.copy(loss_scaler(engine))
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
            if scale is not None and is_dynamic(vars(scaler)):
                _take_scale(vars(scaler), scale)
            setattr(engine.optimizer, _scaler_name(engine), scaler)
        schedule, optimizer = engine.lr_scheduler, engine.basic_optimizer
        schedule.base_lrs = [settings["initial_lr"] for settings in self._groups]
        factor = rate_factor(self._train, schedule.last_epoch)
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(settings, lr=settings["initial_lr"] * factor)
        if self._train.ema_decay is None:  # an average that is no longer updated would be saved as if it were
            for state in optimizer.state.values():
                state.pop(AVERAGE, None)


def loss_scaler(engine: DeepSpeedEngine) -> Any:
    """Return DeepSpeed's object that holds the loss scale; None where nothing does."""
    return getattr(engine.optimizer, _scaler_name(engine), None)


def dynamic_scale(engine: DeepSpeedEngine) -> dict[str, Any] | None:
    """Return the fields of the engine's loss scaler if its scale is dynamic, else None."""
    scaler = loss_scaler(engine)
    return vars(scaler) if scaler is not None and is_dynamic(vars(scaler)) else None


def is_dynamic(scaler: Mapping[str, Any]) -> bool:
    """Whether the loss scaler with these fields moves its scale."""
    return bool(scaler.get("dynamic", scaler.get("dynamic_loss_scale")))


def lowest_scale(scaler: Mapping[str, Any]) -> float:
    """Return how far the scale of the dynamic loss scaler with these fields may fall."""
    return float(scaler["min_scale"] if "min_scale" in scaler else scaler["min_loss_scale"])


def _take_scale(scaler: dict[str, Any], saved: Mapping[str, float]) -> None:
    """Take over the state of a saved loss scale, within the limits of the settings."""
    for name in SCALE_STATE:
        if name in scaler and name in saved:
            scaler[name] = saved[name] if name == "cur_scale" else int(saved[name])
    scaler["cur_scale"] = max(scaler["cur_scale"], lowest_scale(scaler))
    if HYSTERESIS in scaler and saved.get(HYSTERESIS) != scaler[HYSTERESIS]:
        scaler["cur_hysteresis"] = scaler[HYSTERESIS]  # counted down from another number


def _scaler_name(engine: DeepSpeedEngine) -> str:
    return "loss_scaler" if hasattr(engine.optimizer, "loss_scaler") else "loss_scale_config"
