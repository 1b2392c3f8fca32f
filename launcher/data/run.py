"""What is asked of a run, as one value, and what can be found wrong with it before it starts. Imports no deepspeed."""

from __future__ import annotations

import argparse
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, TrainConfig
from longstride.launcher.data.run_data import RunData
from longstride.launcher.output import file_names, say
from longstride.launcher.ranks import Ranks
from longstride.launcher.stops import StopFlag

# What a start writes before its first step, beside an empty folder of checkpoints and metrics without a line.
_OF_A_START = re.compile(r"config\.json|data\.json|starts\.jsonl|\.lock|hosts-\d+\.env|\.(?:stop|start)-.*")
_NUMBER = re.compile("[0-9]{1,18}")  # of a step or of steps: more digits than any run has


@dataclass(frozen=True, slots=True)
class FromOptions:
    """Where a run's first weights come from, as it is asked: `--from` and the options beside it."""

    path: Path  # an exported model's folder, or a run's
    step: int | Literal["best"] | None = None  # of a run; None: its newest
    weights: str = "trained"  # or "ema"
    positions: str | None = None  # repeat, interpolate or fresh: how position tables of other sizes are made
    partly: bool = False  # whether what does not fit begins anew

    @classmethod
    def of(cls, arguments: argparse.Namespace, resume: str, *, elsewhere: bool = False) -> FromOptions | None:
        """By a command line and what its --resume says; None: it names no source.

        A folder that only hosts ``elsewhere`` have is checked there.

        Raises:
            ConfigError: the folder is none, or an option makes no sense.
        """
        beside = {
            "--from-step": arguments.from_step,
            "--from-weights": arguments.from_weights if arguments.from_weights != "trained" else None,
            "--from-positions": arguments.from_positions,
            "--from-partly": arguments.from_partly or None,
        }
        if arguments.source is None:
            for option, given in beside.items():
                if given is not None:
                    shown = option if given is True else f"{option}={given}"
                    raise ConfigError(f"{shown}: says how weights are taken, and no --from says where from; give both")
            return None
        path = Path(arguments.source)
        if resume not in ("auto", "never"):
            rule = f"says where a run begins, and --resume={resume} has it go on; leave one of them out"
            raise ConfigError(f"--from={path}: {rule}")
        there = path.is_dir() and ((path / file_names.CONFIG).exists() or (path / file_names.CHECKPOINTS).is_dir())
        if not there and not elsewhere and resume != "auto":  # which may not need it
            what = "holds no model" if path.is_dir() else "no such folder"
            raise ConfigError(f"--from={path}: {what}; name a folder of `longstride export`, or a run folder")
        return cls(path, *(getattr(arguments, f"from_{name}") for name in ("step", "weights", "positions", "partly")))

    def words(self) -> list[str]:
        """The same on a command line that is read in any folder."""
        words = ["--from", str(self.path.absolute()), "--from-weights", self.weights]
        for option, given in (("--from-step", self.step), ("--from-positions", self.positions)):
            words += [] if given is None else [option, str(given)]
        return words + ["--from-partly"] * self.partly


@dataclass(frozen=True, slots=True)
class Run:
    """All that is asked of a run on this rank, as one value. Its steps are resolved: see ``resolve_steps``."""

    config: RunConfig
    ranks: Ranks
    data: RunData
    stop: StopFlag | None = None  # None: nothing asks for one
    resume: str = "never"  # auto, best, never or a step
    epochs: float | None = None  # where the steps were given so
    profile_steps: int = 0  # that are recorded by torch's profiler
    trusted: bool = False  # whether checkpoints may hold more than tensors and numbers
    source: FromOptions | None = None  # of the first weights; None: they are drawn
    origin: dict[str, Any] | None = None  # what became of it, as manifests of checkpoints have it

    @property
    def folder(self) -> Path:
        """Where it is written to."""
        return Path(self.config.train.output)


def resolve_steps(config: RunConfig, data: RunData, ranks: Ranks | None = None) -> RunConfig:
    """The configuration with ``train.steps`` in place of ``train.epochs``; unchanged where steps are given.

    Every rank finds the same, from the manifest alone. So what is saved with a run says how long it is, whatever
    becomes of the data. The first of ``ranks`` prints it.

    Raises:
        ConfigError: the warm-up is longer than the run.
        DataError: the train split does not fit the run.
    """
    train = config.train
    if train.steps is not None or train.epochs is None:
        return config
    contexts = data.stream().lanes.num_contexts
    steps = steps_of(train, contexts)
    if ranks is not None and ranks.is_first:
        say(f"{train.epochs:g} epochs are {steps:,} steps, of {contexts:,} contexts an epoch")
    content = config.to_json()
    content["train"] |= {"steps": steps, "epochs": None}
    return RunConfig.model_validate(content)


