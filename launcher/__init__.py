"""Everything a person runs: the command line, training, checkpoints, evaluation, export."""

import logging

# DeepSpeed says so while it is imported, in every process and on standard output, where `evaluate` writes its result.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
