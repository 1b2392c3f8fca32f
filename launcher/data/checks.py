"""What can be found wrong before the deepspeed launcher starts. Imports no deepspeed and writes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig
from longstride.launcher.data.run_data import RunData
from longstride.launcher.data.steps import resolve_steps
from longstride.launcher.output import file_names
from longstride.launcher.ranks import Ranks

_MARKS = (file_names.CONFIG, file_names.METRICS, file_names.CHECKPOINTS)  # what a run folder holds


def check_output(output: str, resume: str) -> None:
    """Whether a run may be written to a folder, as --resume is given; nothing is written.

    Raises:
        ConfigError: --resume is no choice, or the folder is a file, cannot be written or holds a run already.
    """
    run = Path(output)
    if "://" in output:
        raise ConfigError.at("train.output", output, "must be a folder on this machine, or one that it mounts")
    if resume not in ("auto", "never") and not (resume.isascii() and resume.isdecimal()):
        raise ConfigError(f"--resume={resume}: must be auto, never or the number of a step")
    if run.exists() and not run.is_dir():
        raise ConfigError.at("train.output", output, "must be a folder, and is a file")
    nearest = next(folder for folder in (run.absolute(), *run.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise ConfigError.at("train.output", output, f"{nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError.at("train.output", output, f"{nearest} cannot be written; name another folder")
    taken = [name for name in _MARKS if (run / name).exists()]
    if resume == "never" and taken:
        rule = f"holds a run already ({', '.join(taken)}); go on with --resume auto, or name another folder"
        raise ConfigError.at("train.output", output, rule)


def check_replay(config: RunConfig, resume: str, replay: str) -> None:
    """Whether --replay names a step of a run; nothing is read but the run folder.

    Raises:
        ConfigError: it is no step, --resume is given as well, or there is no such run.
    """
    if not (replay.isascii() and replay.isdecimal() and int(replay) > 0):
        raise ConfigError(f"--replay={replay}: must be the number of a step, from 1 on")
    if resume != "never":
        raise ConfigError(f"--resume={resume}: a replay finds its checkpoint by itself; leave it out")
    if not (Path(config.train.output) / file_names.CONFIG).is_file():
        raise ConfigError.at(
            "train.output", config.train.output, "holds no run to replay a step of; name one that does"
        )


def check_data(config: RunConfig, *, elsewhere: bool = False) -> None:
    """Whether the data is as the configuration says; on hosts elsewhere they look themselves where it is not here.

    Raises:
        ConfigError: it is not.
        DataError: the folder or a shard's index is wrong.
    """
    if elsewhere and "://" not in config.data.path and not Path(config.data.path).exists():
        return
    data = RunData(config, Ranks())
    resolve_steps(config, data)
    data.check()
