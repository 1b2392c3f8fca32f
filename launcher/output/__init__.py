"""The output of verbs: exit codes, lines on standard error, file names, lines of metrics, the stub for transformers.

Imports neither torch nor DeepSpeed nor NumPy: every verb starts here.
"""

from longstride.launcher.output import counting, exit_codes, file_names, hub_stub, metrics_file
from longstride.launcher.output.lasting import nonblocking_output, settle_output
from longstride.launcher.output.messages import (
    AgreedError,
    exit_on_mistake,
    mistake,
    print_if_slow,
    report,
    say,
    settle_libraries,
    version_of,
)
