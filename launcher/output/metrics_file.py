"""metrics.jsonl: lines of training steps and of evaluations; read the lines, and cut off later ones."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from longstride.data_pipelines.durable import flush_folder
from longstride.data_pipelines.plain_files import JSONError, open_plain, parse_json
from longstride.launcher.output.file_names import METRICS

NO_BYTE = "pixel"  # the only unit whose tokens are not bytes: pixels of a palette
LABEL = "label"  # of a document
# A loss in bits per one of these compares with no loss per another.
LOSS_UNITS = (
    *("byte", NO_BYTE, LABEL),
    *(f"{how} {unit}" for how in ("masked", "predicted") for unit in ("byte", NO_BYTE)),
)
_MOST_LINE_BYTES = 2**22  # enough for thousands of replaced contexts
# Keys and types in lines of every version. Those of a step distinguish steps from evaluations, on any split.
_LINE_KEYS = {"step": (int,), "split": (str,), "loss_nats": (float, NoneType), "tokens": (int,)}
_STEP_KEYS = {
    "learning_rate": (int, float),
    "loss_scale": (int, float),
    "grad_norm": (int, float, NoneType),
    "skipped_steps": (int,),
    "sample_ids_crc32": (int,),
    "epoch": (int,),
}


def bits_per_byte(nats: float, tokens: int, content: int) -> float:
    """Return the bits of all ``tokens``, separators included, per byte of ``content``; NaN without content.

    ``nats`` is the mean over the tokens.
    """
    return nats / math.log(2) * (tokens / content) if content else math.nan


def loss_fields(nats: float, tokens: int, content: int, unit: str = "byte") -> dict[str, Any]:
    """Return the loss fields of a line: nats per token, bits per byte, and the numbers of tokens and bytes.

    Values that are not finite become None. A pixel of a palette is not a byte, so its loss only has
    ``bits_per_pixel``. That is not comparable with the original picture. Likewise the loss of masked bytes only has
    ``bits_per_masked_byte``, without separators' share: they are masked too. So has that of predicted bytes. That of
    labels only has ``bits_per_label``, over ``tokens`` labels.

    Args:
        nats: mean over the tokens.
        tokens: scored positions, without padding.
        content: scored positions that hold data, without separators.
        unit: name of what a token stands for, or of what is predicted.
    """
    per = loss_unit(unit)
    bits = bits_per_byte(nats, tokens, content if per in ("byte", NO_BYTE) else tokens)
    losses = {"loss_nats": nats} | {bits_name(name): bits for name in (per, unit)}
    counts = {"tokens": tokens} if unit in (NO_BYTE, LABEL) else {"tokens": tokens, f"{per.split()[-1]}s": content}
    return {name: loss if math.isfinite(loss) else None for name, loss in losses.items()} | counts


def loss_unit(unit: str) -> str:
    """Return the unit of the loss where a token stands for a ``unit``: that of bytes, if it is one."""
    return unit if unit in LOSS_UNITS else "byte"


def bits_name(unit: str) -> str:
    """Return the field of a loss: "bits_per_masked_byte"."""
    return f"bits_per_{unit.replace(' ', '_')}"


def content_of(line: dict[str, Any]) -> int:
    """Return the content of a line in bytes or pixels. Older lines only have tokens, which are often the same."""
    count: int = line.get("bytes", line.get("pixels", line.get("tokens", 0)))
    return count


def bits_of(line: dict[str, Any]) -> tuple[str, float | None]:
    """Return the unit and the loss of a line in bits: ("bits per byte", 1.2). Raise KeyError if the line has none."""
    unit = next((unit for unit in LOSS_UNITS if bits_name(unit) in line), "byte")
    return f"bits per {unit}", line[bits_name(unit)]


def bits_text(line: dict[str, Any]) -> str:
    """Format a line's loss in bits, such as "1.2000 bits per byte", and its accuracy, if it has any."""
    unit, bits = bits_of(line)
    accuracy = f", accuracy {line['accuracy']:.4f}" if "accuracy" in line else ""
    return f"{math.nan if bits is None else bits:.4f} {unit}{accuracy}"


