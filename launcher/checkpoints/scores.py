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
    """The validation loss of one step."""

    step: int = Field(gt=0)
    split: str
    tokens: int  # scored bytes of content, or pixels; losses over different data do not compare
    bits_per_byte: float | None  # bits per pixel for pictures with a palette; None: not finite

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> Score:
        """Return the score in an evaluation's line of metrics.jsonl."""
        _, bits = metrics_file.bits_of(line)
        finite = bits if bits is not None and math.isfinite(bits) else None
        return cls(step=line["step"], split=line["split"], tokens=metrics_file.content_of(line), bits_per_byte=finite)

    @classmethod
    def recorded(cls, run: Path, split: str) -> list[Score]:
        """Return the scores of a split in metrics.jsonl, ordered by step."""
        lines = metrics_file.find_evaluations(run, split)
        return [cls.of_line(lines[step]) for step in sorted(lines)]

    def compares_with(self, score: Score) -> bool:
        """Whether both were measured over the same bytes."""
        return (self.split, self.tokens) == (score.split, score.tokens)

    def improves_on(self, score: Score | None, by: float) -> bool:
        """Whether it is better by more than ``by`` bits per byte.

        Any finite score improves on None and on a score that it does not compare with.
        """
        if self.bits_per_byte is None or score is None or score.bits_per_byte is None or not self.compares_with(score):
            return self.bits_per_byte is not None
        return score.bits_per_byte - self.bits_per_byte > by


def known_scores(run: Path, split: str, repeated: Iterable[Score]) -> dict[int, Score]:
    """Return the scores of a run by step, from metrics.jsonl and from ``repeated``, which its manifests hold."""
    scores = {score.step: score for score in repeated if score.split == split}
    return scores | {score.step: score for score in Score.recorded(run, split)}


def ranked(scores: Iterable[Score]) -> list[Score]:
    """Sort scores, best first and then earlier first, without those that are not finite.

    Scores that do not compare with the newest one come last.
    """
    finite = [score for score in scores if score.bits_per_byte is not None]
    newest = max(finite, key=lambda score: score.step, default=None)
    return sorted(
        finite,
        key=lambda score: (newest is not None and not score.compares_with(newest), score.bits_per_byte, score.step),
    )
