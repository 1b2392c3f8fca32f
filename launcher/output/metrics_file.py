"""metrics.jsonl: reads a run's lines of JSON, and cuts off those after a step."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from longstride.data_pipelines.durable import flush_folder
from longstride.data_pipelines.plain_files import JSONError, open_plain, parse_json
from longstride.launcher.output.file_names import METRICS

NO_BYTE = "pixel"  # the one unit whose tokens are no bytes: of pictures that are read by a palette
_BITS = "bits_per_"
MOST_LINE_BYTES = 2**22  # thousands of replaced contexts are told by less


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


def check_metrics(run: Path) -> None:
    """Whether the place of metrics.jsonl is free, or a plain file's; OSError where it is not."""
    if os.path.lexists(run / METRICS):
        open_plain(run / METRICS, follow_links=False).close()


def read_lines(run: Path) -> Iterator[dict[str, Any]]:
    """What each line holds, in their order; empty for one that is torn, damaged or holds what no run writes.

    Raises:
        OSError: the file is no plain one, or cannot be read.
    """
    return (line for _, line in _read_lines(run / METRICS))


def find_lines(run: Path, split: str) -> dict[int, dict[str, Any]]:
    """A split's whole lines by their step; without metrics.jsonl there are none."""
    return {line["step"]: line for _, line in _read_lines(run / METRICS) if line.get("split") == split}


def cut_metrics(run: Path, step: int, reason: str = "resume", last: str = "") -> Path | None:
    """Cuts off the lines after a step, so that no step stands there twice; returns a copy of the file before.

    Torn and damaged lines are cut off as well. The copy is called ``metrics.before-REASON-N.jsonl`` and ends with
    ``last``. Both are on the disk then. None where there was nothing to cut off.

    Raises:
        OSError: the disk is full, or there is no plain file; metrics.jsonl is unchanged, and no copy is left.
    """
    path = run / METRICS
    kept = [text for text, line in _read_lines(path) if line and line["step"] <= step]
    if not path.exists() or (not last and sum(map(len, kept)) == path.stat().st_size):
        return None
    number = 1
    while os.path.lexists(copy := run / f"metrics.before-{reason}-{number}.jsonl"):
        number += 1
    partial = run / f".{METRICS}.partial"
    try:
        _copy(path, copy, last)
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        flush_folder(run)  # the copy's name, before the lines are nowhere else
        partial.replace(path)
    except OSError:
        for each in (copy, partial):
            each.unlink(missing_ok=True)
        raise
    flush_folder(run)
    return copy


def _copy(path: Path, copy: Path, last: str) -> None:
    """Keeps a file under another name, with a last line; without one by a link, which takes no room and no time."""
    if not last:
        with suppress(OSError):  # some file systems have none
            os.link(path, copy, follow_symlinks=False)
            return
    shutil.copy2(path, copy, follow_symlinks=False)
    with open_plain(copy, "ab", follow_links=False) as file:
        file.write(last.encode())
        os.fsync(file.fileno())


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a file, if it is there, with their ends and their content; see ``parse_line``.

    Up to one that is longer than any of ours: what a disk or a person has put there may have no other end.
    """
    if not os.path.lexists(path):
        return
    with open_plain(path, follow_links=False) as file:
        while (text := file.readline(MOST_LINE_BYTES + 1)) and len(text) <= MOST_LINE_BYTES:
            yield text, parse_line(text)


def parse_line(text: bytes) -> dict[str, Any]:
    """The content of a line; empty for one that is torn, damaged or holds what no run writes."""
    try:
        content = parse_json(text) if text.endswith(b"\n") else None
    except JSONError:
        return {}
    if not isinstance(content, dict):
        return {}
    counts = content.get("step"), content.get("tokens", 0)
    losses = (content.get(f"{_BITS}byte"), content.get(f"{_BITS}{NO_BYTE}"))
    plain = all(type(count) is int and 0 <= count < 2**63 for count in counts)
    return content if plain and all(loss is None or type(loss) is float for loss in losses) else {}
