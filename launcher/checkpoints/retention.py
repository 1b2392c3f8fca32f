"""Which checkpoints stay, how one is removed, and the pointer to the newest."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from longstride.launcher.checkpoints.checkpoint import Checkpoint, checkpoint_folder, list_checkpoints, set_aside
from longstride.launcher.checkpoints.manifest import flush_folder, missized, write_text
from longstride.launcher.checkpoints.universal import universal_folder
from longstride.launcher.output import file_names

LATEST = "latest"  # for people and their scripts: nothing here reads it
# What a killed save or removal leaves. Names of ours alone, with a dot that hides them from whatever lists checkpoints.
_LEFTOVER = re.compile(r"\.step-\d{8,}(\.universal)?\.(partial|deleted)")


def retire(run: Path, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Removes the checkpoints that need not stay; returns their steps.

    The newest ``keep_last`` that are whole by their manifests and the sizes of their files stay, and so does every
    step that ``keep_every`` divides. Without so many whole ones nothing is removed. What has no readable manifest is
    a person's to judge, and left.
    """
    if keep_last is None:
        return []
    found, _ = list_checkpoints(run)
    outdated = outdated_checkpoints(found, keep_last, keep_every)
    for checkpoint in outdated:
        remove_checkpoint(checkpoint.folder)
    return [checkpoint.manifest.step for checkpoint in outdated]


def outdated_checkpoints(found: Sequence[Checkpoint], keep_last: int, keep_every: int | None) -> list[Checkpoint]:
    """Those of a run's checkpoints, newest first, that lie behind the last whole ones and may go."""
    whole = 0
    for place, checkpoint in enumerate(found):
        whole += not missized(checkpoint.folder, checkpoint.manifest)
        if whole == keep_last:
            behind = found[place + 1 :]
            return [each for each in behind if keep_every is None or each.manifest.step % keep_every]
    return []


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint and what was converted from it; a kill in between leaves nothing that looks like one."""
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


def set_aside_beyond(run: Path, step: int) -> list[Path]:
    """Renames the checkpoints after a step, whose converted forms go; returns where they lie now."""
    moved = []
    for later in list_checkpoints(run)[0]:
        if later.manifest.step > step:
            remove_tree(universal_folder(later.folder))
            moved.append(set_aside(later.folder))
    return [path for path in moved if path is not None]


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is until it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def remove_leftovers(run: Path) -> None:
    """Removes what a killed save or removal left. Nothing else may be saving to this run."""
    folder = run / file_names.CHECKPOINTS
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            remove_tree(path)


def point_to(run: Path, step: int) -> None:
    """Has `latest` name the checkpoint of a step, the old one or the new at any moment."""
    folder = checkpoint_folder(run, step)
    write_text(folder.with_name(LATEST), f"{folder.name}\n")


def remove_tree(path: Path) -> None:
    """Removes a folder as far as it can be; of a link, the link."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)
