"""The ladder of recipes, and ways to route to experts: their rows are configurations that train."""

from benchmarks import recipe
from benchmarks.feed_forwards import experts
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
