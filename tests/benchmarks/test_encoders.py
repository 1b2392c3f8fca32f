"""The benchmark of two-sided attention: its models are valid, its costs those of the layers, its page has all rows."""

import pytest

from benchmarks import encoders
from benchmarks.recipe import changed, recipe
from longstride.sparse_model import ModelConfig


@pytest.mark.parametrize("name", encoders.ROWS)
def test_rows_are_masked_models_that_differ_in_attention_alone(name: str) -> None:
    content = changed(recipe(), encoders.BASE)
    model = ModelConfig.model_validate(changed(content, {"model.attention": encoders.ROWS[name]})["model"])
    assert not model.objective.causal and model.objective.num_predicted(512) == 77


def test_costs_grow_with_the_context_and_have_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "SPENT", 0.001)
    costs = [
        {"attention": name, "context": context} | encoders.cost(name, context)
        for context in (256, 1024)
        for name in encoders.COSTS
    ]
    assert all(row["peak_bytes"] > row["context"] * 128 * 4 for row in costs)
    run = {"bits_per_masked_byte": 2.5, "seconds": 3.0}
    result = {"device": "a card", "torch": "2", "date": "today", "steps": 7, "costs": costs}
    text = encoders.tables(result | {"trainings": {name: [run, run] for name in encoders.ROWS}})
    assert text.count("| dense |") == 2 and "| linformer | 2.500 (2.500–2.500) | 3 |" in text and "1,024: s" in text
