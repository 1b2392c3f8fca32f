"""`longstride report RUN [RUN …] --output report.html`: how runs went, as one file that needs no network."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from longstride.data_pipelines.durable import write_new
from longstride.kernels import ConfigError
from longstride.launcher.reporting.answers import Answers, ask_all
from longstride.launcher.reporting.page import compose
from longstride.launcher.reporting.records import RunRecord, read_positions, read_run

MOST_RUNS = 12  # as many colours as can be told apart


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return its exit code.

    Raises:
        ConfigError: no run, one that is named twice or has no line yet, or an output that cannot be written.
    """
    output = arguments.output
    _check_output(output)
    if arguments.quick and arguments.by_position:
        raise ConfigError("--by-position: takes the model, which --quick leaves out; give one of the two")
    records = read_runs(arguments.runs)
    scored = []
    for path in arguments.positions:
        losses = read_positions(path)
        if losses is None:
            rule = "must be a JSON file that `longstride evaluate RUN --positions FILE.png` wrote beside its picture"
            raise ConfigError(f"--positions={path}: {rule}")
        scored.append(losses)
    answers = [Answers() for _ in records]
    if not arguments.quick:
        by_position, trusted = arguments.by_position, arguments.trust_checkpoint
        answers = [ask_all(record, by_position=by_position, trusted=trusted) for record in records]
    try:
        write_new(output, compose(records, scored, answers).encode())
    except OSError as error:
        raise ConfigError(f"--output={output}: cannot be written: {error.strerror}") from None
    print(output)
    return 0


def read_runs(folders: list[Path]) -> list[RunRecord]:
    """Read the runs of a page.

    Raises:
        ConfigError: as ``read_run``; a run is named twice, or they are too many.
    """
    if len(folders) > MOST_RUNS:
        raise ConfigError(f"{folders[MOST_RUNS]}: is run {MOST_RUNS + 1}; a page compares {MOST_RUNS} at most")
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise ConfigError(f"{folder}: is named twice; name each run once")
        seen.add(folder.resolve())
    return [read_run(folder) for folder in folders]


def _check_output(output: Path) -> None:
    """Raise ConfigError where the page cannot be written. Called before anything is read."""
    if os.path.lexists(output):
        raise ConfigError(f"--output={output}: exists already; nothing is overwritten")
    if output.suffix not in (".html", ".htm") or not output.parent.is_dir():
        raise ConfigError(f"--output={output}: must be a .html in a folder that exists; such as new.html")
    if not os.access(output.parent, os.W_OK):
        raise ConfigError(f"--output={output}: {output.parent} cannot be written; name another folder")
