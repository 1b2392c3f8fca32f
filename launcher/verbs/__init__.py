"""The verbs of `longstride`, a file for each group of `longstride --help`: summaries, examples and options.

Imports neither torch nor DeepSpeed, so that help, completion and wrong options are fast. Choices and defaults of
options are declared here, and the code of the verbs takes them from here.
"""

from longstride.launcher.verbs import data, look, train, use
from longstride.launcher.verbs.shared import CONFIGURE, KEYS, PRECISIONS, TRUST_OPTION, WEIGHTS, Verb, misspelt_keys
from longstride.launcher.verbs.train import HOSTFILE, SIZES, add_script_arguments
from longstride.launcher.verbs.use import DEFAULT_SHARD_SIZE
