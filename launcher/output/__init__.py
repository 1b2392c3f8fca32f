"""What users and launchers see of a verb: exit codes, lines on standard error, file names, the stub for
transformers, lines of metrics, and what must be settled before heavy libraries are imported.

Imports neither torch nor deepspeed nor numpy: every verb starts here.
"""

from longstride.launcher.output import counting, exit_codes, file_names, hub_stub, metrics_file
from longstride.launcher.output.lasting import lasting_output, settle_output
from longstride.launcher.output.libraries import settle_libraries, version_of
from longstride.launcher.output.messages import (
    AgreedError,
    exit_on_mistake,
    mistake,
    report,
    said_where_slow,
    say,
)
