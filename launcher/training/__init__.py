"""The training loop, where it begins, and what its guards do."""

from longstride.launcher.training.guards import Guards, GuardStopError
from longstride.launcher.training.loop import Training
from longstride.launcher.training.replay import replay_step
from longstride.launcher.training.resume import Asked, begin, choose_start, prepare_folder

__all__ = [
    "Asked",
    "GuardStopError",
    "Guards",
    "Training",
    "begin",
    "choose_start",
    "prepare_folder",
    "replay_step",
]
