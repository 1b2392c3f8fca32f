"""Names of what a run folder and an exported model hold, documented in docs/training.md."""

CONFIG = "config.json"  # of the run, of each checkpoint and of an exported model
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
GUARDS = "guards"  # a file for each step that a guard did not let pass
WEIGHTS = "model.safetensors"
STACKS = "stacks"  # of ranks that waited in vain
LOCK = ".lock"  # held by the run that writes there
