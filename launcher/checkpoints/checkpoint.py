"""Checkpoints that are whole or not there, and the exact way back from one."""

from __future__ import annotations

import hashlib
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed import DeepSpeedEngine

from longstride.data_pipelines.order import StreamState
from longstride.kernels.errors import ConfigError
from longstride.launcher.checkpoints.files import checkpoint_files
from longstride.launcher.checkpoints.manifest import MANIFEST, Manifest, find_damage, find_foreign, read_manifest
from longstride.launcher.checkpoints.unpickling import asked_code, read_pickle, refusal
from longstride.launcher.engine import set_random_states
from longstride.launcher.output import CHECKPOINTS, CONFIG, AgreedError
from longstride.launcher.ranks import Ranks, wait_until_visible

DEEPSPEED_TAG = "deepspeed"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder whose manifest could be read; its files are not verified yet."""

    folder: Path
    manifest: Manifest
    trusted: bool = False  # whether its pickles may run what they ask for


class Refusal(NamedTuple):
    """A folder that is named like a checkpoint and is none."""

    step: int
    line: str  # what is wrong with it


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def list_checkpoints(run: Path, *, trusted: bool = False) -> tuple[list[Checkpoint], list[Refusal]]:
    """The checkpoints of a run whose manifest and configuration are whole, newest first, and what else lies there."""
    found: list[Checkpoint] = []
    refused: list[Refusal] = []
    folders = [path for path in (run / CHECKPOINTS).glob("step-*") if _NAME.fullmatch(path.name)]
    for folder in sorted(folders, key=lambda path: int(path.name[5:]), reverse=True):
        try:
            found.append(_checked(folder, trusted))
        except ConfigError as error:
            refused.extend(Refusal(int(folder.name[5:]), line) for line in str(error).splitlines())
    return found, refused


def newer_refusals(run: Path, checkpoint: Checkpoint) -> list[str]:
    """One line for each newer folder of a run that was passed over for a checkpoint."""
    _, refused = list_checkpoints(run)
    return [refusal.line for refusal in refused if refusal.step > checkpoint.manifest.step]


def open_checkpoint(run: Path, step: int | None, *, trusted: bool = False) -> Checkpoint:
    """The checkpoint of a step, or the newest one.

    Raises:
        ConfigError: no such run, step or checkpoint.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: no such run folder")
    found, refused = list_checkpoints(run, trusted=trusted)
    if step is None and found:
        return found[0]
    for checkpoint in found:
        if checkpoint.manifest.step == step:
            return checkpoint
    if step is not None and checkpoint_folder(run, step).is_dir():
        _checked(checkpoint_folder(run, step), trusted)  # says what is wrong with it
    held = ", ".join(str(checkpoint.manifest.step) for checkpoint in reversed(found)) or "none"
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise ConfigError(f"{run / 'checkpoints'}: {wanted}; whole ones: {held}", *(each.line for each in refused))


def agreed_checkpoints(
    run: Path, found: Sequence[Checkpoint], ranks: Ranks, *, trusted: bool = False
) -> list[Checkpoint]:
    """The checkpoints that the first rank has found in a run, in its order, on every rank. All ranks must call.

    ``found`` counts on the first rank alone: another host may list the folder as it was a little earlier. The others
    look them up by name.

    Raises:
        AgreedError: on every rank, where one does not come to see them.
    """
    if ranks.world_size == 1:
        return list(found)
    named = [(each.folder.name, _manifest_sha256(each.folder)) for each in found] if ranks.is_first else []
    start = time.monotonic()
    opened: list[Checkpoint] = []
    unseen = None
    for name, sha256 in ranks.gather_objects(named)[0]:
        checkpoint = wait_until_visible(partial(_looked_up, run / CHECKPOINTS / name, sha256, trusted), start)
        if checkpoint is None:
            rule = f"is not on {socket.gethostname()} what it is for the first process; all hosts must share {run}"
            unseen = f"{run / CHECKPOINTS / name}: {rule}"
            break
        opened.append(checkpoint)
    lines = dict.fromkeys(line for line in ranks.gather_objects(unseen) if line)
    if lines:
        raise AgreedError("\n".join(lines))
    return opened


