"""Checkpoints that are whole or not there, and the exact way back from one."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed import DeepSpeedEngine

from data_pipelines import StreamState
from kernels.errors import ConfigError, Problem
from launcher.config import RunConfig
from launcher.deepspeed_keys import precision, zero_stage
from launcher.folders import CHECKPOINTS, CONFIG
from launcher.json_file import flattened
from launcher.manifest import (
    FORMAT_VERSION,
    Manifest,
    find_damage,
    flush_folder,
    read_checkpoint_config,
    read_manifest,
    record_files,
    write_json,
    write_manifest,
)
from launcher.optimizer import parameter_groups
from launcher.processes import Ranks, barrier, gather_objects

DEEPSPEED_TAG = "deepspeed"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder whose manifest could be read; its files are not verified yet."""

    folder: Path
    manifest: Manifest


class Refusal(NamedTuple):
    """A folder that is named like a checkpoint and is none."""

    step: int
    line: str  # what is wrong with it


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def list_checkpoints(run: Path) -> tuple[list[Checkpoint], list[Refusal]]:
    """The checkpoints of a run whose manifest and configuration are whole, newest first, and what else lies there."""
    found: list[Checkpoint] = []
    refused: list[Refusal] = []
    folders = [path for path in (run / CHECKPOINTS).glob("step-*") if _NAME.fullmatch(path.name)]
    for folder in sorted(folders, key=lambda path: int(path.name[5:]), reverse=True):
        try:
            found.append(_checked(folder))
        except ConfigError as error:
            refused.extend(Refusal(int(folder.name[5:]), line) for line in str(error).splitlines())
    return found, refused


def newer_refusals(run: Path, checkpoint: Checkpoint) -> list[str]:
    """One line for each newer folder of a run that was passed over for a checkpoint."""
    _, refused = list_checkpoints(run)
    return [refusal.line for refusal in refused if refusal.step > checkpoint.manifest.step]


