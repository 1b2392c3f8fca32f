"""File names in a run folder and in an exported model, documented in docs/training/start.md."""

CONFIG = "config.json"  # in a run, in each of its checkpoints and in an exported model
METRICS = "metrics.jsonl"
STARTS = "starts.jsonl"  # a line for each start of a run
DATA = "data.json"  # describes the data of a run, even if its data folder is lost
CHECKPOINTS = "checkpoints"
GUARDS = "guards"  # a file for each step that a guard rejected
SAMPLES = "samples"  # of the model in training
PROFILE = "profile"  # of some steps
STACKS = "stacks"  # of ranks whose collective timed out
OVER = ".over"  # the step after which train.stop_when has ended the run
LOCK = ".lock"  # held by the run that writes to the folder
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"  # if the weights are split over several files
MODEL_CARD = "README.md"