def is_step(line: dict[str, Any]) -> bool:
    """Whether a line belongs to a training step; any other belongs to an evaluation, whatever its split."""
    return "learning_rate" in line


def read_lines(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of each line in order; an empty dictionary for one that ``parse_line`` rejects.

    Raises:
        OSError: the file is not a regular one, or cannot be read.
    """
    return (line for _, line in _read_lines(run / METRICS))


def find_steps(run: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of training steps by step; none without metrics.jsonl."""
    return {line["step"]: line for line in read_lines(run) if line and is_step(line)}


def find_evaluations(run: Path, split: str) -> dict[int, dict[str, Any]]:
    """Return the evaluations of a split by step; none without metrics.jsonl."""
    return {line["step"]: line for line in read_lines(run) if line and not is_step(line) and line["split"] == split}


def cut_metrics(run: Path, step: int, reason: str = "resume", last: str = "") -> Path | None:
    """Cut off the lines after a step, so that no step occurs twice; return a copy of the previous file.

    Lines that ``parse_line`` rejects are removed too. The copy is called ``metrics.before-REASON-N.jsonl`` and ends
    with ``last``. Both files are flushed to the disk. The result is None if there was nothing to cut off.

    Raises:
        OSError: the disk is full, or there is no regular file; metrics.jsonl is unchanged, and no copy remains.
    """
    path = run / METRICS
    lines = [text for text, line in _read_lines(path) if line and line["step"] <= step]
    if not path.exists() or (not last and sum(map(len, lines)) == path.stat().st_size):
        return None
    number = 1
    while os.path.lexists(copy := run / f"metrics.before-{reason}-{number}.jsonl"):
        number += 1
    partial = run / f".{METRICS}.partial"
    try:
        shutil.copy2(path, copy, follow_symlinks=False)
        with open_plain(copy, "ab", follow_links=False) as file:
            file.write(last.encode())
            os.fsync(file.fileno())
        partial.unlink(missing_ok=True)
        with partial.open("xb") as new:
            new.writelines(lines)
            new.flush()
            os.fsync(new.fileno())
        flush_folder(run)  # the copy's name must be on the disk before the original is replaced
        partial.replace(path)
    except OSError:
        copy.unlink(missing_ok=True)
        partial.unlink(missing_ok=True)
        raise
    flush_folder(run)
    return copy


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the text and the content (see ``parse_line``) of each line of a file, if it exists.

    Reading stops at a line that is longer than any of ours, because a damaged file may have no line ends.
    """
    if not os.path.lexists(path):
        return
    with open_plain(path, follow_links=False) as file:
        while (text := file.readline(_MOST_LINE_BYTES + 1)) and len(text) <= _MOST_LINE_BYTES:
            yield text, parse_line(text)


def parse_line(text: bytes) -> dict[str, Any]:
    """Return the content of a line; empty if it is torn, damaged, incomplete or has values that no run writes."""
    try:
        content = parse_json(text) if text.endswith(b"\n") else None
    except JSONError:
        return {}
    if not isinstance(content, dict):
        return {}
    line, types = content, dict(_LINE_KEYS)
    if any(name in line for name in _STEP_KEYS):
        types |= _STEP_KEYS
        line = {"tokens": 0} | line  # the first versions wrote none for steps
    if "bytes" in line:
        types["bytes"] = (int,)
    bits = {bits_name(unit): (float, NoneType) for unit in LOSS_UNITS if bits_name(unit) in line}
    if not bits or any(type(line.get(name, ...)) not in allowed for name, allowed in (types | bits).items()):
        return {}
    is_valid = line["step"] > 0 and all(0 <= line[name] < 2**63 for name in types if type(line[name]) is int)
    return content if is_valid else {}
