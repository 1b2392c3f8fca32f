"""Options of `longstride config schema`."""

from __future__ import annotations

import argparse


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """None: the schema is printed."""
