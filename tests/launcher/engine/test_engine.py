"""The schedule of the learning rate, and the places of processes."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, TrainConfig
from longstride.launcher.engine.build import engine_section
from longstride.launcher.engine.optimizer import parameter_groups, rate_change, rate_factor
from longstride.launcher.ranks.processes import Ranks
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


SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {},
    "longer": {"steps": 60},
    "shorter": {"steps": 31},
    "longer warm-up": {"warmup_steps": 35},
    "shorter warm-up": {"warmup_steps": 2},
    "higher": {"learning_rate": 2e-3},
    "lower end": {"final_learning_rate": 0.0},
    "constant": {"schedule": "constant"},
    "longer constant": {"schedule": "constant", "steps": 60},
    "half a fall": {"schedule": {"type": "wsd", "decay_fraction": 0.5}},
    "a longer run with half a fall": {"schedule": {"type": "wsd", "decay_fraction": 0.5}, "steps": 60},
    "a short fall": {"schedule": {"type": "wsd", "decay_fraction": 0.05}},
    "a fall of one step": {"schedule": {"type": "wsd", "decay_fraction": 0.01}},
    "a rate of matrices": {"optimizer": {"type": "adamw", "rates": {"matrices": 5e-3}}},
    "another rate of matrices": {"optimizer": {"type": "muon", "rates": {"matrices": 6e-3}}},
    "the same rates": {"optimizer": {"type": "adamw"}, "weight_decay": 0.3, "betas": (0.8, 0.9)},
    "nothing to fall": {"final_learning_rate": 1e-3},
}


@pytest.mark.parametrize("taken", [0, 1, 9, 10, 29, 39, 40])
def test_a_change_of_the_rates_to_come_is_told_with_both_values(taken: int) -> None:
    """Every schedule after every other: a line where the rate of any later step of any part is another, else none."""
    common = {"steps": 40, "warmup_steps": 10, "learning_rate": 1e-3, "final_learning_rate": 1e-4}
    trains = {name: train_config(**common | changes) for name, changes in SCHEDULES.items()}

    def rates(train: TrainConfig, step: int) -> list[float]:
        return [train.rate_of(part) * rate_factor(train, step) for part in (None, "matrices")]

    for (old_name, old), (new_name, new) in itertools.product(trains.items(), trains.items()):
        line = rate_change(old, new, taken)
        differs = any(rates(old, step) != rates(new, step) for step in range(taken, new.last_step))
        assert (line is not None) == differs, (old_name, new_name)
        if line is None:
            continue
        part = int("rate of matrices" in line)
        assert ("was" in line.partition(": the")[2]) == (taken > 0)
        if taken:
            assert f" was {rates(old, taken - 1)[part]:.4g} at the step before," in line
        assert f" is {rates(new, taken)[part]:.4g} at the next and " in line
        assert line.endswith(f" and {rates(new, new.last_step - 1)[part]:.4g} at step {new.last_step}")
        for key in {*SCHEDULES[old_name], *SCHEDULES[new_name]} & {"steps", "learning_rate", "warmup_steps"}:
            values = getattr(new, key), getattr(old, key)
            assert values[0] == values[1] or f"train.{key}={values[0]} (was {values[1]})" in line


def test_more_steps_of_a_finished_cosine_are_told() -> None:
    common = {"warmup_steps": 0, "learning_rate": 1e-3, "final_learning_rate": 1e-4}
    line = rate_change(train_config(steps=8, **common), train_config(steps=16, **common), 8)
    numbers = "was 0.0001 at the step before, is 0.000503 at the next and 0.0001 at step 16"
    assert line == f"train.steps=16 (was 8): the learning rate {numbers}"


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
    decayed, others = (group.names for group in parameter_groups(model, split=False))
    shapes = {name: parameter.dim() for name, parameter in model.named_parameters()}
    assert sorted(decayed + others) == sorted(shapes)
    assert all(shapes[name] == 2 and name.endswith("weight") and "norm" not in name for name in decayed)
    assert all(name.endswith("bias") or "norm.weight" in name or name == "embedding.start" for name in others)


def test_ranks_are_the_launchers() -> None:
    assert Ranks.from_environment({}) == Ranks(0, 0, 1)
    assert Ranks.from_environment(rank_environment(1, 2, 29500)) == Ranks(1, 1, 2)
    assert not Ranks.from_environment(rank_environment(1, 2, 29500)).is_first


@pytest.mark.parametrize(
    ("changes", "message"), [({"RANK": "x"}, "must be integers"), ({"RANK": "2"}, "RANK=2: must be from 0 to 1")]
)
def test_wrong_ranks_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ranks.from_environment(rank_environment(1, 2, 29500) | changes)
