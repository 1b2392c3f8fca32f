"""The benchmarks of two-sided models: models are valid, costs those of layers, digits have classes, pages all rows."""

from pathlib import Path

import pytest

from benchmarks import encoders, probes
from benchmarks.recipe import changed, preset, recipe
from longstride.sparse_model import ModelConfig


@pytest.mark.parametrize("name", encoders.ROWS)
def test_rows_predict_as_many_bytes_to_both_sides(name: str) -> None:
    content = changed(recipe(), encoders.BASE)
    model = ModelConfig.model_validate(changed(content, encoders.ROWS[name])["model"])
    assert not model.objective.causal and model.objective.num_predicted(512) == 77


def test_costs_grow_with_the_context_and_have_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "SPENT", 0.001)
    costs = [
        {"attention": name, "context": context} | encoders.cost(name, context)
        for context in (256, 1024)
        for name in encoders.COSTS
    ]
    assert all(row["peak_bytes"] > row["context"] * 128 * 4 for row in costs)
    run = {"bits": 2.5, "seconds": 3.0}
    result = {"device": "a card", "torch": "2", "date": "today", "steps": 7, "costs": costs}
    text = encoders.tables(result | {"trainings": {name: [run, run] for name in encoders.ROWS}})
    assert text.count("| dense |") == 2 and "| linformer | 2.500 (2.500–2.500) |" in text and "1,024: s" in text


def test_probed_models_differ_in_what_they_predict_alone(tmp_path: Path) -> None:
    contents = [
        changed(changed(preset("image_gpt_miniature"), probes.BASE), changes) for changes in probes.ROWS.values()
    ]
    models = [ModelConfig.model_validate(content["model"]) for content in contents]
    assert [model.objective.num_predicted(196) for model in models] == [196, 29]
    assert {(model.context, model.layers, model.width, model.vocabulary) for model in models} == {(196, 8, 96, 8)}
    probes.draw_digits(tmp_path / "digits", 30)
    classes = [path.read_text() for path in sorted((tmp_path / "digits").glob("*.cls"))]
    assert len(classes) == len(list((tmp_path / "digits").glob("*.png"))) == 30 and len(set(classes)) > 5
    runs = [{"accuracies": [0.5, 0.1, 0.7]}, {"accuracies": [0.6, 0.1, 0.7]}]
    text = probes.table({"device": "a card", "torch": "2", "date": "today", "steps": 7, "trainings": {"masked": runs}})
    assert "| masked | 55% | 70% | 10 points |" in text
