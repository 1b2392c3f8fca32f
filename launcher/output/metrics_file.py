"""metrics.jsonl: a run's lines of JSON, read, searched and cut."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from longstride.launcher.output.folders import METRICS


def bits_per_byte(nats: float) -> float:
    """Nats a byte in bits a byte."""
    return nats / math.log(2)


def cut_metrics(run: Path, step: int, before: str = "resume", last: str = "") -> Path | None:
    """Takes the lines after a step out of metrics.jsonl, so that no step will stand there twice.

    ``before``: a word for the name of the copy. ``last``: a line that the copy is to end with.

    Returns the copy that keeps them; None where there was nothing to take out. A line that was cut off in writing, or
    is damaged, counts as one to take out.

    Raises:
        OSError: there is no room; metrics.jsonl is as it was, and no copy is left.
    """
    path = run / METRICS
    if not path.exists():
        return None
    lines = _read_lines(path)
    kept = [line for line in lines if _is_until(line, step)]
    if kept == lines and not last:
        return None
    number = 1
    while (copy := run / f"metrics.before-{before}-{number}.jsonl").exists():
        number += 1
    partial = run / f".{METRICS}.partial"
    try:
        shutil.copy2(path, copy)
        with copy.open("a", encoding="utf-8") as file:
            file.write(last)
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        for each in (copy, partial):
            each.unlink(missing_ok=True)
        raise
    return copy


def find_lines(run: Path, split: str) -> dict[int, dict[str, Any]]:
    """A split's whole lines of metrics.jsonl by their step."""
    path = run / METRICS
    found = [_parsed(line) for line in _read_lines(path)] if path.exists() else []
    return {line["step"]: line for line in found if line.get("split") == split and isinstance(line.get("step"), int)}


def holds_line(run: Path, step: int, split: str) -> bool:
    """Whether metrics.jsonl has a split's line of a step."""
    return step in find_lines(run, split)


def _read_lines(path: Path) -> list[str]:
    """Lines with their ends; what is no UTF-8 becomes U+FFFD, which no line of ours holds."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


def _parsed(line: str) -> dict[str, Any]:
    """What a whole line holds; nothing for one that is torn or damaged."""
    try:
        content = json.loads(line) if line.endswith("\n") and "\ufffd" not in line else None
    except (json.JSONDecodeError, RecursionError):
        content = None
    return content if isinstance(content, dict) else {}


def _is_until(line: str, step: int) -> bool:
    own = _parsed(line).get("step")
    return isinstance(own, int) and own <= step
