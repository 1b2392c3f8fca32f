"""`--trust-checkpoint`: a person's word that a checkpoint may run what it asks for. Imports nothing."""

from __future__ import annotations

import argparse

TRUST_OPTION = "--trust-checkpoint"


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """The option, of every verb that reads a checkpoint."""
    parser.add_argument(
        TRUST_OPTION,
        action="store_true",
        help="open files of the checkpoint that hold more than tensors and numbers, and run the code that they ask for",
    )
