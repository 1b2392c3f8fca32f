"""The training loop, the start of a run, its guards, and the replay of a step. Imports deepspeed."""

from longstride.launcher.training.guards import Guards
from longstride.launcher.training.initial import InitialWeights, agree_on_initial, open_initial
from longstride.launcher.training.loop import Trainer, compile_step, early_end, train_step
from longstride.launcher.training.monitors import claim_folders
from longstride.launcher.training.replay import replay_step
from longstride.launcher.training.resume import begin, check_agreement, choose_start, prepare_folder, set_up
