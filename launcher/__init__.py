"""Everything a person runs: the command line, training, checkpoints, evaluation, export."""
