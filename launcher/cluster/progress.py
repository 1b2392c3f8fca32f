"""How far a run has come, by what lies in its folder. Reads names and the end of metrics.jsonl alone."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from longstride.launcher.output import file_names

_NAME = re.compile(r"step-(\d{8,})")
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Progress:
    """The newest of each; 0 before the first step."""

    saved: int
    recorded: int


def read_progress(run: Path) -> Progress:
    """How far the run in a folder has come; one that has not begun is at 0."""
    return Progress(max(saved_steps(run), default=0), _recorded(run / file_names.METRICS))


def saved_steps(run: Path) -> list[int]:
    """The steps that have a checkpoint; it is not looked into."""
    try:
        names = [path.name for path in (run / file_names.CHECKPOINTS).iterdir()]
    except OSError:
        return []
    return [int(found[1]) for found in map(_NAME.fullmatch, names) if found]


def is_done(run: Path, last: int | None) -> bool:
    """Whether the last step of the run in a folder is saved; None, as epochs are not counted here: by its config.json.

    That file may be of an earlier start, which had fewer steps to go.
    """
    if last is None:
        try:
            last = json.loads((run / file_names.CONFIG).read_text(encoding="utf-8"))["train"]["steps"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
    return last in saved_steps(run)


def _recorded(path: Path) -> int:
    """The newest step in metrics.jsonl; what is torn or damaged is passed over."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0
    steps = []
    for line in lines:
        try:
            steps.append(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return max((step for step in steps if isinstance(step, int)), default=0)
