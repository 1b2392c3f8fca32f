"""Options of `longstride config schema` and `longstride completion`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the schema goes."""
    what = "write it to this new file, for `$schema` of configurations (default: print it)"
    parser.add_argument("--output", type=Path, default=None, metavar="FILE.json", help=what)


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="shell that the script is for")
