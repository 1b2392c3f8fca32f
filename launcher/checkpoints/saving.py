"""Saves a checkpoint that is whole or not there, and outlives a disk that is full."""

from __future__ import annotations

import errno
import importlib.metadata
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed import DeepSpeedEngine

from longstride.data_pipelines.order import StreamState
from longstride.launcher.checkpoints.checkpoint import (
    DEEPSPEED_TAG,
    checkpoint_folder,
    list_checkpoints,
    random_name,
    set_aside,
)
from longstride.launcher.checkpoints.files import FAILURES, checkpoint_files
from longstride.launcher.checkpoints.manifest import (
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    flush_folder,
    missized,
    record_files,
    write_json,
    write_manifest,
)
from longstride.launcher.checkpoints.probe import take_probe
from longstride.launcher.checkpoints.retention import partial_folder, point_to, remove_leftovers, remove_tree, retire
from longstride.launcher.config import RunConfig
from longstride.launcher.engine import parameter_groups, random_states
from longstride.launcher.output import CONFIG
from longstride.launcher.ranks import Ranks

T = TypeVar("T")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class NotSavedError(RuntimeError):
    """A checkpoint could not be written; every rank knows it, and nothing of it is left."""


class Saver:
    """Saves a run's checkpoints as it goes; a save that fails is told, and the run goes on.

    In the background (``train.checkpoint_in_background``) a save ends at the first step at which every rank has
    written its share, and before the next save or the run's end at the latest.
    """

    def __init__(self, engine: DeepSpeedEngine, config: RunConfig, ranks: Ranks, say: Callable[[str], None]) -> None:
        self._engine, self._config, self._ranks, self._say = engine, config, ranks, say
        self.saved = engine.global_steps  # the newest step that is safe
        self._pending: _Attempt | None = None

    def save(self, stream: StreamState, guards: dict[str, Any]) -> None:
        """Saves the engine's step, or begins to; ``guards`` is what they remember. All ranks must call."""
        self.finish()
        attempt = _Attempt(self._engine, self._config, stream, self._ranks, guards)
        with self._told(attempt.step):
            attempt.write(background=self._config.train.checkpoint_in_background)
            self._pending = attempt
        if not self._config.train.checkpoint_in_background:
            self.finish()

    def poll(self) -> None:
        """Ends a save whose files every rank has written. All ranks must call, after every step."""
        if self._pending is not None:
            done = torch.tensor([self._pending.is_written()], dtype=torch.int64)
            if bool(self._ranks.gather_int64(done, self._engine.device).all()):
                self.finish()

    def finish(self) -> None:
        """Ends the save that is under way, if one is. All ranks must call."""
        attempt, self._pending = self._pending, None
        if attempt is None:
            return
        with self._told(attempt.step):
            attempt.seal()
            self.saved = attempt.step
            if self._ranks.is_first:
                self._tidy(attempt.step)

    def save_last(self, stream: StreamState, guards: dict[str, Any]) -> bool:
        """Brings the engine's step to the disk, unless it is there; returns whether it is. All ranks must call."""
        self.finish()
        if self.saved < self._engine.global_steps:
            self.save(stream, guards)
            self.finish()
        return self.saved == self._engine.global_steps

    @contextmanager
    def _told(self, step: int) -> Iterator[None]:
        try:
            yield
        except NotSavedError as error:
            if self._ranks.is_first:
                self._say(f"step {step} was not saved: {error}; {_what_stays(self._run)}")

    @property
    def _run(self) -> Path:
        return Path(self._config.train.output)

    def _tidy(self, step: int) -> None:
        """What follows a checkpoint that is safe, and cannot unmake it."""
        train = self._config.train
        try:
            point_to(self._run, step)
            retire(self._run, train.keep_last, train.keep_every)
            needed = sum(path.stat().st_size for path in checkpoint_folder(self._run, step).rglob("*"))
            free = shutil.disk_usage(self._run).free
            if free < needed:
                told = f"{_gigabytes(free)} are free where a checkpoint takes {_gigabytes(needed)}"
                self._say(f"{self._run}: {told}: make room, or the next one will not be saved")
        except OSError as error:
            self._say(f"step {step} is saved; what follows a save was not done: {told_error(error, self._run)}")


