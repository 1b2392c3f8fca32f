"""What each verb may be asked: its options and their help, apart from the code that does the work.

Imports neither torch nor deepspeed, so that help, completion and a wrong option take a moment. A file holds one group
of verbs, as `longstride --help` lists them.
"""

from longstride.launcher.options.configuring import SIZES
from longstride.launcher.options.keys import KEYS, misspelt_keys
from longstride.launcher.options.shared import TRUST_OPTION, add_step_argument, add_trust_argument
from longstride.launcher.options.training import HOSTFILE, add_rank_arguments
from longstride.launcher.options.using import DEFAULT_SHARD_SIZE
