"""Saves checkpoints that are whole or not there, outlives a full disk, and removes the ones that need not stay."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed import DeepSpeedEngine

from longstride.data_pipelines.durable import flush_folder
from longstride.data_pipelines.order import StreamState
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.checkpoint import (
    DEEPSPEED_TAG,
    checkpoint_folder,
    list_checkpoints,
    random_name,
)
from longstride.launcher.checkpoints.manifest import (
    FORMAT_VERSION,
    CheckpointManifest,
    FileRecord,
    free_bytes,
    gigabytes,
    missized,
    record_files,
    write_json,
    write_manifest,
    write_text,
)
from longstride.launcher.checkpoints.pickles import FAILURES, checkpoint_files
from longstride.launcher.checkpoints.probe import take_probe
from longstride.launcher.checkpoints.saved_tables import tables_name
from longstride.launcher.checkpoints.scores import Score, known_scores, ranked
from longstride.launcher.checkpoints.universal import universal_folder
from longstride.launcher.config import RunConfig
from longstride.launcher.engine import package_versions, parameter_groups, random_states
from longstride.launcher.output import file_names
from longstride.launcher.ranks import Ranks

T = TypeVar("T")
_LATEST = "latest"
# What a killed save or removal leaves. The dot hides it from whatever lists checkpoints.
_LEFTOVER = re.compile(r"\.step-\d{8,}(\.universal)?\.(partial|deleted)")


class NotSavedError(RuntimeError):
    """A checkpoint could not be written. Every rank raises it, and nothing of the checkpoint is left."""


class Saver:
    """Saves a run's checkpoints as it goes. A save that fails is reported to ``say``, and the run goes on.

    ``flush_lines`` brings what has been recorded to the disk, before anything of a checkpoint is written.

    In the background (``train.checkpoint_in_background``) a save ends after the first step at which every rank has
    written its share, or else before the next save or the end of the run.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        config: RunConfig,
        ranks: Ranks,
        say: Callable[[str], None],
        flush_lines: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._config, self._ranks = engine, config, ranks
        self._say, self._flush_lines = say, flush_lines
        self._run = Path(config.train.output)
        self._pending: _Save | None = None
        self.go_on()

    @staticmethod
    def check_pointer(run: Path) -> None:
        """Raise ConfigError where no file can take the place of `latest`, before any step is taken."""
        path = run / file_names.CHECKPOINTS / _LATEST
        if path.is_dir() and not path.is_symlink():
            raise ConfigError(f"{path}: is a folder, not a plain file; move it away")

    def go_on(self) -> None:
        """Begins anew with the run folder as it is, once the engine has come to one of its checkpoints."""
        self.saved = self._engine.global_steps  # the newest step that is safe
        self._scores: dict[int, Score] = {}  # of the first rank, by step
        if self._config.train.keep_best and self._ranks.is_first:
            repeated = (score for each in list_checkpoints(self._run)[0] for score in each.manifest.best or ())
            self._scores = known_scores(self._run, self._config.data.validation_split, repeated)

    def save(self, stream: StreamState, memory: dict[str, Any]) -> None:
        """Saves the engine's step, or begins to. All ranks must call.

        ``memory``: what the run remembers from step to step, by the manifest's keys.
        """
        self.finish()
        self._flush_lines()
        save = _Save(self._engine, self._config, stream, self._ranks, memory)
        with self._reporting(save.step):
            save.write(background=self._config.train.checkpoint_in_background)
            self._pending = save
        if not self._config.train.checkpoint_in_background:
            self.finish()

    def poll(self) -> None:
        """Ends a save whose files every rank has written. All ranks must call, after every step."""
        if self._pending is not None:
            done = torch.tensor([checkpoint_files(self._engine).is_done()], dtype=torch.int64)
            if bool(self._ranks.gather_int64(done, self._engine.device).all()):
                self.finish()

    def finish(self) -> None:
        """Ends the save that is under way, if one is. All ranks must call."""
        save, self._pending = self._pending, None
        if save is None:
            return
        with self._reporting(save.step):
            save.complete(self._best)
            self.saved = save.step
            if self._ranks.is_first:
                self._tidy(save.step)

    def save_last(self, stream: StreamState, memory: dict[str, Any]) -> bool:
        """Saves the engine's step unless it is safe already; returns whether it is now. All ranks must call."""
        self.finish()
        if self.saved < self._engine.global_steps:
            self.save(stream, memory)
            self.finish()
        return self.saved == self._engine.global_steps

    def keep_best(self, score: Score, stream: StreamState, memory: dict[str, Any]) -> None:
        """Saves the engine's step if its evaluation is among the ``train.keep_best`` best. All ranks must call.

        What is no longer among them is removed, unless it stays for another reason.
        """
        if not self._config.train.keep_best:
            return
        if self._ranks.is_first:
            self._scores[score.step] = score
        self.finish()  # what is under way may be one of the best
        is_best = self._ranks.is_first and score in self._best(score.step)
        if self.saved < score.step and self._ranks.gather_objects(is_best)[0]:
            self.save(stream, memory)
        elif self.saved == score.step and is_best:
            self._tidy(score.step)

    def _best(self, step: int) -> list[Score]:
        """The best of the run's whole checkpoints and of a step that is one, or will be; best first."""
        count = self._config.train.keep_best
        checkpoints = list_checkpoints(self._run)[0] if count else ()
        steps = {each.manifest.step for each in checkpoints if not missized(each.folder, each.manifest)} | {step}
        return ranked(score for score in self._scores.values() if score.step in steps)[:count]

    @contextlib.contextmanager
    def _reporting(self, step: int) -> Iterator[None]:
        """Reports a save that fails, and has the run go on."""
        try:
            yield
        except NotSavedError as error:
            if self._ranks.is_first:
                old, _ = list_checkpoints(self._run)
                left = f"the newest checkpoint is step {old[0].manifest.step}" if old else "there is no checkpoint yet"
                self._say(f"step {step} was not saved: {error}; {left}")

    def _tidy(self, step: int) -> None:
        """What follows a checkpoint that is safe; no failure here unmakes it."""
        train = self._config.train
        try:
            point_to(self._run, step)
            retire(self._run, step, train.keep_last, train.keep_every, [score.step for score in self._best(step)])
            needed = sum(path.stat().st_size for path in checkpoint_folder(self._run, step).rglob("*"))
            free = free_bytes(self._run)
            if free < needed:
                room = f"{gigabytes(free)} are free where a checkpoint takes {gigabytes(needed)}"
                self._say(f"{self._run}: {room}: make room, or the next one will not be saved")
        except OSError as error:
            self._say(f"step {step} is saved; what follows a save was not done: {error_line(error, self._run)}")


