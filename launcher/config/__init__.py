"""What a run is asked to be: one JSON file, checked whole before anything starts."""

from longstride.launcher.config.deepspeed_keys import check_packages, precision, type_problems, zero_stage
from longstride.launcher.config.json_file import flattened, load_json_object
from longstride.launcher.config.run_config import (
    DataConfig,
    GuardPolicy,
    GuardsConfig,
    RemoteConfig,
    RunConfig,
    TrainConfig,
    check_world_size,
    find_config,
    load_config,
)
from longstride.launcher.config.trust import TRUST_OPTION, add_trust_argument

__all__ = [
    "TRUST_OPTION",
    "DataConfig",
    "GuardPolicy",
    "GuardsConfig",
    "RemoteConfig",
    "RunConfig",
    "TrainConfig",
    "add_trust_argument",
    "check_packages",
    "check_world_size",
    "find_config",
    "flattened",
    "load_config",
    "load_json_object",
    "precision",
    "type_problems",
    "zero_stage",
]
