"""A run's batches from its data folder, the steps of its epochs, and the verbs `data build`, `index` and `verify`."""

from longstride.launcher.data.checks import check_data, check_output, check_replay
from longstride.launcher.data.folders import check_location
from longstride.launcher.data.run_data import RunData, Taken, together
from longstride.launcher.data.steps import check_warmup, resolve_steps, steps_of

__all__ = [
    "RunData",
    "Taken",
    "check_data",
    "check_location",
    "check_output",
    "check_replay",
    "check_warmup",
    "resolve_steps",
    "steps_of",
    "together",
]
