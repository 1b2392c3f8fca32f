"""Which weights of a checkpoint are meant: as they were trained, or their moving average."""

from __future__ import annotations

TRAINED = "trained"
AVERAGE = "ema"  # its key in the optimiser's state too
