"""The verbs of `longstride`, a file for each group of `longstride --help`: summaries, examples and options.

Imports neither torch nor deepspeed, so that help, completion and a wrong option take a moment. Choices and defaults of
options are declared here, and the code behind them takes them from here.
"""

from longstride.launcher.verbs import data, look, train, use
from longstride.launcher.verbs.keys import KEYS, misspelt_keys
from longstride.launcher.verbs.shared import PRECISIONS, TRUST_OPTION, WEIGHTS, Verb, path
from longstride.launcher.verbs.train import HOSTFILE, SIZES, add_script_arguments
from longstride.launcher.verbs.use import DEFAULT_SHARD_SIZE
