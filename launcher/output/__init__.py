"""What a person and a launcher see of a verb: exit codes, one-line mistakes, names of files, lines of metrics.

Imports neither torch nor deepspeed.
"""

from longstride.launcher.output import exit_codes
from longstride.launcher.output.byte_counter import ByteCounter
from longstride.launcher.output.exit_codes import HUNG, WRONG_INPUT
from longstride.launcher.output.folders import (
    CHECKPOINTS,
    CONFIG,
    GUARDS,
    LOCK,
    METRICS,
    MODEL_CARD,
    STACKS,
    WEIGHTS,
    WEIGHTS_INDEX,
)
from longstride.launcher.output.lasting_output import lasting_output
from longstride.launcher.output.metrics_file import bits_per_byte, cut_metrics, find_lines, holds_line
from longstride.launcher.output.reporting import (
    AgreedError,
    is_wrong_input,
    report,
    tell_passed_over,
    told_at_once,
    told_line,
)

__all__ = [
    "CHECKPOINTS",
    "CONFIG",
    "GUARDS",
    "HUNG",
    "LOCK",
    "METRICS",
    "MODEL_CARD",
    "STACKS",
    "WEIGHTS",
    "WEIGHTS_INDEX",
    "WRONG_INPUT",
    "AgreedError",
    "ByteCounter",
    "bits_per_byte",
    "cut_metrics",
    "exit_codes",
    "find_lines",
    "holds_line",
    "is_wrong_input",
    "lasting_output",
    "report",
    "tell_passed_over",
    "told_at_once",
    "told_line",
]
