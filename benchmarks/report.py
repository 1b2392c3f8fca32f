"""Result files: their place, how they are written and continued, and how their numbers are rounded and shown."""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import slug

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DASH = "–"
DIGITS = 4  # significant, in files


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser that shows a script's docstring, with the options that select the result file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None, help="the JSON file")
    parser.add_argument("--overwrite", action="store_true", help="replace the file where there is one")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None, stem: str) -> argparse.Namespace:
    """Parse the command line, and set `options.output`: by default a file of ``stem`` and the device."""
    options = parser.parse_intermixed_args(arguments)
    check_output(parser, options, stem)
    return options


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Make an option's type: int or float, and more than 0."""

    def number(text: str) -> float:
        if (value := kind(text)) <= 0:
            raise argparse.ArgumentTypeError(f"{text}: must be more than 0")
        return value

    return number


def check_output(parser: argparse.ArgumentParser, options: argparse.Namespace, stem: str) -> None:
    """Set `options.output`. Exit if it cannot be written, or exists and must not be replaced."""
    options.output = options.output or RESULTS / f"{stem}-{slug(torch.device(getattr(options, 'device', 'cpu')))}.json"
    if options.output.suffix != ".json" or not options.output.parent.is_dir():
        parser.error(f"--output={options.output}: must be a .json in a folder that exists")
    if options.output.exists() and not options.overwrite:
        parser.error(f"{options.output}: exists already; --overwrite replaces it, --output names another")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the file atomically, so that no reader and no kill leaves half of it."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def write_result(options: argparse.Namespace, content: dict[str, Any]) -> None:
    """Write the result file and print its name."""
    write_json(options.output, content)
    print(f"\nwrote {options.output}")


def open_rows(options: argparse.Namespace, stem: str, facts: dict[str, Any]) -> None:
    """Begin the result file of a benchmark that writes rows as they finish, or continue an earlier one.

    Sets `options.output`: by default a file of ``stem`` and this machine's CPU.
    """
    options.output = options.output or RESULTS / f"{stem}-{slug(torch.device('cpu'))}.json"
    if options.overwrite or not options.output.exists():
        write_json(options.output, facts | {"rows": []})


def has_row(path: Path, key: dict[str, Any]) -> bool:
    """Whether a row of the file has these values."""
    return any(key.items() <= row.items() for row in json.loads(path.read_text())["rows"])


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Print a row and add it to the file, which several processes may extend at once."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        result = json.loads(path.read_text())
        write_json(path, result | {"rows": [*result["rows"], row]})
    finally:
        os.close(folder)
    print(json.dumps(row), flush=True)


def markdown(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table, with a newline at the end."""
    lines = ("|".join(f" {text} " if text else " " for text in map(str, row)) for row in (titles, *rows))
    header, *body = (f"|{line}|" for line in lines)
    return "\n".join([header, "|---" * len(titles) + "|", *body]) + "\n"


def ratio(theirs: float | None, ours: float | None) -> float | None:
    """Return how many times faster ours is; None if either is missing."""
    return None if theirs is None or ours is None else theirs / ours


def exponent(first: tuple[float, float], last: tuple[float, float]) -> float | None:
    """Return by which power y grows with x between two points (x, y); None for one x, or if a y is 0."""
    wider = math.log(last[0] / first[0])
    return rounded(math.log(last[1] / first[1]) / wider) if wider and first[1] and last[1] else None


def rounded(x: float | None) -> float | None:
    """Round to a few significant digits."""
    return None if x is None else float(f"{x:.{DIGITS}g}")


def cell(value: float | None, form: str = ".2f", factor: float = 1) -> str:
    """Format a number, or None as a dash."""
    return DASH if value is None else format(value * factor, form)