def first_whole(
    run: Path, found: Sequence[Checkpoint], ranks: Ranks, *, trusted: bool = False
) -> tuple[Checkpoint | None, list[str]]:
    """The first of the first rank's checkpoints that is whole, and the damage of those before; the same on every rank.

    All ranks must call.

    Raises:
        AgreedError: on every rank, where one does not see them, or that one would have to be trusted.
    """
    damaged: list[str] = []
    for checkpoint in agreed_checkpoints(run, found, ranks, trusted=trusted):
        damage = verify_together(checkpoint, ranks)
        if not damage:
            check_trust(checkpoint, ranks)
            return checkpoint, damaged
        damaged += damage
    return None, damaged


def verify_together(checkpoint: Checkpoint, ranks: Ranks) -> list[str]:
    """One line for each damaged file, the same on every rank; the files are shared out. All ranks must call."""
    names = sorted(checkpoint.manifest.files)[ranks.rank :: ranks.world_size]
    damage = find_damage(checkpoint.folder, names, checkpoint.manifest)
    if ranks.is_first:
        damage += find_foreign(checkpoint.folder, checkpoint.manifest)
    return [line for lines in ranks.gather_objects(damage) for line in lines]


def check_trust(checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Whether a verified checkpoint can be read without running anything; files are shared out. All ranks must call.

    Raises:
        AgreedError: on every rank, where a file asks for more and the checkpoint is not trusted.
    """
    if checkpoint.trusted:
        return
    names = [name for name in sorted(checkpoint.manifest.files) if name.endswith(".pt")]
    found = ((name, asked_code(checkpoint.folder / name)) for name in names[ranks.rank :: ranks.world_size])
    lines = [f"{checkpoint.folder / name}: {refusal(what)}" for name, what in found if what]
    everyone = [line for own in ranks.gather_objects(lines) for line in own]
    if everyone:
        raise AgreedError("\n".join(everyone))


def load_checkpoint(engine: DeepSpeedEngine, checkpoint: Checkpoint, ranks: Ranks) -> StreamState:
    """Brings engine and random generators to where they were; returns the next batch. The files are verified already.

    Raises:
        ConfigError: a file holds more than tensors and numbers, and the checkpoint is not trusted.
        RuntimeError: DeepSpeed did not take it.
    """
    checkpoint_files(engine).trusted = checkpoint.trusted
    loaded, _ = engine.load_checkpoint(str(checkpoint.folder), tag=DEEPSPEED_TAG)
    if loaded is None or engine.global_steps != checkpoint.manifest.step:
        raise RuntimeError(f"{checkpoint.folder}: DeepSpeed loaded step {engine.global_steps}, {loaded}")
    load_generators(checkpoint, ranks, engine.device)
    return StreamState.from_json(checkpoint.manifest.stream)


def load_generators(checkpoint: Checkpoint, ranks: Ranks, device: torch.device) -> None:
    """Brings this rank's random generators to where they were."""
    path = checkpoint.folder / random_name(ranks.rank)
    set_random_states(read_pickle(path, trusted=checkpoint.trusted), device)


def set_aside(path: Path) -> Path | None:
    """Renames what is there to a free name beside it; None where nothing is."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}.replaced-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def _checked(folder: Path, trusted: bool) -> Checkpoint:
    """The checkpoint in a folder; its configuration is held against the manifest, as it is read before all the rest.

    Raises:
        ConfigError: manifest or configuration is missing or damaged.
    """
    manifest = read_manifest(folder)
    damage = find_damage(folder, [CONFIG], manifest)
    if damage:
        raise ConfigError(*damage)
    return Checkpoint(folder, manifest, trusted)


def _looked_up(folder: Path, sha256: str | None, trusted: bool) -> Checkpoint | None:
    """The checkpoint in a folder, if its manifest is this one."""
    try:
        checkpoint = _checked(folder, trusted)
    except ConfigError:
        return None
    return checkpoint if _manifest_sha256(folder) == sha256 else None


def _manifest_sha256(folder: Path) -> str | None:
    """Of its bytes; None where they cannot be read."""
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return None


def random_name(rank: int) -> str:
    """The file of a rank's random generators."""
    return f"random-{rank:05d}.pt"
