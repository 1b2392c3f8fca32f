"""The ladder of recipes: its rows are configurations that train."""

from benchmarks import recipe
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
