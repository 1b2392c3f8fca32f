"""What other verbs tell of a run: asked in processes of their own, as a person asks them.

So a report needs no model itself, and what a verb cannot tell costs the page that part alone.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

import longstride
from longstride.launcher.output import file_names, say
from longstride.launcher.reporting.records import RunRecord, read_positions
from longstride.launcher.verbs import TRUST_OPTION

_SECONDS = 1800.0  # that a verb may take
_AT_ONCE = 2
_WIDEST = 1600  # pixels of a picture


@dataclass
class Told:
    """What a verb gave, or why it gave nothing; ``command`` is how a person asks it."""

    command: str
    content: Any = None
    why_not: str = ""


@dataclass
class Answers:
    """Of the verbs that are asked of a run; None: not asked."""

    plan: Told | None = None
    pattern: Told | None = None
    attention: Told | None = None
    positions: Told | None = None


def ask_all(records: list[RunRecord], *, by_position: bool, trusted: bool) -> list[Answers]:
    """What the verbs tell of each run; some at a time."""
    names = ("plan", "pattern", "attention", *(("positions",) if by_position else ()))
    with tempfile.TemporaryDirectory(prefix="longstride-report-") as scratch, ThreadPoolExecutor(_AT_ONCE) as pool:
        asked: list[dict[str, Future[Told]]] = []
        for record in records:
            folder = Path(tempfile.mkdtemp(dir=scratch))
            say(f"{record.folder}: asking for {', '.join(names)}")
            asked.append({name: pool.submit(ask, name, record, folder, trusted) for name in names})
        return [Answers(**{name: future.result() for name, future in futures.items()}) for futures in asked]


def ask(name: str, record: RunRecord, folder: Path, trusted: bool) -> Told:
    """What one verb tells of a run; it may write to ``folder``."""
    run, config = str(record.folder), str(record.folder / file_names.CONFIG)
    picture = folder / f"{name}.png"
    words = {
        "plan": ["plan", config, "--processes", str(processes_of(record)), *_device_of(record), "--json"],
        "pattern": ["show", "pattern", config, "--output", picture.name],
        "attention": ["show", "attention", run, "--output", picture.name],
        "positions": ["evaluate", run, "--positions", picture.name],
    }[name]
    if trusted and name in ("attention", "positions"):
        words.append(TRUST_OPTION)
    told = Told(shlex.join(["longstride", *words]))
    words = [str(picture) if word == picture.name else word for word in words]
    package = str(Path(longstride.__file__).parents[1])
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment = kept | {"PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "longstride.launcher.cli", *words]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            env=environment,
        )
        if ended.returncode:
            errors = [line.partition("error: ")[2] for line in ended.stderr.splitlines() if "error: " in line]
            told.why_not = errors[0] if errors else f"ended with exit code {ended.returncode}"
        elif name == "plan":
            told.content = json.loads(ended.stdout)
        elif name == "positions":
            told.content = read_positions(picture.with_suffix(".json"))
        else:
            told.content = small_png(picture.read_bytes())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        told.why_not = f"gave no answer: {error}"
    return told


def processes_of(record: RunRecord) -> int:
    """How many computed the run last, as far as it tells."""
    count = record.starts[-1].get("processes") if record.starts else None
    return count if isinstance(count, int) and 0 < count < 2**20 else record.setting("train.sequence_parallel") or 1


def _device_of(record: RunRecord) -> list[str]:
    """The words that have a plan made for the kind of device that computed the run last, as far as it tells."""
    kind = record.starts[-1].get("device_type") if record.starts else None
    return ["--device", kind] if kind in ("cpu", "cuda") else []


def small_png(content: bytes) -> bytes:
    """A drawing with fewer pixels and colours, where that is smaller: a page holds many."""
    with Image.open(io.BytesIO(content)) as opened:
        picture = opened.convert("RGB")
    if picture.width > _WIDEST:
        picture = picture.resize((_WIDEST, round(picture.height * _WIDEST / picture.width)), Image.Resampling.LANCZOS)
    output = io.BytesIO()
    picture.quantize(192, dither=Image.Dither.NONE).save(output, "PNG", optimize=True)
    return min(content, output.getvalue(), key=len)
