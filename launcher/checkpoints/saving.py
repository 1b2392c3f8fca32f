"""Save checkpoints that are either complete or absent, survive a full disk, and remove those that need not stay."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed import DeepSpeedEngine

from longstride.data_pipelines.durable import flush_folder, write_over
from longstride.data_pipelines.order import StreamState
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
    Score,
    collect_scores,
    find_missized,
    free_bytes,
    gigabytes,
    rank_scores,
    record_files,
    write_json,
    write_manifest,
)
from longstride.launcher.checkpoints.pickles import FAILURES, checkpoint_files
from longstride.launcher.checkpoints.probe import take_probe
from longstride.launcher.checkpoints.saved_state import share_name
from longstride.launcher.config import RunConfig
from longstride.launcher.engine import package_versions, parameter_groups, random_states
from longstride.launcher.output import file_names
from longstride.launcher.ranks import Ranks

T = TypeVar("T")
_LATEST = "latest"
# Left by a killed save or removal; `universal` by versions that stored conversions. The dot hides it from programs that
# list checkpoints.
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(universal|(universal\.)?(partial|deleted))")


class NotSavedError(RuntimeError):
    """A checkpoint could not be written. Every rank raises it, and the partial checkpoint is removed."""


class Saver:
    """Saves a run's checkpoints. A save that fails is reported to ``say``, and the run goes on.

    ``flush_lines`` brings the recorded metrics to the disk before anything of a checkpoint is written. A background
    save (``train.checkpoint_in_background``) ends after the first step at which every rank has written its share. It
    ends at the latest before the next save or the end of the run.
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
        self._pending: dict[str, Any] | None = None  # the manifest of the save that is being written, without files
        self.go_on()

    def go_on(self) -> None:
        """Read the run folder again, after the engine has been set to one of its checkpoints."""
        self.saved = self._engine.global_steps  # the newest step that is safe
        self._scores: dict[int, Score] = {}  # on the first rank, by step
        if self._config.train.keep_best and self._ranks.is_first:
            manifests = [checkpoint.manifest for checkpoint in list_checkpoints(self._run)[0]]
            self._scores = collect_scores(self._run, self._config.data.validation_split, manifests)

    def save(self, stream: StreamState, memory: dict[str, Any]) -> None:
        """Save the engine's step, or begin to, with ``memory`` in the manifest. All ranks must call."""
        self.finish()
        self._flush_lines()
        engine, config, ranks = self._engine, self._config, self._ranks
        manifest: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "step": engine.global_steps,
            "world_size": ranks.world_size,
            "sequence_parallel": config.train.sequence_parallel,
            "zero_stage": config.zero_stage,
            "precision": config.precision,
            "stream": stream.to_json(),
            "parameter_groups": [
                group.names
                for group in parameter_groups(
                    engine.module, split=config.train.optimizer is not None, apart=config.train.trained_parts
                )
            ],
            "versions": package_versions(config.model),
            **memory,
        }
        with self._reporting(engine.global_steps):
            manifest["probe"] = self._write(partial_folder(self._run, engine.global_steps))
            self._pending = manifest
        if not config.train.checkpoint_in_background:
            self.finish()

    def _write(self, partial: Path) -> dict[str, Any] | None:
        """Write every rank's files, or copy their content for the background; return the manifest's probe."""
        engine, files = self._engine, checkpoint_files(self._engine)

        def make_folder() -> None:
            remove_leftovers(self._run)
            partial.mkdir()  # without parents: a run folder that is gone, or not mounted, must not be recreated
            write_json(partial / file_names.CONFIG, self._config.to_json())

        self._on_all_ranks(partial, make_folder if self._ranks.is_first else lambda: None)
        # Every rank computes the loss. Only the first one writes the probe, which may fail.
        probe, *_ = self._on_all_ranks(partial, lambda: take_probe(engine, self._config, partial, self._ranks))
        files.begin(background=self._config.train.checkpoint_in_background)
        engine.save_checkpoint(str(partial), tag=DEEPSPEED_TAG, save_latest=False)
        for kind in dict.fromkeys(part.kind for part in engine.held.parts):
            shares = (part.share() for part in engine.held.parts if part.kind == kind)
            if tensors := {name: tensor for share in shares for name, tensor in share.items()}:
                files.save(tensors, str(partial / share_name(kind, self._ranks.rank)))
        if engine.lanes is not None:  # of which each rank has its own
            files.save(engine.lanes.share(), str(partial / share_name("lanes", self._ranks.rank)))
        if self._ranks.sequence_rank == 0:  # ranks that share contexts share their random states
            files.save(random_states(engine.device), str(partial / random_name(self._ranks.data_rank)))
        return probe

    def poll(self) -> None:
        """Finish a background save if every rank has written its files. All ranks must call, after every step."""
        if self._pending is not None:
            is_done = torch.tensor([checkpoint_files(self._engine).is_done()], dtype=torch.int64)
            if bool(self._ranks.gather_int64(is_done, self._engine.device).all()):
                self.finish()

    def finish(self) -> None:
        """Finish the pending save, if there is one. All ranks must call."""
        manifest, self._pending = self._pending, None
        if manifest is None:
            return
        step, is_first = manifest["step"], self._ranks.is_first
        partial = partial_folder(self._run, step)
        with self._reporting(step):
            shares = self._on_all_ranks(partial, lambda: checkpoint_files(self._engine).take_records(partial))
            files = {name: record for share in shares for name, record in share.items()}

            def complete() -> None:
                put_in_place(self._run, manifest | {"best": self._best(step) or None}, files)

            self._on_all_ranks(partial, complete if is_first else lambda: None)
            self.saved = step
            if is_first:
                self._tidy(step)

    def _on_all_ranks(self, partial: Path, work: Callable[[], T]) -> list[T]:
        """Return what ``work`` returned on every rank. If it fails on any, NotSavedError is raised on all."""
        outcome, failure = None, None
        try:
            outcome = work()
        except FAILURES as error:
            failure = error_line(error, partial)
        outcomes = self._ranks.gather_objects((outcome, failure))
        failures = [f"rank {rank}: {line}" for rank, (_, line) in enumerate(outcomes) if line is not None]
        if failures:
            if self._ranks.is_first:
                remove_tree(partial)
            raise NotSavedError(failures[0])
        return [outcome for outcome, _ in outcomes]

    def save_last(self, stream: StreamState, memory: dict[str, Any]) -> bool:
        """Save the engine's step unless it is saved; return whether it is saved now. All ranks must call."""
        self.finish()
        if self.saved < self._engine.global_steps:
            self.save(stream, memory)
            self.finish()
        return self.saved == self._engine.global_steps

    def keep_best(self, score: Score, stream: StreamState, memory: dict[str, Any]) -> None:
        """Save the engine's step if its evaluation is among the ``train.keep_best`` best. All ranks must call.

        Checkpoints that are no longer among them are removed, unless they stay for another reason.
        """
        if not self._config.train.keep_best:
            return
        if self._ranks.is_first:
            self._scores[score.step] = score
        self.finish()  # the pending save may be one of the best
        is_best = self._ranks.is_first and score in self._best(score.step)
        if self.saved < score.step and self._ranks.gather_objects(is_best)[0]:
            self.save(stream, memory)
        elif self.saved == score.step and is_best:
            self._tidy(score.step)

    def _best(self, step: int) -> list[Score]:
        """Return the best scores among undamaged checkpoints and ``step``, which is or becomes one; best first."""
        count = self._config.train.keep_best
        checkpoints = list_checkpoints(self._run)[0] if count else ()
        steps = {step} | {
            saved.manifest.step for saved in checkpoints if not find_missized(saved.folder, saved.manifest)
        }
        return rank_scores(score for score in self._scores.values() if score.step in steps)[:count]

    @contextlib.contextmanager
    def _reporting(self, step: int) -> Iterator[None]:
        """Report a save that fails, and continue."""
        try:
            yield
        except NotSavedError as error:
            if self._ranks.is_first:
                old, _ = list_checkpoints(self._run)
                line = f"the newest checkpoint is step {old[0].manifest.step}" if old else "there is no checkpoint yet"
                self._say(f"step {step} was not saved: {error}; {line}")

    def _tidy(self, step: int) -> None:
        """Update `latest`, retire checkpoints and check the disk. A failure here does not undo the save."""
        train = self._config.train
        try:
            point_to(self._run, step)
            retire(self._run, step, train.keep_last, train.keep_every, [score.step for score in self._best(step)])
            needed = sum(path.stat().st_size for path in checkpoint_folder(self._run, step).rglob("*"))
            free = free_bytes(self._run)
            if free < needed:
                room = f"{gigabytes(free)} are free, but a checkpoint takes {gigabytes(needed)}"
                self._say(f"{self._run}: {room}: make room, or the next one will not be saved")
        except OSError as error:
            self._say(f"step {step} is saved, but the clean-up after it failed: {error_line(error, self._run)}")


