"""metrics.jsonl: reads a run's lines of JSON, and cuts off those after a step."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from longstride.launcher.output.file_names import METRICS

NO_BYTE = "pixel"  # the one unit whose tokens are no bytes: of pictures that are read by a palette
_BITS = "bits_per_"


def bits_per_byte(nats: float) -> float:
    """Nats a byte in bits a byte."""
    return nats / math.log(2)


def bits_fields(nats: float | None, unit: str = "byte") -> dict[str, float | None]:
    """A loss in nats a token as lines have it in bits, under ``bits_per_byte`` and the name of the unit.

    A pixel of a palette is no byte, and neither are its colour's channels: its bits stand under ``bits_per_pixel``
    alone, and say nothing of the picture that it was before.
    """
    names = (unit,) if unit == NO_BYTE else ("byte", unit)
    return {f"{_BITS}{name}": None if nats is None else bits_per_byte(nats) for name in names}


def bits_of(line: dict[str, Any]) -> tuple[str, float | None]:
    """A line's loss in bits, and per what: ("bits per byte", 1.2). Raises KeyError where the line has none."""
    name = next((name for name in (f"{_BITS}byte", f"{_BITS}{NO_BYTE}") if name in line), f"{_BITS}byte")
    return name.replace("_", " "), line[name]


def find_lines(run: Path, split: str) -> dict[int, dict[str, Any]]:
    """A split's whole lines by their step; without metrics.jsonl there are none."""
    path = run / METRICS
    lines = [_parsed(line) for line in _read_lines(path)] if path.exists() else []
    return {line["step"]: line for line in lines if line.get("split") == split and isinstance(line.get("step"), int)}


def cut_metrics(run: Path, step: int, reason: str = "resume", last: str = "") -> Path | None:
    """Cuts off the lines after a step, so that no step stands there twice; returns a copy of the file before.

    Torn and damaged lines are cut off as well. The copy is called ``metrics.before-REASON-N.jsonl`` and ends with
    ``last``. None where there was nothing to cut off.

    Raises:
        OSError: the disk is full; metrics.jsonl is unchanged, and no copy is left.
    """
    path = run / METRICS
    if not path.exists():
        return None
    lines = _read_lines(path)
    kept = [line for line in lines if isinstance(at := _parsed(line).get("step"), int) and at <= step]
    if kept == lines and not last:
        return None
    number = 1
    while (copy := run / f"metrics.before-{reason}-{number}.jsonl").exists():
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


def _read_lines(path: Path) -> list[str]:
    """Lines with their ends; bytes that are not UTF-8 become U+FFFD, which no line of ours holds."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


def _parsed(line: str) -> dict[str, Any]:
    """The content of a whole line; empty for a line that is torn or damaged."""
    try:
        content = json.loads(line) if line.endswith("\n") and "\ufffd" not in line else None
    except (json.JSONDecodeError, RecursionError):
        content = None
    return content if isinstance(content, dict) else {}