def open_checkpoint(run: Path, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the newest one.

    Raises:
        ConfigError: no such run, step or checkpoint.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: no such run folder")
    found, refused = list_checkpoints(run)
    if step is None and found:
        return found[0]
    for checkpoint in found:
        if checkpoint.manifest.step == step:
            return checkpoint
    if step is not None and checkpoint_folder(run, step).is_dir():
        _checked(checkpoint_folder(run, step))  # says what is wrong with it
    held = ", ".join(str(checkpoint.manifest.step) for checkpoint in reversed(found)) or "none"
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise ConfigError(f"{run / 'checkpoints'}: {wanted}; whole ones: {held}", *(each.line for each in refused))


def check_matches(checkpoint: Checkpoint, config: RunConfig, fingerprint: str, world_size: int) -> None:
    """Whether a run may go on from a checkpoint.

    Raises:
        ConfigError: it belongs to another model, data order, batch, number of processes, ZeRO stage or precision.
    """
    manifest, theirs = checkpoint.manifest, read_checkpoint_config(checkpoint.folder)
    origin = f"the checkpoint {checkpoint.folder}"
    problems = []
    own_model, their_model = (flattened(each.to_json()["model"], "model") for each in (config, theirs))
    for path in sorted((own_model.keys() | their_model.keys()) - {"model.backend"}):  # who computes, not what
        if own_model.get(path) != their_model.get(path):
            rule = f"{origin} belongs to another model, with {their_model.get(path)!r} there"
            problems.append(Problem(path, rule, own_model.get(path)))
    state = StreamState.from_json(manifest.stream)
    ours, others = config.data, theirs.data
    pairs = (
        ("data.train_split", ours.train_split, others.train_split),
        ("data.shuffle_bytes", ours.shuffle_bytes, others.shuffle_bytes),
        ("data.order", ours.order, others.order),
        ("data.packing", ours.packing, others.packing),
        ("data.separator", ours.separator, others.separator),
        ("data.hop", ours.hop, others.hop),
        ("data.seed", ours.seed, state.seed),
        ("train.global_batch", config.train.global_batch, state.global_batch),
        ("deepspeed.zero_optimization.stage", zero_stage(config.deepspeed), manifest.zero_stage),
    )
    problems += [Problem(path, f"{origin} has {has}", asked) for path, asked, has in pairs if asked != has]
    # Context, split, cutting and shuffling are part of the fingerprint; a line of their own has said so already.
    told = any(each.path == "model.context" or each.path.startswith("data.") for each in problems)
    if state.fingerprint != fingerprint and not told:
        problems.append(Problem("data.path", f"{origin} belongs to other data", ours.path))
    if precision(config.deepspeed) != manifest.precision:
        problems.append(
            Problem("deepspeed", f"trains in {precision(config.deepspeed)}; {origin} in {manifest.precision}")
        )
    if world_size != manifest.world_size:
        rule = f"{world_size} here; {origin} is of {manifest.world_size}: start as many"
        problems.append(Problem("processes", rule))
    if problems:
        raise ConfigError(*problems)


def verify_together(checkpoint: Checkpoint, ranks: Ranks) -> list[str]:
    """One line for each damaged file, the same on every rank; the files are shared out. All ranks must call."""
    names = sorted(checkpoint.manifest.files)[ranks.rank :: ranks.world_size]
    damage = find_damage(checkpoint.folder, names, checkpoint.manifest)
    return [line for lines in gather_objects(damage, ranks) for line in lines]


def save_checkpoint(engine: DeepSpeedEngine, config: RunConfig, stream: StreamState, ranks: Ranks) -> Path:
    """Writes the checkpoint of the engine's step; returns its folder. All ranks must call.

    Everything is written beside its place and renamed there by rank 0 once every rank has flushed its files.
    """
    step = engine.global_steps
    final = checkpoint_folder(Path(config.train.output), step)
    partial = final.with_name(f".{final.name}.partial")
    if ranks.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier(ranks)
    engine.save_checkpoint(str(partial), tag=DEEPSPEED_TAG, save_latest=False)
    torch.save(_random_states(engine.device), partial / _random_name(ranks.rank))
    if ranks.is_first:
        write_json(partial / CONFIG, config.to_json())
    barrier(ranks)
    shares = gather_objects(record_files(partial, ranks.rank, ranks.world_size), ranks)
    if ranks.is_first:
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            step=step,
            world_size=ranks.world_size,
            zero_stage=zero_stage(config.deepspeed),
            precision=precision(config.deepspeed),
            stream=stream.to_json(),
            parameter_groups=parameter_groups(dict(engine.module.named_parameters())),
            versions={name: importlib.metadata.version(name) for name in ("torch", "deepspeed")},
            files={name: record for share in shares for name, record in share.items()},
        )
        write_manifest(partial, manifest)
        for folder in (partial / DEEPSPEED_TAG, partial):
            flush_folder(folder)
        set_aside(final)
        partial.rename(final)
        flush_folder(final.parent)
    barrier(ranks)
    return final


def load_checkpoint(engine: DeepSpeedEngine, checkpoint: Checkpoint, ranks: Ranks) -> StreamState:
    """Brings engine and random generators to where they were; returns the next batch. The files are verified already.

    Raises:
        RuntimeError: DeepSpeed did not take it.
    """
    loaded, _ = engine.load_checkpoint(str(checkpoint.folder), tag=DEEPSPEED_TAG)
    if loaded is None or engine.global_steps != checkpoint.manifest.step:
        raise RuntimeError(f"{checkpoint.folder}: DeepSpeed loaded step {engine.global_steps}, {loaded}")
    states = torch.load(checkpoint.folder / _random_name(ranks.rank), weights_only=True)
    torch.set_rng_state(states["cpu"])
    if "device" in states and engine.device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], engine.device)
    return StreamState.from_json(checkpoint.manifest.stream)


def set_aside(path: Path) -> Path | None:
    """Renames what is there to a free name beside it; None where nothing is."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}.replaced-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def _checked(folder: Path) -> Checkpoint:
    """The checkpoint in a folder; its configuration is held against the manifest, as it is read before all the rest.

    Raises:
        ConfigError: manifest or configuration is missing or damaged.
    """
    manifest = read_manifest(folder)
    damage = find_damage(folder, [CONFIG], manifest)
    if damage:
        raise ConfigError(*damage)
    return Checkpoint(folder, manifest)


def _random_name(rank: int) -> str:
    return f"random-{rank:05d}.pt"


def _random_states(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return states
