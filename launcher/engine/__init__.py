"""DeepSpeed's engine: how it is built from a configuration, one step of it, and the device that it runs on.

Whatever DeepSpeed does otherwise than a run needs is mended here. Importing it imports deepspeed.
"""

from longstride.launcher.engine import states
from longstride.launcher.engine.build import (
    build_engine,
    check_engine,
    package_versions,
    weights_are_finite,
)
from longstride.launcher.engine.device import compile_kernels, prepare_accelerator, random_states, set_random_states
from longstride.launcher.engine.optimizer import parameter_groups, rate_change
from longstride.launcher.engine.step import EngineStep, Overflow, StepPart
