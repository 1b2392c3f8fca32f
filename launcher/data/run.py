"""The setup of a run as one value, and the checks before it starts. Imports no DeepSpeed."""

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
from longstride.launcher.config import RunConfig
from longstride.launcher.data.run_data import TrainingData
from longstride.launcher.output import file_names, say
from longstride.launcher.ranks import Ranks
from longstride.launcher.stops import StopFlag

# The files of a start before its first step, besides an empty folder of checkpoints and empty metrics.
_START_FILES = re.compile(r"config\.json|data\.json|starts\.jsonl|\.lock|hosts-\d+\.env|\.(?:stop|start)-.*")
_NUMBER = re.compile("[0-9]{1,18}")  # of a step or of steps


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The source of a run's first weights: `--from` and its options."""

    path: Path  # folder of an exported model or of a run
    step: int | Literal["best"] | None = None  # checkpoint of a run; None: the newest
    weights: str = "trained"  # or "ema"
    positions: str | None = None  # repeat, interpolate or fresh: for position tables of other sizes
    partly: bool = False  # whether parameters that do not fit begin anew

    @classmethod
    def of(cls, arguments: argparse.Namespace, resume: str, *, elsewhere: bool = False) -> WeightSource | None:
        """Return the options of a command line, or None without --from. ``resume`` is the value of --resume.

        If only hosts ``elsewhere`` have the folder, they check it.

        Raises:
            ConfigError: the folder holds no model, or an option makes no sense.
        """
        options = {
            "--from-step": arguments.from_step,
            "--from-weights": arguments.from_weights if arguments.from_weights != "trained" else None,
            "--from-positions": arguments.from_positions,
            "--from-partly": arguments.from_partly or None,
        }
        if arguments.source is None:
            for option, value in options.items():
                if value is not None:
                    shown = option if value is True else f"{option}={value}"
                    raise ConfigError(f"{shown}: only applies with --from; give --from too, or leave it out")
            return None
        path = Path(arguments.source)
        if resume not in ("auto", "never"):
            rule = f"begins a run, but --resume={resume} continues one; leave one of them out"
            raise ConfigError(f"--from={path}: {rule}")
        has_model = path.is_dir() and ((path / file_names.CONFIG).exists() or (path / file_names.CHECKPOINTS).is_dir())
        if not has_model and not elsewhere and resume != "auto":  # a resumed run does not need it
            what = "holds no model" if path.is_dir() else "no such folder"
            raise ConfigError(f"--from={path}: {what}; name a folder of `longstride export`, or a run folder")
        return cls(path, *(getattr(arguments, f"from_{name}") for name in ("step", "weights", "positions", "partly")))

    def words(self) -> list[str]:
        """Return the options as words of a command line for any working directory."""
        words = ["--from", str(self.path.absolute()), "--from-weights", self.weights]
        for option, value in (("--from-step", self.step), ("--from-positions", self.positions)):
            words += [] if value is None else [option, str(value)]
        return words + ["--from-partly"] * self.partly


@dataclass(frozen=True, slots=True)
class RunSetup:
    """The setup of a run on this rank. Its number of steps is known: see ``resolve_steps``."""

    config: RunConfig
    ranks: Ranks
    data: TrainingData
    stop: StopFlag | None = None  # None: the run cannot be stopped
    resume: str = "never"  # auto, best, never or a step
    epochs: float | None = None  # if the configuration gives them instead of steps
    profile_steps: int = 0  # recorded by torch's profiler
    trusted: bool = False  # whether checkpoints may hold more than tensors and numbers
    source: WeightSource | None = None  # of the first weights; None: random ones
    origin: dict[str, Any] | None = None  # the source as manifests of checkpoints describe it

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.train.output)


def resolve_steps(config: RunConfig, data: TrainingData, ranks: Ranks | None = None) -> RunConfig:
    """Replace ``train.epochs`` by ``train.steps``; a configuration with steps is returned unchanged.

    Every rank gets the same number from the manifest, and rank 0 prints it. So the saved configuration has the length
    of the run even if the data changes.

    Raises:
        ConfigError: the warm-up is longer than the run.
        DataError: the train split does not fit the run.
    """
    train = config.train
    if train.steps is not None or train.epochs is None:
        return config
    contexts = data.stream().lanes.num_contexts
    steps = steps_of(config, contexts)
    if ranks is not None and ranks.is_first:
        say(f"{train.epochs:g} epochs are {steps:,} steps, of {contexts:,} contexts an epoch")
    content = config.to_json()
    content["train"] |= {"steps": steps, "epochs": None}
    return RunConfig.model_validate(content)


