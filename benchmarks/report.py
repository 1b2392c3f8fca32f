"""What is said and written: tables to the terminal, all figures to JSON, a plot to PNG."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.attention.cases import Group
from benchmarks.figures import PHASES

RESULTS = Path(__file__).resolve().parent / "results"
DASH = "–"
COLUMNS = (  # title, width, field, form and factor; the three phases (or two) stand in one column
    ("ms: forward / backward / both", 30, "seconds", ".3f", 1e3),
    ("times dense", 22, "ratio_to_dense", ".2f", 1),
    ("times flex", 22, "ratio_to_flex", ".2f", 1),
    ("of ideal", 18, "fraction_of_ideal", ".0%", 1),
    ("TFLOP/s visited", 15, "tflops_on_visited", ".0f", 1),
    ("GB/s", 15, "gigabytes_per_second", ",.0f", 1),
)
TAIL = f"{'bound by':>12} {'bits':>4} {'B / pos':>8}"


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Where results go."""
    parser.add_argument("--output", type=Path, default=None, help="the JSON file")
    parser.add_argument("--overwrite", action="store_true", help="replace the file where there is one")


def check_output(parser: argparse.ArgumentParser, options: argparse.Namespace, default: str) -> None:
    """Settles the file that results go to; ends the program where it has no place or is taken."""
    options.output = options.output or RESULTS / default
    if options.output.suffix != ".json" or not options.output.parent.is_dir():
        parser.error(f"--output={options.output}: must be a .json in a folder that exists")
    if options.output.exists() and not options.overwrite:
        parser.error(f"{options.output}: exists already; --overwrite replaces it, --output names another")


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Replaces the file in one step: whoever reads it, and whenever we are killed, it is whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".partial")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(found, indent=1, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp's own is for secrets
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def cell(value: float | None, form: str = ".2f", factor: float = 1) -> str:
    """A number, or a dash."""
    return DASH if value is None else format(value * factor, form)


def print_plans(rows: list[dict[str, Any]]) -> None:
    """A table of plans."""
    print(f"\n{'plan':<16}{'context':>10}{'stride':>8}{'seconds':>10}{'KiB':>8}{'cpu chunks, s':>16}")
    for row in rows:
        print(
            f"{row['pattern']:<16}{row['context']:>10,}{row['stride']:>8}{row['plan_seconds']:>10.3f}"
            f"{row['plan_bytes'] / 2**10:>8.1f}{row['cpu_chunks_seconds']:>16.3f}"
        )


def print_timings(group: Group, rows: list[dict[str, Any]]) -> None:
    """A table of one group: milliseconds, ratios and shares of each phase."""
    first = rows[0]
    dense = ", ".join(
        f"{phase} {cell(first['dense_seconds'][phase], '.3f', 1e3)} ms ({first['dense_kernel'][phase] or DASH})"
        for phase in PHASES
    )
    print(f"\n{group.title()}; dense attention of torch: {dense}")
    for name, reason in first["dense_reasons"].items():
        print(f"dense attention by {name}: {reason}")
    print(" ".join([f"{'pattern':<15}{'density':>8}", *(f"{title:>{width}}" for title, width, *_ in COLUMNS), TAIL]))
    for row in rows:
        shown = [
            f"{' / '.join(cell(row[name][phase], form, factor) for phase in PHASES if phase in row[name]):>{width}}"
            for _, width, name, form, factor in COLUMNS
        ]
        bound = "/".join(
            {"operations": "work", "bytes": "bytes"}.get(row["bound"][phase], DASH) for phase in PHASES[:2]
        )
        same = {None: DASH, True: "yes", False: "NO"}[row["deterministic"]]
        facts = f"{bound:>12} {same:>4} {cell(row['bytes_per_position'], ',.0f'):>8}"
        print(" ".join([f"{row['pattern']:<15}{row['density']:>8.2%}", *shown, facts]))
