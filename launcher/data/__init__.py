"""The setup of a run, and its batches from a data folder."""

from longstride.launcher.data.run import (
    RunSetup,
    WeightSource,
    check_data,
    check_output,
    discard_start,
    profile_steps,
    resolve_steps,
    steps_of,
)
from longstride.launcher.data.run_data import GlobalBatch, TrainingData, count_targets, global_batches
