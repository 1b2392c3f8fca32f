"""The configuration of a run: one JSON file, checked in full before anything starts.

Does not import DeepSpeed.
"""

from longstride.launcher.config.data_keys import DATA_PATHS
from longstride.launcher.config.deepspeed_keys import part_errors
from longstride.launcher.config.loading import (
    EXPERIMENTS,
    find_config,
    flattened,
    load_config,
    load_content,
    load_json_object,
)
from longstride.launcher.config.run_config import RunConfig, Stage
from longstride.launcher.config.train_keys import AdafactorConfig, GuardPolicy, GuardsConfig, MuonConfig, TrainConfig
