"""metrics.jsonl: what a line is, a training step's or an evaluation's; reads the lines, and cuts off later ones."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

from longstride.data_pipelines.durable import flush_folder
from longstride.data_pipelines.plain_files import JSONError, open_plain, parse_json
from longstride.launcher.output.file_names import METRICS

NO_BYTE = "pixel"  # the one unit whose tokens are no bytes: of pictures that are read by a palette
_BITS = "bits_per_"
_MOST_LINE_BYTES = 2**22  # thousands of replaced contexts are told by less
# Keys and types that lines of every version have. Those of a step tell steps from evaluations, on whatever split.
_OF_EVERY_LINE = {"step": (int,), "split": (str,), "loss_nats": (float, NoneType), "tokens": (int,)}
_OF_A_STEP = {
    "learning_rate": (int, float),
    "loss_scale": (int, float),
    "grad_norm": (int, float, NoneType),
    "skipped_steps": (int,),
    "sample_ids_crc32": (int,),
    "epoch": (int,),
}


def bits_per_byte(nats: float, tokens: int, content: int) -> float:
    """Return the bits of all ``tokens``, separators included, over the bytes of ``content``; NaN without content.

    ``nats`` is the mean over the tokens.
    """
    return nats / math.log(2) * (tokens / content) if content else math.nan


def loss_fields(nats: float, tokens: int, content: int, unit: str = "byte") -> dict[str, Any]:
    """Return a loss as every line has it: in nats a token, in bits a byte, and over how much of both.

    What is not finite is None. A pixel of a palette is no byte, and neither are its colour's channels: its bits stand
    under ``bits_per_pixel`` alone, and say nothing of the picture that it was before.

    Args:
        nats: mean over the tokens.
        tokens: scored positions, without padding.
        content: those of them that hold the data, without separators.
        unit: what a token stands for.
    """
    names = (unit,) if unit == NO_BYTE else ("byte", unit)
    losses = {"loss_nats": nats} | {f"{_BITS}{name}": bits_per_byte(nats, tokens, content) for name in names}
    counts = {"tokens": tokens} if unit == NO_BYTE else {"tokens": tokens, "bytes": content}
    return {name: each if math.isfinite(each) else None for name, each in losses.items()} | counts


def content_of(line: dict[str, Any]) -> int:
    """Return the bytes of content of a line, or pixels; older lines say only how many tokens, often the same."""
    count: int = line.get("bytes", line.get("tokens", 0))
    return count


def bits_of(line: dict[str, Any]) -> tuple[str, float | None]:
    """A line's loss in bits, and per what: ("bits per byte", 1.2). Raises KeyError where the line has none."""
    name = next((name for name in (f"{_BITS}byte", f"{_BITS}{NO_BYTE}") if name in line), f"{_BITS}byte")
    return name.replace("_", " "), line[name]


def bits_text(line: dict[str, Any]) -> str:
    """Return a line's loss in bits as a person reads it, such as "1.2000 bits per byte"."""
    unit, bits = bits_of(line)
    return f"{math.nan if bits is None else bits:.4f} {unit}"


def is_step(line: dict[str, Any]) -> bool:
    """Whether a line is of a training step; any other is of an evaluation. The name of the split decides nothing."""
    return "learning_rate" in line


def check_metrics(run: Path) -> None:
    """Whether the place of metrics.jsonl is free, or a plain file's; OSError where it is not."""
    if os.path.lexists(run / METRICS):
        open_plain(run / METRICS, follow_links=False).close()


def read_lines(run: Path) -> Iterator[dict[str, Any]]:
    """Yield what each line holds, in their order; an empty dictionary for one that ``parse_line`` refuses.

    Raises:
        OSError: the file is no plain one, or cannot be read.
    """
    return (line for _, line in _read_lines(run / METRICS))


def find_steps(run: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of training steps by their step; without metrics.jsonl there are none."""
    return {line["step"]: line for line in read_lines(run) if line and is_step(line)}


def find_evaluations(run: Path, split: str) -> dict[int, dict[str, Any]]:
    """Return the evaluations of a split by their step; without metrics.jsonl there are none."""
    return {line["step"]: line for line in read_lines(run) if line and not is_step(line) and line["split"] == split}


def cut_metrics(run: Path, step: int, reason: str = "resume", last: str = "") -> Path | None:
    """Cuts off the lines after a step, so that no step stands there twice; returns a copy of the file before.

    Lines that ``parse_line`` refuses are cut out as well. The copy is called ``metrics.before-REASON-N.jsonl`` and
    ends with ``last``. Both are on the disk then. None where there was nothing to cut off.

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
        while (text := file.readline(_MOST_LINE_BYTES + 1)) and len(text) <= _MOST_LINE_BYTES:
            yield text, parse_line(text)


def parse_line(text: bytes) -> dict[str, Any]:
    """Return the content of a line; empty for one that is torn, damaged, half or holds what no run writes."""
    try:
        content = parse_json(text) if text.endswith(b"\n") else None
    except JSONError:
        return {}
    return content if isinstance(content, dict) and _is_whole(content) else {}


def _is_whole(line: dict[str, Any]) -> bool:
    """Whether a line has all that readers of its kind take from it, and nothing of the other kind."""
    types = dict(_OF_EVERY_LINE)
    if any(name in line for name in _OF_A_STEP):
        types |= _OF_A_STEP
        line = {"tokens": 0} | line  # which the first steps' lines lacked
    if "bytes" in line:
        types["bytes"] = (int,)
    bits = {f"{_BITS}{unit}": (float, NoneType) for unit in ("byte", NO_BYTE) if f"{_BITS}{unit}" in line}
    if not bits or any(type(line.get(name, ...)) not in each for name, each in (types | bits).items()):
        return False
    return line["step"] > 0 and all(0 <= line[name] < 2**63 for name in types if type(line[name]) is int)
