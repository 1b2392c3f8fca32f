"""Whether a run may go on from a checkpoint."""

from __future__ import annotations

from typing import Any

from longstride.data_pipelines.order import StreamState
from longstride.kernels.errors import ConfigError, Problem
from longstride.launcher.checkpoints.checkpoint import Checkpoint
from longstride.launcher.checkpoints.manifest import read_checkpoint_config
from longstride.launcher.config import RunConfig, flattened, precision, zero_stage


def check_matches(checkpoint: Checkpoint, config: RunConfig, fingerprint: str) -> None:
    """Whether a run may go on from a checkpoint.

    Raises:
        ConfigError: it belongs to another model, data order or batch. Another number of processes, ZeRO stage or
            precision is no reason: see ``needs_conversion``.
    """
    manifest, theirs = checkpoint.manifest, read_checkpoint_config(checkpoint.folder)
    origin = f"the checkpoint {checkpoint.folder}"
    if theirs.data.order != config.data.order:
        rule = f"{origin} counts steps of the order {theirs.data.order!r}, which is no more; index its tars with "
        rule += "`longstride data index`, and begin a run in another folder"
        raise ConfigError.at("data.order", config.data.order, rule)
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
        ("data.packing", ours.packing, others.packing),
        ("data.separator", ours.separator, others.separator),
        ("data.hop", ours.hop, others.hop),
        ("data.seed", ours.seed, state.seed),
        ("train.global_batch", config.train.global_batch, state.global_batch),
    )
    problems += [Problem(path, f"{origin} has {has}", asked) for path, asked, has in pairs if asked != has]
    # Context, split, cutting and shuffling are part of the fingerprint; a line of their own has said so already.
    told = any(each.path == "model.context" or each.path.startswith("data.") for each in problems)
    if state.fingerprint != fingerprint and not told:
        problems.append(Problem("data.path", f"{origin} belongs to other data", ours.path))
    if problems:
        raise ConfigError(*problems)


def needs_conversion(checkpoint: Checkpoint, config: RunConfig, world_size: int) -> bool:
    """Whether DeepSpeed's files are laid out otherwise than a run of so many processes would lay them out."""
    manifest, theirs = checkpoint.manifest, read_checkpoint_config(checkpoint.folder).deepspeed
    saved = (manifest.world_size, manifest.zero_stage, manifest.precision, *_layout_keys(theirs))
    own = config.deepspeed
    return saved != (world_size, zero_stage(own), precision(own), *_layout_keys(own))


def told_layout(checkpoint: Checkpoint) -> str:
    """What saved a checkpoint, in words."""
    manifest = checkpoint.manifest
    what = f"{_processes(manifest.world_size)} in ZeRO {manifest.zero_stage}, {manifest.precision}"
    return f"step {manifest.step} was saved by {what}"


def told_conversion(checkpoint: Checkpoint, config: RunConfig, world_size: int) -> str:
    """Of what a checkpoint was, and for what it is converted, in words."""
    manifest, own = checkpoint.manifest, (zero_stage(config.deepspeed), precision(config.deepspeed))
    what = [_processes(world_size), f"ZeRO {own[0]}"]
    if own[1] != manifest.precision:
        what.append(own[1])
    if own[1] == "fp16" != manifest.precision:
        what.append("where the loss scale begins anew")
    return f"{told_layout(checkpoint)}; converted for {what[0]} in {', '.join(what[1:])}"


def _layout_keys(section: dict[str, Any]) -> tuple[object, ...]:
    """What else decides where a weight lies in DeepSpeed's files, and under which of its optimisers."""
    zero = section.get("zero_optimization", {})
    if zero_stage(section) == 3:
        return (zero.get("sub_group_size"),)
    if zero_stage(section) == 0:
        return ()
    keys = ("round_robin_gradients", "parameter_alignment")
    return (section.get("data_types", {}).get("grad_accum_dtype"), *(bool(zero.get(key)) for key in keys))


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"
