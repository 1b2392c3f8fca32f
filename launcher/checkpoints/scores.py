"""Which checkpoint of a run is the best one: the validation losses of its steps, and how they are ranked.

The lines of metrics.jsonl have them. So that a run without that file still knows, each manifest repeats those of the
best checkpoints that lay beside its own when it was saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field

from longstride.launcher.output import metrics_file
from longstride.sparse_model import StrictModel


class Score(StrictModel):
    """The evaluation of one step."""

    step: int = Field(gt=0)
    split: str
    tokens: int  # bytes of content that were scored, or pixels: figures over others do not compare
    bits_per_byte: float | None  # of pictures with a palette, bits per pixel; None: no finite number

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> Score:
        """Return the score that an evaluation's line of metrics.jsonl holds."""
        _, bits = metrics_file.bits_of(line)
        finite = bits if bits is not None and math.isfinite(bits) else None
        return cls(step=line["step"], split=line["split"], tokens=metrics_file.content_of(line), bits_per_byte=finite)

    @classmethod
    def recorded(cls, run: Path, split: str) -> list[Score]:
        """Return the evaluations of a split that metrics.jsonl holds, in the order of the steps."""
        lines = metrics_file.find_evaluations(run, split)
        return [cls.of_line(lines[step]) for step in sorted(lines)]

    def compares_with(self, other: Score) -> bool:
        """Whether both were measured over the same bytes."""
        return (self.split, self.tokens) == (other.split, other.tokens)

    def improves_on(self, other: Score | None, by: float) -> bool:
        """Whether it is better by more than so many bits per byte; any number is where nothing compares with it."""
        if self.bits_per_byte is None or other is None or other.bits_per_byte is None or not self.compares_with(other):
            return self.bits_per_byte is not None
        return other.bits_per_byte - self.bits_per_byte > by


def known_scores(run: Path, split: str, repeated: Iterable[Score]) -> dict[int, Score]:
    """The evaluations of a run by their step, from metrics.jsonl and from what its manifests have ``repeated``."""
    scores = {score.step: score for score in repeated if score.split == split}
    return scores | {score.step: score for score in Score.recorded(run, split)}


def ranked(scores: Iterable[Score]) -> list[Score]:
    """Best first, of equal ones the earlier, without those that are no number.

    What was measured over other bytes than the newest comes behind all that was measured over the same.
    """
    numbers = [score for score in scores if score.bits_per_byte is not None]
    newest = max(numbers, key=lambda score: score.step, default=None)
    return sorted(
        numbers,
        key=lambda score: (newest is not None and not score.compares_with(newest), score.bits_per_byte, score.step),
    )
