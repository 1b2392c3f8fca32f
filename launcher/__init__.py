"""Everything a person runs: the command line, training, checkpoints, evaluation, export.

`docs/architecture.md` has the rooms inside and the order in which they may import each other.
"""

import logging

import longstride

if __name__ == "launcher":
    longstride.stand_aside(__name__)

# DeepSpeed says so while it is imported, in every process and on standard output, where `evaluate` writes its result.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
