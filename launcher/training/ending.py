"""What a run says at its end: what it took, what came of it, and what to do next, or why it ends early."""

from __future__ import annotations

import shlex
from pathlib import Path

from longstride.data_pipelines.order import LostWorkerError
from longstride.launcher.checkpoints import NotSavedError, Score
from longstride.launcher.data import Run, discard_start
from longstride.launcher.output import counting, exit_codes, metrics_file
from longstride.launcher.stops import StopAskedError
from longstride.launcher.training.guards import GuardStopError


def early_end(error: Exception, run: Run, step: int) -> tuple[int, str]:
    """Return the exit code of a run that an error has ended after a step, and the line that says so.

    A run that is stopped before its first step leaves no folder behind. Errors that no run foresees are raised again.
    """
    if isinstance(error, StopAskedError) and step == 0:
        if run.ranks.is_first:
            discard_start(run.folder)
        return exit_codes.REQUEUE, f"stopped by {error} before the first step; nothing is kept"
    if isinstance(error, StopAskedError):
        return exit_codes.REQUEUE, f"stopped by {error}; --resume auto goes on"
    if isinstance(error, LostWorkerError):
        return exit_codes.HUNG, f"lost a process that reads data: {error}; --resume auto goes on"
    if isinstance(error, GuardStopError):
        return exit_codes.GUARDED, f"stopped by a guard: {error}"
    if isinstance(error, NotSavedError):
        return exit_codes.UNFORESEEN, f"error: {error}"
    raise error


def summary(run: Run, step: int, first: int, seconds: float, content_seen: int | None) -> list[str]:
    """Return lines about a run whose last step is saved.

    Args:
        step, first: the last step, and the one at which this start began.
        seconds: that this start took.
        content_seen: bytes of content that all steps have read, or pixels; None where they were not counted.
    """
    train, context = run.config.train, run.config.model.context
    is_byte = run.data.unit != metrics_file.NO_BYTE
    most = "" if run.data.fills_contexts else "up to "
    positions = step * train.global_batch * context
    seen = (
        f"{most if content_seen is None else ''}{counting.amount(positions if content_seen is None else content_seen)}"
    )
    seen += "B" if is_byte else "pixels"
    took = (
        f", in {counting.duration(seconds)}"
        if first == 0
        else f", the last {step - first:,} in {counting.duration(seconds)}"
    )
    parts = [
        f"done: {step:,} steps of {train.global_batch:,} contexts of {most}{context:,} "
        f"{'bytes' if is_byte else 'pixels'}, {seen}{took if step > first else ''}"
    ]
    scores = [each for each in Score.recorded(run.folder, run.config.data.validation_split) if each.bits_per_byte]
    if scores := [each for each in scores if each.compares_with(scores[-1])]:
        best = min(scores, key=lambda each: each.bits_per_byte or 0.0)
        unit = "bits per byte" if is_byte else f"bits per {run.data.unit}"
        parts.append(f"best {best.bits_per_byte:.4f} {unit} on {best.split}, at step {best.step:,}")
    folder = shlex.quote(str(run.folder))
    names = ("model", f"{run.folder.absolute().name}-model")  # nothing is written over
    model = shlex.quote(next((name for name in names if not Path(name).exists()), f"{names[1]}-{step}"))
    split = "" if run.data.has_split(run.config.data.validation_split) else f" --split {run.config.data.train_split}"
    return [
        f"{'; '.join(parts)}; in {run.folder}",
        f"next: longstride evaluate {folder}{split}",
        f"      longstride export {folder} --output {model}",
        f"      longstride report {folder} --output report.html",
    ]