def steps_of(config: RunConfig, contexts: int) -> int:
    """Return the number of whole steps in the run's epochs of ``contexts`` contexts; at least 1.

    Raises:
        ConfigError: the warm-up or the stages before the last are longer.
    """
    train = config.train
    # A decimal fraction, as the user wrote it: 0.29 of 100 contexts are 29, but 28.999… in binary.
    last = config.stages()[-1]
    batches = int(Fraction(str(train.epochs)) * contexts / train.global_batch) - config.batches_in(last.first)
    if last.first and batches < last.batches:
        rule = f"the stages before the last read {train.epochs:g} epochs; give them fewer steps, or more epochs"
        raise ConfigError(f"train.context_schedule: {rule}")
    steps = last.first + max(1, batches // last.batches)
    if train.warmup_steps > steps:
        rule = f"must be at most the {steps:,} steps that {train.epochs:g} epochs are"
        raise ConfigError.at("train.warmup_steps", train.warmup_steps, rule)
    return steps


def check_output(output: str, resume: str, replay: str | None = None) -> None:
    """Check that --resume allows to write a run to the folder, or that the folder has a run for --replay.

    Raises:
        ConfigError: a wrong value of an option; the folder is a file, cannot be written or holds a run already; or
            there is no run to replay a step of.
    """
    run = Path(output)
    if replay is not None:
        if not _NUMBER.fullmatch(replay) or int(replay) == 0:
            raise ConfigError(f"--replay={replay}: must be the number of a step, at least 1")
        if resume != "never":
            raise ConfigError(f"--resume={resume}: a replay chooses its own checkpoint; leave it out")
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
    existing = [name for name in contents if (run / name).exists()]
    if resume == "never" and existing and not _is_only_started(run):
        rule = f"already holds a run ({', '.join(existing)}); continue it with --resume auto, or name another folder"
        raise ConfigError.at("train.output", output, rule)


def _is_only_started(run: Path) -> bool:
    """Whether a run folder only has the files of a start: the run ended before its first step."""
    # Without a lock there was never a run, and a config.json belongs to something else, such as an export.
    if not (run / file_names.LOCK).exists():
        return False
    for path in run.iterdir():
        if path.name == file_names.METRICS and path.stat().st_size == 0:
            continue
        if path.name == file_names.CHECKPOINTS and path.is_dir() and not any(path.iterdir()):
            continue
        if not _START_FILES.fullmatch(path.name):
            return False
    return True


def discard_start(run: Path) -> bool:
    """Remove a run folder without a step; return whether it is gone. No process may still write there."""
    with suppress(OSError):
        if run.is_dir() and (_is_only_started(run) or not any(run.iterdir())):
            for path in run.iterdir():
                path.rmdir() if path.is_dir() else path.unlink()
            run.rmdir()
    return not run.exists()


def profile_steps(profile: str | None, replay: str | None) -> int:
    """Return the number of steps that --profile records; 0 without the option.

    Raises:
        ConfigError: it is not a number of steps, or is combined with --replay.
    """
    if profile is None:
        return 0
    if not _NUMBER.fullmatch(profile) or int(profile) == 0:
        raise ConfigError(f"--profile={profile}: must be a number of steps, at least 1; such as 10")
    if replay is not None:
        raise ConfigError(f"--profile={profile}: a replay writes nothing; leave it out")
    return int(profile)


def check_data(config: RunConfig, *, elsewhere: bool = False) -> None:
    """Check that the data fits the configuration. If only hosts ``elsewhere`` have it, they check it.

    Raises:
        ConfigError: the data does not fit.
        DataError: the folder or a shard's index is wrong.
    """
    if elsewhere and "://" not in config.data.path and not Path(config.data.path).exists():
        return
    data = TrainingData(config, Ranks())
    resolve_steps(config, data)
    data.check()
