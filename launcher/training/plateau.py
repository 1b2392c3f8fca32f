"""Whether the validation loss of a run still falls, and why the run is over where it does not: `train.stop_when`.

An evaluation has the same bits on every rank, so all of them decide alike without asking each other.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from longstride.launcher.checkpoints import Score
from longstride.launcher.data import Run
from longstride.launcher.output import metrics_file
from longstride.sparse_model import StrictModel


class PlateauMemory(StrictModel):
    """What is remembered from evaluation to evaluation, as a checkpoint's manifest holds it."""

    step: int = Field(default=0, ge=0)  # of the last evaluation
    best: Score | None = None  # what the next one is held against
    since: int = Field(default=0, ge=0)  # evaluations in a row that did not improve on it


class Plateau:
    """Holds each evaluation of a run against the best one before it. Without `train.stop_when` it does nothing.

    ``memory``: what the checkpoint that the run goes on from remembers. All ranks must make one together.
    """

    def __init__(self, run: Run, memory: dict[str, Any] | None = None) -> None:
        self._run, self._settings = run, run.config.train.stop_when
        self.recall(memory)

    def memory(self) -> dict[str, Any] | None:
        """What a checkpoint keeps, as JSON values."""
        return self._memory.model_dump(mode="json") if self._settings else None

    def recall(self, memory: dict[str, Any] | None) -> None:
        """Goes on from a checkpoint's memory, once metrics.jsonl ends with its step. All ranks must call.

        What the memory lacks is taken from there: a checkpoint may be saved before its own step is evaluated, and that
        of a run without `train.stop_when` remembers nothing.
        """
        self._memory = PlateauMemory.model_validate(memory or {})
        if self._settings is not None:
            run = self._run
            scores = Score.recorded(run.folder, run.config.data.validation_split) if run.ranks.is_first else []
            for score in run.ranks.gather_objects(scores)[0]:
                self.add(score)

    def add(self, score: Score) -> None:
        """Takes in the evaluation of a step, in the order of the steps; of a step that is known already, nothing."""
        settings, memory = self._settings, self._memory
        if settings is None or score.step <= memory.step:
            return
        if score.improves_on(memory.best, settings.by):
            self._memory = PlateauMemory(step=score.step, best=score)
        else:
            self._memory = PlateauMemory(step=score.step, best=memory.best, since=memory.since + 1)

    @property
    def reason(self) -> str | None:
        """Why the run is over; None: it is not."""
        settings, memory = self._settings, self._memory
        if settings is None or memory.since < settings.evaluations:
            return None
        unit = metrics_file.NO_BYTE if self._run.data.unit == metrics_file.NO_BYTE else "byte"
        by = f" by more than {settings.by:g} bits per {unit}" if settings.by else ""
        since = ": none was a number"
        if memory.best is not None:
            since = f", since {memory.best.bits_per_byte:.4f} at step {memory.best.step}"
        return f"the validation loss has not improved{by} for {memory.since} evaluations in a row{since}"
