"""How many optimiser steps a run's epochs are: known once its data is."""

from __future__ import annotations

from fractions import Fraction

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, TrainConfig
from longstride.launcher.data.run_data import RunData
from longstride.launcher.output import say
from longstride.launcher.ranks import Ranks


def resolve_steps(config: RunConfig, data: RunData, tell: Ranks | None = None) -> RunConfig:
    """The configuration with ``train.steps`` in place of ``train.epochs``; as it is where steps are given.

    Every rank finds the same, from the manifest alone. What is saved with a run thus says how long it is, whatever
    becomes of the data. The first of the ranks to ``tell`` says it.

    Raises:
        ConfigError: the warm-up is longer than the run.
        DataError: the train split does not fit the run.
    """
    train = config.train
    if train.steps is not None or train.epochs is None:
        return config
    contexts = data.stream().lanes.num_contexts
    steps = steps_of(train.epochs, contexts, train.global_batch)
    check_warmup(train, steps)
    if tell is not None and tell.is_first:
        say(f"{train.epochs:g} epochs are {steps:,} steps, of {contexts:,} contexts an epoch")
    content = config.to_json()
    content["train"] |= {"steps": steps, "epochs": None}
    return RunConfig.model_validate(content)


def check_warmup(train: TrainConfig, steps: int) -> None:
    """Whether the warm-up ends within so many steps; ConfigError if not."""
    if train.warmup_steps > steps:
        rule = f"must be at most the {steps:,} steps that {train.epochs:g} epochs are"
        raise ConfigError.at("train.warmup_steps", train.warmup_steps, rule)


def steps_of(epochs: float, contexts: int, global_batch: int) -> int:
    """Whole steps in so many epochs of so many contexts; at least 1."""
    # As a person wrote it: 0.29 of 100 contexts are 29, and 28.999… in binary.
    return max(1, int(Fraction(str(epochs)) * contexts / global_batch))
