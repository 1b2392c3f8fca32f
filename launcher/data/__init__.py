"""The setup of a run, its batches from a data folder, and the verbs `data build`, `data index` and `data verify`."""

from longstride.launcher.data.folders import check_location
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
