"""Result files: their place, how they are written, and how their numbers are rounded and shown."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
DASH = "–"
DIGITS = 4  # significant, in files


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the result file."""
    parser.add_argument("--output", type=Path, default=None, help="the JSON file")
    parser.add_argument("--overwrite", action="store_true", help="replace the file where there is one")


def check_output(parser: argparse.ArgumentParser, options: argparse.Namespace, default: str) -> None:
    """Set `options.output`. Exit if it cannot be written, or exists and must not be replaced."""
    options.output = options.output or RESULTS / default
    if options.output.suffix != ".json" or not options.output.parent.is_dir():
        parser.error(f"--output={options.output}: must be a .json in a folder that exists")
    if options.output.exists() and not options.overwrite:
        parser.error(f"{options.output}: exists already; --overwrite replaces it, --output names another")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the file atomically, so that no reader and no kill leaves half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".partial")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(content, indent=1, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp gives 0600
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def ratio(theirs: float | None, ours: float | None) -> float | None:
    """Return how many times faster ours is; None if either is missing."""
    return None if theirs is None or ours is None else theirs / ours


def rounded(x: float | None) -> float | None:
    """Round to a few significant digits."""
    return None if x is None else float(f"{x:.{DIGITS}g}")


def cell(value: float | None, form: str = ".2f", factor: float = 1) -> str:
    """Format a number, or None as a dash."""
    return DASH if value is None else format(value * factor, form)
