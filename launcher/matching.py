"""Whether a run may go on from a checkpoint."""

from __future__ import annotations

from data_pipelines import StreamState
from kernels.errors import ConfigError, Problem
from launcher.checkpoint import Checkpoint
from launcher.config import RunConfig
from launcher.deepspeed_keys import precision, zero_stage
from launcher.json_file import flattened
from launcher.manifest import read_checkpoint_config


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