def steps_of(train: TrainConfig, contexts: int) -> int:
    """Whole steps in the run's epochs of so many contexts; at least 1.

    Raises:
        ConfigError: the warm-up is longer.
    """
    # As the user wrote it: 0.29 of 100 contexts are 29, and 28.999… in binary.
    steps = max(1, int(Fraction(str(train.epochs)) * contexts / train.global_batch))
    if train.warmup_steps > steps:
        rule = f"must be at most the {steps:,} steps that {train.epochs:g} epochs are"
        raise ConfigError.at("train.warmup_steps", train.warmup_steps, rule)
    return steps


def check_output(output: str, resume: str, replay: str | None = None) -> None:
    """Check that a run may be written to a folder by --resume, or that it holds one for --replay. Writes nothing.

    Raises:
        ConfigError: an option is no choice; the folder is a file, cannot be written or holds a run already; or there is
            no run to replay a step of.
    """
    run = Path(output)
    if replay is not None:
        if not _NUMBER.fullmatch(replay) or int(replay) == 0:
            raise ConfigError(f"--replay={replay}: must be the number of a step, from 1 on")
        if resume != "never":
            raise ConfigError(f"--resume={resume}: a replay finds its checkpoint by itself; leave it out")
        if not (run / file_names.CONFIG).is_file():
            raise ConfigError.at("train.output", output, "holds no run to replay a step of; name one that does")
        return
    if "://" in output:
        raise ConfigError.at("train.output", output, "must be a folder on this machine, or one that it mounts")
    if resume not in ("auto", "best", "never") and not _NUMBER.fullmatch(resume):
        raise ConfigError(f"--resume={resume}: must be auto, best, never or the number of a step")
    if run.exists() and not run.is_dir():
        raise ConfigError.at("train.output", output, "must be a folder, and is a file")
    nearest = next(folder for folder in (run.absolute(), *run.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise ConfigError.at("train.output", output, f"{nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError.at("train.output", output, f"{nearest} cannot be written; name another folder")
    contents = (file_names.CONFIG, file_names.METRICS, file_names.CHECKPOINTS)
    taken = [name for name in contents if (run / name).exists()]
    if resume == "never" and taken and not _is_only_started(run):
        rule = f"holds a run already ({', '.join(taken)}); go on with --resume auto, or name another folder"
        raise ConfigError.at("train.output", output, rule)


def _is_only_started(run: Path) -> bool:
    """Whether a run folder holds what a start writes, and no step: it ended before its first one."""
    # Without a lock no run was ever there, and a config.json is somebody else's, such as an export's.
    if not (run / file_names.LOCK).exists():
        return False
    for path in run.iterdir():
        if path.name == file_names.METRICS and path.stat().st_size == 0:
            continue
        if path.name == file_names.CHECKPOINTS and path.is_dir() and not any(path.iterdir()):
            continue
        if not _OF_A_START.fullmatch(path.name):
            return False
    return True


def discard_start(run: Path) -> bool:
    """Removes a run folder that holds no step yet; returns whether none is there. Nothing may write there any more."""
    with suppress(OSError):
        if run.is_dir() and (_is_only_started(run) or not any(run.iterdir())):
            for path in run.iterdir():
                path.rmdir() if path.is_dir() else path.unlink()
            run.rmdir()
    return not run.exists()


def profile_steps(profile: str | None, replay: str | None) -> int:
    """How many steps --profile asks to record; 0 where it is not given.

    Raises:
        ConfigError: it is no number of steps, or a step is to be replayed.
    """
    if profile is None:
        return 0
    if not _NUMBER.fullmatch(profile) or int(profile) == 0:
        raise ConfigError(f"--profile={profile}: must be a number of steps, from 1 on; such as 10")
    if replay is not None:
        raise ConfigError(f"--profile={profile}: a replay writes nothing; leave it out")
    return int(profile)


def check_data(config: RunConfig, *, elsewhere: bool = False) -> None:
    """Whether the data is as the configuration says. Data that only hosts ``elsewhere`` have is checked there.

    Raises:
        ConfigError: the data does not fit it.
        DataError: the folder or a shard's index is wrong.
    """
    if elsewhere and "://" not in config.data.path and not Path(config.data.path).exists():
        return
    data = RunData(config, Ranks())
    resolve_steps(config, data)
    data.check()
