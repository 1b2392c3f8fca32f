"""`longstride config schema`: what a configuration may hold, for editors."""

from __future__ import annotations

import argparse
import json

from longstride.launcher.config.run_config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`longstride config schema` has no options."""


def run(arguments: argparse.Namespace) -> int:
    """`longstride config schema`: prints the JSON schema of a run's configuration, for editors."""
    print(json.dumps(RunConfig.model_json_schema(), indent=2))
    return 0