class _Attempt:
    """One checkpoint on its way to the disk."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        config: RunConfig,
        stream: StreamState,
        ranks: Ranks,
        guards: dict[str, Any],
    ) -> None:
        self._engine, self._config, self._ranks = engine, config, ranks
        self._run = Path(config.train.output)
        self.step = engine.global_steps
        self._final = checkpoint_folder(self._run, engine.global_steps)
        self._partial = partial_folder(self._final)
        self._files = checkpoint_files(engine)
        self._manifest: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "step": engine.global_steps,
            "world_size": ranks.world_size,
            "zero_stage": config.zero_stage,
            "precision": config.precision,
            "stream": stream.to_json(),
            "guards": guards,
            "parameter_groups": parameter_groups(dict(engine.module.named_parameters())),
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")},
        }

    def write(self, *, background: bool) -> None:
        """Every rank's files, or copies of what will be in them. Whatever fails with them is told by ``seal``."""
        self._together(self._make_folder if self._ranks.is_first else _nothing)
        # Every rank computes; only the first one writes, which may fail.
        (self._manifest["probe"], *_) = self._together(self._probe)
        self._files.begin(background=background)
        self._engine.save_checkpoint(str(self._partial), tag=DEEPSPEED_TAG, save_latest=False)
        self._files.save(random_states(self._engine.device), str(self._partial / random_name(self._ranks.rank)))

    def is_written(self) -> bool:
        """Whether this rank's files are on the disk."""
        return self._files.is_done()

    def seal(self) -> Path:
        """Makes a checkpoint of what was written; returns its folder."""
        self._files.wait()
        written = joined(self._together(self._written))
        self._together((lambda: self._put_in_place(written)) if self._ranks.is_first else _nothing)
        return self._final

    def _make_folder(self) -> None:
        remove_leftovers(self._run)
        self._partial.mkdir()  # not its parents: a folder that has gone, or is not mounted, is not made anew
        write_json(self._partial / CONFIG, self._config.to_json())

    def _probe(self) -> dict[str, Any] | None:
        return take_probe(self._engine, self._config, self._partial, self._ranks)

    def _written(self) -> dict[str, FileRecord]:
        if self._files.failure is not None:
            raise self._files.failure
        return {path.relative_to(self._partial).as_posix(): record for path, record in self._files.records.items()}

    def _put_in_place(self, written: dict[str, FileRecord]) -> None:
        # What DeepSpeed may have written by itself is read again: by one rank, so that no file falls between shares.
        files = written | record_files(self._partial, 0, 1, known=written)
        manifest = Manifest.model_validate(self._manifest | {"files": dict(sorted(files.items()))})
        if lost := missized(self._partial, manifest):
            rule = "is not to be seen by the first process as it was written; all must write to one folder"
            raise OSError(errno.ENOENT, rule, str(self._partial / lost[0]))
        write_manifest(self._partial, manifest)
        for folder in (self._partial / DEEPSPEED_TAG, self._partial):
            flush_folder(folder)
        set_aside(self._final)
        self._partial.rename(self._final)
        flush_folder(self._final.parent)

    def _together(self, work: Callable[[], T]) -> list[T]:
        """What the work of every rank returned. NotSavedError on all of them where that of any failed."""
        outcome, failure = None, None
        try:
            outcome = work()
        except FAILURES as error:
            failure = told_error(error, self._partial)
        everyone = self._ranks.gather_objects((outcome, failure))
        failures = [f"rank {rank}: {told}" for rank, (_, told) in enumerate(everyone) if told is not None]
        if failures:
            if self._ranks.is_first:
                remove_tree(self._partial)
            raise NotSavedError(failures[0])
        return [outcome for outcome, _ in everyone]


def joined(shares: list[dict[str, FileRecord]]) -> dict[str, FileRecord]:
    """What all ranks know of files."""
    return {name: record for share in shares for name, record in share.items()}


def told_error(error: Exception, path: Path) -> str:
    """A failure in a line; ``path`` stands where the error knows none."""
    if isinstance(error, OSError):
        room = f", with {_gigabytes(_free(path))} free" if error.errno in _NO_ROOM else ""
        return f"{error.filename or path}: {error.strerror or error}{room}"
    return f"{path}: {' '.join(str(error).split()) or type(error).__name__}"


def _what_stays(run: Path) -> str:
    found, _ = list_checkpoints(run)
    return f"the newest checkpoint is step {found[0].manifest.step}" if found else "there is no checkpoint yet"


def _free(path: Path) -> int:
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(nearest).free


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.3g} GB" if count >= 1e9 else f"{count / 1e6:,.3g} MB"


def _nothing() -> None:
    """The work of a rank that has none."""
