"""Names of what a run folder and an exported model hold, documented in docs/training.md."""

CONFIG = "config.json"  # of the run, of each checkpoint and of an exported model
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
GUARDS = "guards"  # a file for each step that a guard did not let pass
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"  # in its place, where the weights are cut into several files
MODEL_CARD = "README.md"
STACKS = "stacks"  # of ranks that waited in vain
LOCK = ".lock"  # held by the run that writes there
