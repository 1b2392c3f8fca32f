"""The schedule of the learning rate, and the places of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, TrainConfig
from longstride.launcher.engine.build import engine_section
from longstride.launcher.engine.optimizer import parameter_groups, rate_factor
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.training.loop import is_due
from longstride.sparse_model import SparseTransformer
from tests.harness.configs import small
from tests.harness.runs import configuration, rank_environment


def train_config(**changes: Any) -> TrainConfig:
    return RunConfig.model_validate(
        configuration(Path("data"), Path("run"))
        | {"deepspeed": {}, "train": configuration(Path("data"), Path("run"))["train"] | changes}
    ).train


def test_warm_up_is_linear_and_ends_at_the_rate() -> None:
    train = train_config(steps=100, warmup_steps=10)
    assert [rate_factor(train, step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rate_factor(train, 10) == 1.0


def test_cosine_falls_to_the_final_rate() -> None:
    train = train_config(steps=101, warmup_steps=20, learning_rate=1.0, final_learning_rate=0.1)
    assert rate_factor(train, 60) == pytest.approx(0.55)  # half way
    assert rate_factor(train, 99) > 0.1
    assert rate_factor(train, 100) == pytest.approx(0.1)  # the last of 101 steps
    assert rate_factor(train, 500) == pytest.approx(0.1)
    factors = [rate_factor(train, step) for step in range(20, 101)]
    assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize("steps", [10, 11])
def test_cosine_without_a_step_to_fall_stays(steps: int) -> None:
    assert rate_factor(train_config(steps=steps, warmup_steps=10), steps - 1) == 1.0


def test_constant_schedule_stays() -> None:
    train = train_config(steps=100, warmup_steps=2, schedule="constant")
    assert [rate_factor(train, step) for step in (0, 2, 50, 100)] == [0.5, 1.0, 1.0, 1.0]


def test_accumulation_follows_from_the_batches() -> None:
    config = RunConfig.model_validate(configuration(Path("data"), Path("run")) | {"deepspeed": {}})
    section = engine_section(config, world_size=2)
    assert section["train_batch_size"] == 8
    assert section["train_micro_batch_size_per_gpu"] == 2
    assert section["gradient_accumulation_steps"] == 2


def test_monitors_are_named_after_the_run_where_nothing_else_is_asked_for() -> None:
    given = {"tensorboard": {"enabled": True}, "csv_monitor": {"job_name": "mine"}, "wandb": {"project": "strides"}}
    config = RunConfig.model_validate(configuration(Path("data"), Path("runs/one")) | {"deepspeed": given})
    section = engine_section(config, world_size=1)
    assert section["tensorboard"] == {"enabled": True, "job_name": "one"}
    assert section["csv_monitor"] == {"job_name": "mine"}
    assert section["wandb"] == {"project": "strides", "group": "one"}
    assert config.deepspeed == given  # as it is saved


@pytest.mark.parametrize("kind", [{"type": "text", "row_width": 8}, {"type": "image", "height": 4, "width": 4}])
def test_weight_decay_is_on_tensors_of_two_dimensions_alone(kind: dict[str, Any]) -> None:
    model = SparseTransformer(small(context=48, embedding=kind))
    decayed, others = (group.names for group in parameter_groups(model, None))
    shapes = {name: parameter.dim() for name, parameter in model.named_parameters()}
    assert sorted(decayed + others) == sorted(shapes)
    assert all(shapes[name] == 2 and name.endswith("weight") and "norm" not in name for name in decayed)
    assert all(name.endswith("bias") or "norm.weight" in name or name == "embedding.start" for name in others)


def test_ranks_are_the_launchers() -> None:
    assert Ranks.from_environment({}) == Ranks(0, 0, 1)
    assert Ranks.from_environment(rank_environment(1, 2, 29500)) == Ranks(1, 1, 2)
    assert not Ranks.from_environment(rank_environment(1, 2, 29500)).is_first


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"RANK": "x"}, "must be whole numbers"), ({"RANK": "2"}, "RANK=2: must be from 0 to 1")],
)
def test_wrong_ranks_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ranks.from_environment(rank_environment(1, 2, 29500) | changes)


def test_due_after_every_so_many_steps_and_the_last() -> None:
    assert [step for step in range(1, 11) if is_due(step, 4, 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if is_due(step, 0, 10)] == [10]
