"""DeepSpeed's engine: build it from a configuration, take one step, and prepare its device.

Corrects what DeepSpeed does differently than a run needs. Imports deepspeed.
"""

from longstride.launcher.engine import states
from longstride.launcher.engine.build import (
    build_engine,
    check_engine,
    package_versions,
    weights_are_finite,
)
from longstride.launcher.engine.device import compile_kernels, prepare_accelerator, random_states, set_random_states
from longstride.launcher.engine.lanes import LaneStates
from longstride.launcher.engine.optimizer import parameter_groups, rate_change
from longstride.launcher.engine.step import EngineStep, Overflow, StepPart
