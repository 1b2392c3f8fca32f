"""Which weights of a checkpoint are meant: as they were trained, or their moving average."""

from __future__ import annotations

import argparse

TRAINED = "trained"
AVERAGE = "ema"  # its key in the optimiser's state too


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    """The option that chooses among the weights of a checkpoint."""
    parser.add_argument(
        "--weights",
        choices=(TRAINED, AVERAGE),
        default=TRAINED,
        help=f"as they were trained, or their moving average of train.ema_decay (default: {TRAINED})",
    )
