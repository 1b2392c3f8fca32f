"""`longstride config schema` and `longstride completion`."""

from __future__ import annotations

import argparse

from longstride.launcher.verbs.shared import Verb, path


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longstride config schema`."""
    what = "write it to this new file, for `$schema` of configurations (default: print it)"
    parser.add_argument("--output", type=path, default=None, metavar="FILE.json", help=what)


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longstride completion`."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="shell that the script is for")


VERBS = (
    Verb(
        "config schema",
        "the JSON schema of a run",
        add_schema_arguments,
        "config.schema.run",
        examples=("longstride config schema", "longstride config schema --output longstride.schema.json"),
    ),
    Verb(
        "completion",
        "TAB completes verbs and options",
        add_completion_arguments,
        "cli.complete",
        examples=(
            "longstride completion bash",
            "longstride completion bash > ~/.local/share/bash-completion/completions/longstride",
        ),
    ),
)
