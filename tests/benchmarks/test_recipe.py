"""The ladder of recipes, ways to route to experts, and to go on from a dense model: their rows are configurations."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recipe
from benchmarks.feed_forwards import experts
from benchmarks.memories import to_sparse
from longstride.launcher.config import RunConfig


def test_every_row_is_a_configuration() -> None:
    needed = {"train.steps": 1, "train.output": "none", "data": {"path": "none"}}
    for _, row, content in recipe.all_rows():
        content["deepspeed"] = {}
        assert RunConfig.model_validate(recipe.changed(content, needed)), row.name


def test_a_change_leaves_the_rest_as_it_was() -> None:
    content = {"model": {"layers": 2, "bias": False}}
    assert recipe.changed(content, {"model.bias": None, "model.layers": 4}) == {"model": {"layers": 4}}
    assert content == {"model": {"layers": 2, "bias": False}}


def test_feed_forwards_have_equal_operations_but_for_zero_experts() -> None:
    contents = {name: experts.configuration(name) for name in experts.ROWS}
    needed = {"train.output": "run", "train.steps": 1, "data": {"path": "data"}, "deepspeed": {}}
    for content in contents.values():
        assert RunConfig.model_validate(recipe.changed(content, needed))
    top, zero, threshold, memory, dense = (experts.operations(content["model"]) for content in contents.values())
    assert memory == dense
    two = recipe.changed(contents["top 2, balance loss"], {"model.feed_forward.count": 2})
    assert top == threshold > zero and top - experts.operations(two["model"]) == 2 * 2 * 6 * 128  # of routers
    trainings = {"one": {"operations": top, "bits": [2.5, 3.5]}}
    result = {"device": "a card", "torch": "2", "date": "today", "steps": 7, "trainings": trainings}
    assert "| one | 907 | 3.000 (2.500–3.500) |" in experts.table(result)


def test_all_that_goes_on_from_a_dense_model_differs_in_attention_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[dict[str, Any], int, Path | None]] = []
    scored: list[tuple[str, ...]] = []

    def run(
        content: dict[str, Any], steps: int, _: int, __: Path, output: Path, source: Path | None = None, **___: object
    ) -> list[Any]:
        output.mkdir()
        needed = {"train.steps": steps, "train.output": str(output), "data": {"path": "data"}, "deepspeed": {}}
        RunConfig.model_validate(recipe.changed(content, needed))
        taken.append((content, steps, source))
        return [{"indexer_mass": [0.5, 0.75]}]

    def score(output: Path, *words: object) -> float:
        scored.append((output.name, *map(str, words)))
        return 2 + len(scored) / 1000

    for name, function in (("run", run), ("score", score), ("longstride", lambda *_: "")):
        monkeypatch.setattr(to_sparse, name, function)
    output = tmp_path / "rows.json"
    to_sparse.main(["--steps", "100", "--seeds", "7", "--output", str(output)])
    to_sparse.main(["--seeds", "7", "--output", str(output)])  # has its rows
    result = json.loads(output.read_text())
    names = ["dense", "256 keys, in blocks of 16", "256 keys, alone", "the last 256 keys"]
    assert [row["attention"] for row in result["rows"]] == names
    assert scored[2:5] == [("converted",), ("recovered", "--step", "3"), ("recovered",)]
    (first, *_), *later = taken
    assert first["train"]["context_schedule"][0] == {"context": 512, "steps": 70}
    assert [(steps, source and source.name) for _, steps, source in later] == [
        (10, "dense-7"),
        *[(10, "dense-7"), (1, "dense-7")] * 3,
    ]
    for content, _, _ in later:
        rest = {"model.attention": None, "train.context_schedule": None, "train.checkpoint_every": None}
        rate = {"train.learning_rate": 0.001}
        assert recipe.changed(content, rest | rate) == recipe.changed(later[0][0], rest | rate)
    text = to_sparse.table(result)
    assert "| 256 keys, alone | 2.006 | 2.007 | 2.008 | +0.006 |" in text and "| dense | 2.001 | – | 2.002 |" in text