def partial_folder(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint until it is complete."""
    folder = checkpoint_folder(run, step)
    return folder.with_name(f".{folder.name}.partial")


def put_in_place(run: Path, manifest: Mapping[str, Any], written: Mapping[str, FileRecord]) -> None:
    """Turn the partial folder of a manifest's step into a checkpoint, by a rename.

    ``written`` has the records of files by all ranks. Any file that DeepSpeed wrote by itself is hashed here.
    """
    folder, partial = checkpoint_folder(run, manifest["step"]), partial_folder(run, manifest["step"])
    files = {**written, **record_files(partial, recorded=written)}
    complete = CheckpointManifest.model_validate({**manifest, "files": dict(sorted(files.items()))})
    if missing := find_missized(partial, complete):
        rule = "is missing or incomplete on the first process's host; all processes must write to one shared folder"
        raise OSError(errno.ENOENT, rule, str(partial / missing[0]))
    write_manifest(partial, complete)
    for changed in (partial / DEEPSPEED_TAG, partial):
        flush_folder(changed)
    set_aside(folder)
    partial.rename(folder)
    flush_folder(folder.parent)


def error_line(error: Exception, path: Path) -> str:
    """Describe a failure in one line, with ``path`` if the error names none. For a full disk, add its free space."""
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        room = f", with {gigabytes(free_bytes(path))} free" if is_full else ""
        return f"{error.filename or path}: {error.strerror or error}{room}"
    return f"{path}: {' '.join(str(error).split()) or type(error).__name__}"


def retire(
    run: Path, saved: int, keep_last: int | None, keep_every: int | None, best: Container[int] = frozenset()
) -> list[int]:
    """Remove the checkpoints that need not stay, once step ``saved`` is safe; return their steps.

    The newest ``keep_last`` complete ones up to ``saved`` stay, and every step that ``keep_every`` divides or that is
    among the ``best``. Complete means a valid manifest and files of the right size. While there are fewer, nothing is
    removed. Later steps, which this run did not save, and folders that are no checkpoints are left alone.
    """
    removed, num_complete = [], 0
    for checkpoint in list_checkpoints(run)[0] if keep_last is not None else ():
        step = checkpoint.manifest.step
        if step > saved:
            continue
        if num_complete != keep_last:  # newest first
            num_complete += not find_missized(checkpoint.folder, checkpoint.manifest)
        elif (keep_every is None or step % keep_every) and step not in best:
            remove_checkpoint(checkpoint.folder)
            removed.append(step)
    return removed


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. If killed, nothing that looks like a checkpoint remains."""
    deleted = folder.with_name(f".{folder.name}.deleted")
    remove_tree(deleted)
    folder.rename(deleted)
    flush_folder(folder.parent)
    remove_tree(deleted)


def rewind_to(run: Path, step: int) -> list[Path]:
    """Move all checkpoints after a step aside; return their new paths.

    `latest` then names the checkpoint of the step, or is removed if there is none. All of it is on the disk at the end.
    No other process may be saving to this run.
    """
    remove_leftovers(run)
    folder = checkpoint_folder(run, step)
    if folder.exists():
        point_to(run, step)  # first, so that it never names a missing checkpoint
    else:
        folder.with_name(_LATEST).unlink(missing_ok=True)
    moved = [set_aside(later.folder) for later in list_checkpoints(run)[0] if later.manifest.step > step]
    flush_folder(folder.parent)
    return [path for path in moved if path is not None]


def set_aside(path: Path) -> Path | None:
    """Rename a path to a free name, and return that; None if nothing is there."""
    if not os.path.lexists(path):
        return None
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.replaced-{number}")):
        number += 1
    path.rename(aside)
    return aside


def remove_leftovers(run: Path) -> None:
    """Remove what a killed save or removal left. No other process may be saving to this run."""
    folder = run / file_names.CHECKPOINTS
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            remove_tree(path)


def point_to(run: Path, step: int) -> None:
    """Let `latest` name the checkpoint of a step, atomically. Only people and their scripts read it.

    It is on the disk before any checkpoint that it may have named is removed.
    """
    folder = checkpoint_folder(run, step)
    write_over(folder.with_name(_LATEST), f"{folder.name}\n".encode())
    flush_folder(folder.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder as far as possible, or a file, or a link but not its target."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_symlink() or path.exists():
            path.unlink()
