"""The benchmark of reach: its tasks can be solved as it says, and its runs learn."""

import argparse
import itertools
import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks import reach, reach_picture, reach_tasks, reach_training
from longstride.kernels import ConfigError
from longstride.launcher.config import TrainConfig
from longstride.sparse_model import ModelConfig, SparseTransformer

COPIES = {"copy at 512": 512, "copy at 513": 513, "copy at 2,048": 2_048}
TINY = {
    "layers": 2, "heads": 1, "width": 32, "attention": {"type": "dense"}, "embedding": {"type": "tokens"},
    "rotary": {}, "norm": "rms", "initialization": "zero_outputs",
}  # fmt: skip


def example(name: str, seed: int = 0, length: int | None = None, held_out: bool = False) -> reach_tasks.Example:
    task = reach_tasks.TASKS[name]
    return task.make(np.random.default_rng(seed), length or task.context, held_out)


@pytest.mark.parametrize("name", COPIES)
def test_scored_bytes_of_a_copy_are_those_at_its_distance(name: str) -> None:
    tokens, scored = example(name)
    distance = COPIES[name]
    assert scored.sum() == len(tokens) - distance
    assert (tokens[distance:] == tokens[:-distance])[scored[distance:]].all()


@pytest.mark.parametrize("is_lesson", [False, True])
def test_scored_bytes_of_induction_follow_an_earlier_copy(is_lesson: bool) -> None:
    task = reach_tasks.TASKS["induction"]
    if is_lesson:
        task = reach_tasks.lesson_of(task)
    periods = set()
    for seed in range(10):
        tokens, scored = task.make(np.random.default_rng(seed), task.context, False)
        period = int(scored.argmax()) - 4
        periods.add(period)
        assert (tokens[period:] == tokens[:-period]).all()
        assert scored[period + 4 :].all()
    assert len(periods) > 5


