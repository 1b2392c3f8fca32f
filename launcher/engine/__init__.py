"""DeepSpeed's engine: how it is built from a configuration, and what it does otherwise than a run needs."""

from longstride.launcher.engine import build
from longstride.launcher.engine.accelerator import prepare_accelerator
from longstride.launcher.engine.build import apply_settings, quieten
from longstride.launcher.engine.dropped_steps import Before, Overflow, poisoned, weights_are_finite
from longstride.launcher.engine.optimizer import parameter_groups
from longstride.launcher.engine.random_states import random_states, set_random_states
from longstride.launcher.engine.warm_up import compile_kernels
from longstride.launcher.engine.weight_average import AVERAGE, TRAINED, WEIGHTS_KINDS, add_weights_argument

__all__ = [
    "AVERAGE",
    "TRAINED",
    "WEIGHTS_KINDS",
    "Before",
    "Overflow",
    "add_weights_argument",
    "apply_settings",
    "build",
    "compile_kernels",
    "parameter_groups",
    "poisoned",
    "prepare_accelerator",
    "quieten",
    "random_states",
    "set_random_states",
    "weights_are_finite",
]
