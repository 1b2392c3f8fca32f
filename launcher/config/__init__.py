"""What is asked of a run: one JSON file, checked whole before anything starts, and options that verbs share.

Imports neither torch nor deepspeed.
"""

from longstride.launcher.config.data_keys import DATA_PATHS
from longstride.launcher.config.deepspeed_keys import part_errors
from longstride.launcher.config.extending import EXPERIMENTS, find_config, load_content
from longstride.launcher.config.json_file import flattened, load_json_object
from longstride.launcher.config.loading import load_config
from longstride.launcher.config.optimization import AdafactorConfig, MuonConfig, OptimizerConfig
from longstride.launcher.config.run_config import RunConfig
from longstride.launcher.config.train_keys import GuardPolicy, GuardsConfig, TrainConfig