class _Save:
    """One checkpoint on its way to the disk."""

    def __init__(
        self, engine: DeepSpeedEngine, config: RunConfig, stream: StreamState, ranks: Ranks, memory: dict[str, Any]
    ) -> None:
        self._engine, self._config, self._ranks = engine, config, ranks
        self._run = Path(config.train.output)
        self.step = engine.global_steps
        self._final = checkpoint_folder(self._run, engine.global_steps)
        self._partial = self._final.with_name(f".{self._final.name}.partial")  # until it is whole
        self._files = checkpoint_files(engine)
        self._manifest: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "step": engine.global_steps,
            "world_size": ranks.world_size,
            "sequence_parallel": config.train.sequence_parallel,
            "zero_stage": config.zero_stage,
            "precision": config.precision,
            "stream": stream.to_json(),
            "parameter_groups": [group.names for group in parameter_groups(engine.module, config.train.optimizer)],
            "versions": package_versions(config.model),
            **memory,
        }

    def write(self, *, background: bool) -> None:
        """Writes every rank's files, or copies what will be in them. ``complete`` raises whatever fails with them."""
        self._on_all_ranks(lambda: self._make_folder() if self._ranks.is_first else None)
        # Every rank computes; only the first one writes, which may fail.
        (self._manifest["probe"], *_) = self._on_all_ranks(
            lambda: take_probe(self._engine, self._config, self._partial, self._ranks)
        )
        self._files.begin(background=background)
        self._engine.save_checkpoint(str(self._partial), tag=DEEPSPEED_TAG, save_latest=False)
        if self._engine.tables is not None:
            path = self._partial / tables_name(self._ranks.rank)
            self._files.save(self._engine.tables.share(), str(path))
        if self._ranks.sequence_rank == 0:  # those that share contexts draw alike
            path = self._partial / random_name(self._ranks.data_rank)
            self._files.save(random_states(self._engine.device), str(path))

    def complete(self, best: Callable[[int], list[Score]]) -> None:
        """Makes a checkpoint of what was written, by a rename; ``best`` says what the first rank's manifest repeats."""
        self._files.wait()
        shares = self._on_all_ranks(self._written)
        written = {name: record for share in shares for name, record in share.items()}
        self._on_all_ranks(lambda: self._put_in_place(written, best(self.step)) if self._ranks.is_first else None)

    def _make_folder(self) -> None:
        remove_leftovers(self._run)
        self._partial.mkdir()  # not its parents: a folder that has gone, or is not mounted, is not made anew
        write_json(self._partial / file_names.CONFIG, self._config.to_json())

    def _written(self) -> dict[str, FileRecord]:
        """This rank's files; raises what failed with them."""
        if self._files.failure is not None:
            raise self._files.failure
        return {path.relative_to(self._partial).as_posix(): record for path, record in self._files.records.items()}

    def _put_in_place(self, written: dict[str, FileRecord], best: Sequence[Score] = ()) -> None:
        # What DeepSpeed may have written past `_files` is read again, by one rank, so that none is left out.
        files = written | record_files(self._partial, known=written)
        last = {"files": dict(sorted(files.items())), "best": list(best) or None}
        manifest = CheckpointManifest.model_validate(self._manifest | last)
        if lost := missized(self._partial, manifest):
            rule = "is not to be seen by the first process as it was written; all must write to one folder"
            raise OSError(errno.ENOENT, rule, str(self._partial / lost[0]))
        write_manifest(self._partial, manifest)
        for folder in (self._partial / DEEPSPEED_TAG, self._partial):
            flush_folder(folder)
        set_aside(self._final)
        self._partial.rename(self._final)
        flush_folder(self._final.parent)

    def _on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        """What the work of every rank returned. Raises NotSavedError on all of them where that of any failed."""
        outcome, failure = None, None
        try:
            outcome = work()
        except FAILURES as error:
            failure = error_line(error, self._partial)
        everyone = self._ranks.gather_objects((outcome, failure))
        failures = [f"rank {rank}: {line}" for rank, (_, line) in enumerate(everyone) if line is not None]
        if failures:
            if self._ranks.is_first:
                remove_tree(self._partial)
            raise NotSavedError(failures[0])
        return [outcome for outcome, _ in everyone]


