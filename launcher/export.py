"""`longstride export RUN --output DIR`: a sharded checkpoint as model.safetensors and config.json.

The weights are the trainer's fp32 master weights, bit for bit, from any ZeRO stage and any number of processes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.errors import ConfigError
from launcher.checkpoint import DEEPSPEED_TAG, Checkpoint, newer_refusals, open_checkpoint
from launcher.folders import CONFIG, WEIGHTS
from launcher.manifest import find_damage, flush_folder, read_checkpoint_config, write_json
from launcher.reporting import tell_passed_over

EXPORT_FORMAT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--step", type=int, default=None, metavar="N", help="checkpoint to export (default: the newest)"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to make")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns its exit code."""
    checkpoint = export(arguments.run, arguments.step, arguments.output)
    if arguments.step is None:
        tell_passed_over(newer_refusals(arguments.run, checkpoint))
    print(f"{arguments.output}: step {checkpoint.manifest.step} of {arguments.run}", file=sys.stderr)
    return 0


def export(run_folder: Path, step: int | None, output: Path) -> Checkpoint:
    """Exports a checkpoint of a run into a new folder; returns the checkpoint.

    Raises:
        ConfigError: no such checkpoint, a damaged one, or an output that exists.
    """
    if output.exists():
        raise ConfigError(f"--output={output}: exists already; nothing is overwritten")
    checkpoint = open_checkpoint(run_folder, step)
    config = read_checkpoint_config(checkpoint.folder)
    weights = master_weights(checkpoint)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
        origin = {
            "run": str(run_folder.resolve()),
            "step": checkpoint.manifest.step,
            "world_size": checkpoint.manifest.world_size,
            "zero_stage": checkpoint.manifest.zero_stage,
            "precision": checkpoint.manifest.precision,
            "versions": checkpoint.manifest.versions,
            "notes": config.notes,
        }
        write_json(partial / CONFIG, {"format": EXPORT_FORMAT, "model": config.to_json()["model"], "origin": origin})
        (partial / WEIGHTS).chmod((partial / CONFIG).stat().st_mode)  # safetensors makes it private
        flush_folder(partial)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return checkpoint


def master_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every parameter by name, fp32, contiguous, on the CPU; the files are verified first.

    Raises:
        ConfigError: a file is damaged, or weights are missing.
    """
    damage = find_damage(checkpoint.folder, sorted(checkpoint.manifest.files), checkpoint.manifest)
    if damage:
        raise ConfigError(*damage)
    read = _unsharded_weights if checkpoint.manifest.zero_stage == 0 else _sharded_weights
    weights = read(checkpoint)
    names = {name for group in checkpoint.manifest.parameter_groups for name in group}
    missing = names - weights.keys()
    if missing:
        raise ConfigError(f"{checkpoint.folder}: without the weights {', '.join(sorted(missing))}")
    # A clone each: slices of one flat buffer would all write the whole buffer, and safetensors refuses shared memory.
    return {name: tensor.detach().float().contiguous().clone() for name, tensor in weights.items()}


def _sharded_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """ZeRO 1 to 3, by DeepSpeed's own tool, save for the one optimiser whose shards it refuses."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    first = _load(next((checkpoint.folder / DEEPSPEED_TAG).glob("*zero_pp_rank_0_*_optim_states.pt")))
    if "zero_stage" not in first["optimizer_state_dict"]:
        return _bf16_optimizer_weights(checkpoint)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.folder), DEEPSPEED_TAG)


def _bf16_optimizer_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """ZeRO 1 in bf16 with gradients gathered in fp32: one flat vector a parameter group, cut over the ranks."""
    folder = checkpoint.folder / DEEPSPEED_TAG
    model = _load(folder / "mp_rank_00_model_states.pt")
    weights = {name: model["module"][name] for name in model["buffer_names"]}
    shards = [
        _load(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        for rank in range(checkpoint.manifest.world_size)
    ]
    for group, shapes in enumerate(model["param_shapes"]):
        flat = torch.cat([shard["single_partition_of_fp32_groups"][group] for shard in shards])
        sizes = [shape.numel() for shape in shapes.values()]
        pieces = flat[: sum(sizes)].split(sizes)  # what is left is padding
        weights.update({name: piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)})
    return weights


def _unsharded_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """ZeRO 0, which DeepSpeed's own tool does not read: one file; in half precision its master weights are nameless."""
    content = _load(checkpoint.folder / DEEPSPEED_TAG / "mp_rank_00_model_states.pt")
    weights: dict[str, Tensor] = dict(content["module"])
    if checkpoint.manifest.precision != "fp32":
        groups = content["optimizer"]["fp32_groups"]
        for names, masters in zip(checkpoint.manifest.parameter_groups, groups, strict=True):
            weights.update(zip(names, masters, strict=True))
    return weights


def _load(path: Path) -> dict[str, Any]:
    # Pickles of DeepSpeed's own classes, which weights_only refuses; the manifest has vouched for the bytes.
    return torch.load(path, map_location="cpu", weights_only=False)
