"""The benchmark of what makes far copying form: its runs go on from one another."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from benchmarks import lessons
from benchmarks.reach_tasks import Task, repeated

TINY = {"width": 32, "window": 4}
TASK = Task(repeated(4, 4), context=16, floor=0.0)


def test_a_network_keeps_its_weights_when_contexts_and_attention_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lessons, "STEP_BYTES", 64)
    pupil = lessons.Pupil(TINY, 0)
    assert not pupil.learn(TASK, lessons.DENSE, 3)
    assert pupil.steps == 3
    assert pupil.learner is not None
    weights = {name: weight.clone() for name, weight in pupil.learner.weights.items()}
    pupil.use(32, lessons.MOBA)
    assert pupil.learner.network.config.context == 32
    assert all(torch.equal(weight, weights[name]) for name, weight in pupil.learner.weights.items())


def test_training_ends_once_the_task_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lessons, "STEP_BYTES", 64)
    solved = itertools.chain([None, None], itertools.repeat(3))
    monkeypatch.setattr(lessons, "solved_at", lambda curve, floor: next(solved))
    pupil = lessons.Pupil(TINY, 0)
    assert pupil.learn(TASK, lessons.DENSE, 9)
    assert pupil.steps == 3


def test_only_missing_rows_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, int]] = []

    def row(name: str, seed: int) -> dict[str, int]:
        measured.append((name, seed))
        return {"steps": seed}

    monkeypatch.setattr(lessons, "CHANGES", {"a": {}, "b": {}})
    monkeypatch.setattr(lessons, "change_row", row)
    for seeds in ("1", "2"):
        lessons.main(["--output", str(tmp_path / "lessons.json"), "--seeds", seeds])
    assert measured == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    rows = json.loads((tmp_path / "lessons.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["a", "b", "a", "b"]
