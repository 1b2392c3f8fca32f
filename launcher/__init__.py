"""Everything a person runs: the command line, training, checkpoints, evaluation, export.

`docs/architecture.md` has the rooms inside and the order in which they may import each other.
"""

import longstride

if __name__ == "launcher":
    longstride.stand_aside(__name__)
