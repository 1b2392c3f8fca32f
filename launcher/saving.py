"""Saves a checkpoint that is whole or not there."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine

from data_pipelines import StreamState
from launcher.checkpoint import DEEPSPEED_TAG, checkpoint_folder, random_name, set_aside
from launcher.config import RunConfig
from launcher.deepspeed_keys import precision, zero_stage
from launcher.folders import CONFIG
from launcher.manifest import FORMAT_VERSION, Manifest, flush_folder, record_files, write_json, write_manifest
from launcher.optimizer import parameter_groups
from launcher.processes import Ranks, barrier, gather_objects


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
    torch.save(_random_states(engine.device), partial / random_name(ranks.rank))
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


def _random_states(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return states
