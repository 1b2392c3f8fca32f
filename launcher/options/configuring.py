"""Options of `longstride config schema` and `longstride completion`."""

from __future__ import annotations

import argparse


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """None: the schema is printed."""


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="shell that the script is for")
