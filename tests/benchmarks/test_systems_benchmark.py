"""The miniature of systems: its rows are configurations that train, and its page says what the result files say."""

from __future__ import annotations

import itertools

from benchmarks import recipe, systems
from longstride.launcher.config import RunConfig


def test_every_row_is_a_configuration_of_its_own() -> None:
    needed = {"train.steps": 1, "train.output": "none", "data": {"path": "none"}, "deepspeed": {}}
    for name, rows in systems.COMPARISONS.items():
        contents = [recipe.changed(recipe.changed(recipe.recipe(), systems.BASE), row.changes) for row in rows]
        configs = [RunConfig.model_validate(recipe.changed(content, needed)) for content in contents]
        assert all(one.model != other.model for one, other in itertools.pairwise(configs)), name
        assert all(systems.sizes(content)["parameters"] > 100_000 for content in contents)
