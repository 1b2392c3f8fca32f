"""What other verbs tell of a run. What one cannot tell costs the page that part alone."""

from __future__ import annotations

import argparse
import io
import shlex
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from longstride.launcher.config import load_config
from longstride.launcher.output import file_names, mistake, say
from longstride.launcher.reporting.records import RunRecord, read_positions
from longstride.launcher.verbs import TRUST_OPTION

_WIDEST = 1600  # pixels of a picture


@dataclass
class Answer:
    """What a verb gave, or why it gave nothing; ``command`` is how a person asks it."""

    command: str
    content: Any = None
    why_not: str = ""


@dataclass
class Answers:
    """What the verbs tell of a run; None: not asked."""

    plan: Answer | None = None
    pattern: Answer | None = None
    attention: Answer | None = None
    positions: Answer | None = None


@dataclass(frozen=True)
class PageRun:
    """A run of the page, the name and the colour by which the page tells it from others, and what verbs answered."""

    name: str
    colour: int
    record: RunRecord
    answers: Answers


def ask_all(record: RunRecord, *, by_position: bool, trusted: bool) -> Answers:
    """Ask the verbs, one after the other."""
    config, trust = record.folder / file_names.CONFIG, [TRUST_OPTION] if trusted else []
    device = ["--device", kind] if (kind := _device_of(record)) else []
    plan = ["plan", config, "--processes", processes_of(record), *device, "--json"]
    pattern = ["show", "pattern", config, "--output", "pattern.png"]
    attention = ["show", "attention", record.folder, "--output", "attention.png", *trust]
    positions = ["evaluate", record.folder, "--positions", "positions.png", *trust]
    names = ("plan", "pattern", "attention", *(("positions",) if by_position else ()))
    say(f"{record.folder}: asking for {', '.join(names)}")
    return Answers(
        _ask(plan, lambda: plan_of(record)),
        _ask(pattern, lambda: _pattern_of(config)),
        _ask(attention, lambda: _attention_of(record.folder, trusted)),
        _ask(positions, lambda: _positions_of(record.folder, trusted)) if by_position else None,
    )


def _ask(words: list[Any], work: Callable[[], Any]) -> Answer:
    answer = Answer(shlex.join(["longstride", *map(str, words)]))
    try:
        answer.content = work()
    except Exception as error:  # of any library that a verb uses
        answer.why_not = (mistake(error) or f"{type(error).__name__}: {error}").partition("\n")[0]
    return answer


def plan_of(record: RunRecord) -> dict[str, Any]:
    """Return the plan of a run, for the processes and the kind of device that computed it last."""
    from longstride.launcher.planning import plan

    config, processes = load_config(record.folder / file_names.CONFIG), processes_of(record)
    config.check_world_size(processes)
    return plan.make_plan(config, [processes], device=plan.device_of(config, _device_of(record)))


def _pattern_of(config: Path) -> bytes:
    from longstride.launcher.drawing import pattern
    from longstride.launcher.pictures import picture_of

    return small_png(picture_of(pattern.draw_pattern(config)))


def _attention_of(run: Path, trusted: bool) -> bytes:
    from longstride.launcher.drawing import attention
    from longstride.launcher.pictures import picture_of

    return small_png(picture_of(attention.draw_attention(run, trusted=trusted)))


def _positions_of(run: Path, trusted: bool) -> dict[str, Any] | None:
    from longstride.launcher.evaluation import evaluate
    from longstride.launcher.models import TRAINED

    defaults = dict.fromkeys(("step", "split", "data", "batch", "precision"))
    with tempfile.TemporaryDirectory(prefix="longstride-report-") as folder:
        picture = Path(folder) / "positions.png"
        options = {"run": run, "positions": picture, "trust_checkpoint": trusted, "weights": TRAINED}
        arguments = argparse.Namespace(**defaults, **options, min_context=0, sequence_parallel=1)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as lines:
            try:
                evaluate.run(arguments)
            except SystemExit:  # of a mistake that one of several ranks alone would meet, which it has told
                raise ValueError(lines.getvalue().rpartition("error: ")[2].strip()) from None
        return read_positions(picture.with_suffix(".json"))


def processes_of(record: RunRecord) -> int:
    """Return how many processes computed the run last, as far as it tells."""
    count = record.starts[-1].get("processes") if record.starts else None
    return count if isinstance(count, int) and 0 < count < 2**20 else record.setting("train.sequence_parallel") or 1


def _device_of(record: RunRecord) -> str | None:
    """Return the kind of device that computed the run last, as far as it tells."""
    kind = record.starts[-1].get("device_type") if record.starts else None
    return kind if kind in ("cpu", "cuda") else None


def small_png(content: bytes) -> bytes:
    """Return a drawing with fewer pixels and colours, where that is smaller: a page holds many."""
    with Image.open(io.BytesIO(content)) as opened:
        picture = opened.convert("RGB")
    if picture.width > _WIDEST:
        picture = picture.resize((_WIDEST, round(picture.height * _WIDEST / picture.width)), Image.Resampling.LANCZOS)
    output = io.BytesIO()
    picture.quantize(192, dither=Image.Dither.NONE).save(output, "PNG", optimize=True)
    return min(content, output.getvalue(), key=len)