def test_scored_bytes_of_recall_are_values_of_earlier_keys() -> None:
    tokens, scored = example("recall")
    values = {bytes(tokens[n : n + 2]): tokens[n + 3] for n in range(0, len(tokens) // 2 - 4, 5)}
    places = np.flatnonzero(scored)
    assert len(places) == len(values) == 204
    assert all(values[bytes(tokens[place - 3 : place - 1])] == tokens[place] for place in places)


def test_the_floor_of_the_grid_is_the_entropy_of_its_bytes() -> None:
    tokens, scored = example("grid")
    above, same = tokens[: -reach_tasks.GRID_WIDTH], 0.9 + 0.1 / 64
    agreeing = float((tokens[reach_tasks.GRID_WIDTH :] == above).mean())
    assert abs(agreeing - same) < 4 * math.sqrt(same * (1 - same) / len(above))
    assert reach_tasks.grid_floor() == pytest.approx(-same * math.log2(same) - (1 - same) * math.log2(0.1 / 64))
    assert not scored[: reach_tasks.GRID_WIDTH].any()


def test_versions_begin_at_the_same_place_and_split_by_files() -> None:
    training, held_out = reach_tasks.version_pairs()
    assert not {new for _, new in training} & {new for _, new in held_out}
    for seed in range(5):
        tokens, scored = example("versions", seed, held_out=True)
        content = tokens.tobytes()
        old, new = content.split(b"\0", 1)
        assert old[: reach_tasks.ANCHOR_BYTES] == new[: reach_tasks.ANCHOR_BYTES]
        assert any(old in a and new in b for a, b in held_out)
        assert int(scored.argmax()) == len(old) + 1


def test_an_edited_file_keeps_most_lines() -> None:
    content = Path(reach_tasks.__file__).read_bytes()
    edited = reach_tasks.edited(content, np.random.default_rng(0))
    lines = set(content.splitlines())
    assert edited != content
    assert sum(line in lines for line in edited.splitlines()) > 0.5 * len(lines)


def test_texts_are_split_by_files_and_batches_follow_from_their_seed() -> None:
    task = reach_tasks.TASKS["python"]
    first, again, other = (task.batch((seed, 0), 64, 2)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    training = reach_tasks.corpus("python", False).tobytes()
    held_out = reach_tasks.corpus("python", True).tobytes()
    assert all(held_out[place : place + 4_096] not in training for place in range(0, 40_000, 10_000))


def test_a_second_stage_continues_with_weights_optimiser_and_tables() -> None:
    train = TrainConfig.model_validate(reach.TRAIN | {"output": "none", "seed": 0, "steps": reach_training.CLOCK_STEPS})
    ngrams = {"ngrams": {"orders": [2], "rows": 64}}
    short, long = (reach_training.new_learner(TINY | ngrams | {"context": n}, train) for n in (16, 32))
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        short.step(tokens, 5_000)
    long.load(short.state())
    for _ in range(2):
        assert torch.equal(short.step(tokens, 5_000), long.step(tokens, 5_000))
    assert all(torch.equal(master, long.masters[name]) for name, master in short.masters.items())


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step take 1/64 s, on any machine."""
    ticks = itertools.count()
    monkeypatch.setattr(reach_training, "clock", lambda device: next(ticks) / 64)


def test_a_run_learns_within_its_time(steady_clock: None) -> None:
    task = reach_tasks.Task(reach_tasks.repeated(4, 4), context=32, floor=0.0)
    short, long = (reach_training.Stage(task, TINY | {"context": n}, 256 // n, 0.5) for n in (16, 32))
    _, begin = reach_training.trained(short, reach.TRAIN, 0, 1.0)
    network, end = reach_training.trained(long, reach.TRAIN, 0, 1.0, begin)
    assert (begin.seconds, begin.steps) == (0.5, 32)
    assert (end.seconds, end.steps, len(end.curve)) == (1.0, 32, 32)
    after = reach_training.score(task, network, 8)
    assert after["bits"] < 5.9
    assert after["by_position"][0] is None


def test_a_task_is_solved_when_the_mean_of_some_steps_is_near_the_floor() -> None:
    near, far = 1.04, 1.06
    assert reach_training.solved_at([far] * 20, 1.0) is None
    assert reach_training.solved_at([far] * 3 + [near] * 20, 1.0) in range(4, 12)
    assert reach_training.solved_at([near] * 20, None) is None


@pytest.mark.parametrize("name", reach.PATTERNS)
def test_every_pattern_has_the_parameters_of_the_stages_before_it(name: str) -> None:
    task, shapes = reach_tasks.TASKS["versions"], []
    for stage in reach.stages(task, task.context, reach.PATTERNS[name], [8, 6, 4]):
        try:
            with torch.device("meta"):
                network = SparseTransformer(ModelConfig.model_validate(stage.model))
        except ConfigError as error:
            assert "align" in str(error) and name == "strided 128, aligned"
            return
        named = network.named_parameters()
        shapes.append({path: parameter.shape for path, parameter in named if "ngrams" not in path})
    assert shapes[0] == shapes[1] == shapes[2]


def test_rows_are_written_as_they_finish_and_not_trained_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steady_clock: None
) -> None:
    output = tmp_path / "reach.json"
    monkeypatch.setattr(reach, "EVALUATED", 1)
    output.write_text(json.dumps({"rows": []}))
    options = argparse.Namespace(output=output, context=2_048, seconds=[2 / 64, 2 / 64, 2 / 64])
    for names in (["window 128"], ["window 128", "dense"]):
        reach.run_unit("induction", 0, names, options)
    rows = json.loads(output.read_text())["rows"]
    assert [row["pattern"] for row in rows] == ["window 128", "dense"]
    assert rows[1]["pairs"] == 2_048 * 2_049 // 2
    assert rows[0]["steps"] == [2, 2]
    monkeypatch.setattr(reach, "trained", None)
    reach.run_unit("induction", 0, ["window 128", "dense"], options)


def test_a_picture_has_a_point_and_a_label_for_each_pattern() -> None:
    points = [reach_picture.Point("dense", 120.0, [1.0, 1.1]), reach_picture.Point("window 128", 60.0, [1.5])]
    drawing = reach_picture.picture({"left": points, "right": points[:1]})
    ElementTree.fromstring(drawing)
    assert drawing.count("<circle") == 3
    assert drawing.count(">dense</text>") == 2
