"""DeepSpeed's engine: how it is built from a configuration, one step of it, and the device that it runs on.

Whatever DeepSpeed does otherwise than a run needs is mended here. Importing it imports deepspeed.
"""

from longstride.launcher.engine import states
from longstride.launcher.engine.build import apply_settings, build_engine, check_engine, weights_are_finite
from longstride.launcher.engine.device import compile_kernels, prepare_accelerator, random_states, set_random_states
from longstride.launcher.engine.optimizer import TRAINED, add_weights_argument, parameter_groups
from longstride.launcher.engine.states import AVERAGE
from longstride.launcher.engine.step import EngineStep, Overflow
