"""Where a run begins: at step 0 in a free folder, or at a whole checkpoint of its own."""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order import StreamState
from longstride.kernels import ConfigError, Problem
from longstride.launcher.checkpoints import (
    Checkpoint,
    first_whole,
    go_back_to,
    list_checkpoints,
    open_checkpoint,
    write_json,
)
from longstride.launcher.config import RunConfig
from longstride.launcher.data import RunData, check_output
from longstride.launcher.output import AgreedError, file_names, metrics_file, say
from longstride.launcher.ranks import Ranks, barrier, first_works, gather_objects, look_until, seen

_MARK = ".start-"  # of the file by which all ranks see that they share the run folder


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoints that a run may go on from, best first; none is a beginning."""

    candidates: tuple[Checkpoint, ...] = ()
    refused: tuple[str, ...] = ()  # a line for each folder that is no checkpoint
    may_begin: bool = True  # where no candidate is whole


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person asked of the start."""

    resume: str  # auto, never or a step
    epochs: float | None = None  # where the steps come of them
    trusted: bool = False  # whether checkpoints may hold more than tensors and numbers


def choose_start(config: RunConfig, asked: Asked, data: RunData, ranks: Ranks) -> Start:
    """Reads data and run folder, and writes nothing.

    Raises:
        ConfigError: the folder is taken, or what it holds does not fit the run.
        DataError: the data cannot be trained on.
    """
    data.stream()  # says what is wrong with it
    if ranks.local_rank == 0:  # once a host
        data.check()
    return _look(config, asked, data)


def _look(config: RunConfig, asked: Asked, data: RunData) -> Start:
    """What the run folder holds now; see ``choose_start``."""
    settings, run = config.train, Path(config.train.output)
    check_output(config.train.output, asked.resume)
    if asked.resume == "never":
        return Start()
    if asked.resume == "auto":
        found, refused = list_checkpoints(run, trusted=asked.trusted)
        lines = tuple(refusal.line for refusal in refused)
        start = Start(tuple(found), lines, may_begin=not found and not refused)
    else:
        start = Start((open_checkpoint(run, int(asked.resume), trusted=asked.trusted),), may_begin=False)
    for checkpoint in start.candidates[:1]:
        checkpoint.check_matches(config, data.stream().fingerprint)
        if checkpoint.manifest.step > settings.last_step:
            raise _beyond(checkpoint, settings.last_step, asked.epochs)
        try:
            data.stream(StreamState.from_json(checkpoint.manifest.stream))
        except DataError as error:
            raise ConfigError(f"{checkpoint.folder}: {error}") from None
    if not start.candidates and start.refused:
        raise ConfigError("no checkpoint can be read:", *start.refused)
    return start


def _beyond(checkpoint: Checkpoint, last_step: int, epochs: float | None) -> ConfigError:
    """What is wrong with a length that a checkpoint has behind it, in the words in which it was given."""
    told = f"the checkpoint {checkpoint.folder} is already beyond it"
    if epochs is None:
        return ConfigError.at("train.steps", last_step, told)
    return ConfigError.at("train.epochs", epochs, f"comes to step {last_step}, and {told}")


def begin(config: RunConfig, asked: Asked, data: RunData, ranks: Ranks) -> Checkpoint | None:
    """Verifies the checkpoints that may be gone on from; returns the first whole one. All ranks must call.

    The folder is looked at again, as since ``choose_start`` the run that held its lock may have saved; what the first
    rank sees there counts for all.

    Raises:
        AgreedError: on every rank, when they share no run folder, it is taken or holds no whole candidate, or one that
            does not fit or would have to be trusted.
    """
    run = Path(config.train.output)
    _check_shared(run, ranks)
    start = first_works(lambda: _look(config, asked, data), ranks)
    chosen, damaged = first_whole(run, start.candidates, ranks)
    damaged = [*start.refused, *damaged]
    if chosen is None and not start.may_begin:
        raise AgreedError("\n".join(["no checkpoint is whole:", *damaged]))
    if ranks.is_first:
        for line in damaged:
            say(f"passed over: {line}")
    return chosen


def _check_shared(run: Path, ranks: Ranks) -> None:
    """Whether all ranks see what the first one writes to a run folder. All ranks must call.

    Raises:
        AgreedError: on every rank, where one does not.
    """
    if ranks.world_size == 1:
        return
    # A name that no host has looked up before: what it remembers of the folder is of no matter.
    name = gather_objects(f"{_MARK}{uuid.uuid4().hex}", ranks)[0]
    if ranks.is_first:
        for left in run.glob(f"{_MARK}*"):  # of a process that was killed
            left.unlink()
        (run / name).touch()
    barrier(ranks)
    is_seen = seen(lambda: (run / name).exists() or None, look_until())
    blind = [host for host in gather_objects(None if is_seen else socket.gethostname(), ranks) if host]
    if ranks.is_first:
        (run / name).unlink()
    if blind:
        rule = f"{blind[0]} does not see what the first process writes there; name a folder that all hosts share"
        raise AgreedError(str(Problem("train.output", rule, str(run))))


def prepare_folder(config: RunConfig, chosen: Checkpoint | None, ranks: Ranks) -> None:
    """Makes the run folder ready for what comes: all that was there stays, by another name. All ranks must call."""
    if ranks.is_first:
        _prepare_folder(Path(config.train.output), config, chosen)
    barrier(ranks)


def _prepare_folder(run: Path, config: RunConfig, chosen: Checkpoint | None) -> None:
    """Writes config.json, and moves aside whatever lies beyond the step that the run goes on from."""
    step = chosen.manifest.step if chosen else 0
    (run / file_names.CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    moved = [metrics_file.cut_metrics(run, step), *go_back_to(run, step)]
    write_json(run / file_names.CONFIG, config.to_json())
    if chosen:
        say(f"going on from {chosen.folder}")
    for path in filter(None, moved):
        say(f"kept what lay beyond as {path}")
