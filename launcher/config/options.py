"""Options that several verbs share."""

from __future__ import annotations

import argparse

TRUST_OPTION = "--trust-checkpoint"


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """`--trust-checkpoint`, of every verb that reads a checkpoint: the user's word that it may run code."""
    parser.add_argument(
        TRUST_OPTION,
        action="store_true",
        help="open files of the checkpoint that hold more than tensors and numbers, and run the code that they ask for",
    )