def error_line(error: Exception, path: Path) -> str:
    """A failure in one line; ``path`` is named where the error names none. A full disk is told with its room."""
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        room = f", with {gigabytes(free_bytes(path))} free" if is_full else ""
        return f"{error.filename or path}: {error.strerror or error}{room}"
    return f"{path}: {' '.join(str(error).split()) or type(error).__name__}"


def retire(
    run: Path, saved: int, keep_last: int | None, keep_every: int | None, best: Container[int] = frozenset()
) -> list[int]:
    """Removes the checkpoints that need not stay, once the step ``saved`` is safe; returns their steps.

    The newest ``keep_last`` up to that one that are whole by their manifests and the sizes of their files stay, and so
    does every step that ``keep_every`` divides or that is among the ``best``. Without so many whole ones nothing is
    removed. Left to a person: what lies beyond ``saved``, which this run did not save, and what is no checkpoint.
    """
    removed, whole = [], 0
    listed = list_checkpoints(run)[0] if keep_last is not None else []
    for checkpoint in (each for each in listed if each.manifest.step <= saved):
        step = checkpoint.manifest.step
        if whole != keep_last:  # newest first
            whole += not missized(checkpoint.folder, checkpoint.manifest)
        elif (keep_every is None or step % keep_every) and step not in best:
            remove_checkpoint(checkpoint.folder)
            removed.append(step)
    return removed


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint and its universal form; a kill in between leaves nothing that looks like a checkpoint."""
    pairs = [
        (path, path.with_name(f".{folder.name}{end}.deleted"))
        for path, end in ((universal_folder(folder), ".universal"), (folder, ""))
    ]
    for path, deleted in pairs:
        remove_tree(deleted)
        if path.exists():
            path.rename(deleted)
    flush_folder(folder.parent)
    for _, deleted in pairs:
        remove_tree(deleted)


def go_back_to(run: Path, step: int) -> list[Path]:
    """Leaves a run with no checkpoint after a step; returns where the later ones lie now, without universal forms.

    `latest` names the checkpoint of the step, or is gone where there is none. All of it is on the disk then. Nothing
    else may be saving to this run.
    """
    remove_leftovers(run)
    kept = checkpoint_folder(run, step)
    if kept.exists():
        point_to(run, step)  # first: it never names what is not there
    else:
        kept.with_name(_LATEST).unlink(missing_ok=True)
    moved = []
    for later in list_checkpoints(run)[0]:
        if later.manifest.step > step:
            remove_tree(universal_folder(later.folder))
            moved.append(set_aside(later.folder))
    flush_folder(kept.parent)
    return [path for path in moved if path is not None]


def set_aside(path: Path) -> Path | None:
    """Renames what is there to a free name beside it; None where nothing is."""
    if not os.path.lexists(path):
        return None
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.replaced-{number}")):
        number += 1
    path.rename(aside)
    return aside


def remove_leftovers(run: Path) -> None:
    """Removes what a killed save or removal left. Nothing else may be saving to this run."""
    folder = run / file_names.CHECKPOINTS
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            remove_tree(path)


def point_to(run: Path, step: int) -> None:
    """Has `latest` name the checkpoint of a step, in one rename: for people and scripts, nothing here reads it.

    It is on the disk before anything is removed that it may have named.
    """
    folder = checkpoint_folder(run, step)
    write_text(folder.with_name(_LATEST), f"{folder.name}\n")
    flush_folder(folder.parent)


def remove_tree(path: Path) -> None:
    """Removes a folder as far as it can be removed; of a link, the link; and what is no folder."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_symlink() or path.exists():
            path.unlink()
