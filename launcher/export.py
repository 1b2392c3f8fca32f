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
from launcher.manifest import find_damage, find_foreign, flush_folder, read_checkpoint_config, write_json
from launcher.reporting import tell_passed_over
from launcher.trust import add_trust_argument
from launcher.unpickling import read_pickle
from launcher.weight_average import AVERAGE, TRAINED, add_weights_argument

EXPORT_FORMAT = 1
# Where a shard has its master weights, and where the optimiser's state, by ZeRO stage.
_KEYS = {
    1: ("single_partition_of_fp32_groups", "base_optimizer_state"),
    2: ("single_partition_of_fp32_groups", "base_optimizer_state"),
    3: ("fp32_flat_groups", "optimizer_state_dict"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--step", type=int, default=None, metavar="N", help="checkpoint to export (default: the newest)"
    )
    add_weights_argument(parser)
    add_trust_argument(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to make")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns its exit code."""
    checkpoint = export(
        arguments.run, arguments.step, arguments.output, arguments.weights, trusted=arguments.trust_checkpoint
    )
    if arguments.step is None:
        tell_passed_over(newer_refusals(arguments.run, checkpoint))
    what = f"step {checkpoint.manifest.step} of {arguments.run}"
    average = ", the moving average of its weights" if arguments.weights == AVERAGE else ""
    print(f"{arguments.output}: {what}{average}", file=sys.stderr)
    return 0


def export(
    run_folder: Path, step: int | None, output: Path, kind: str = TRAINED, *, trusted: bool = False
) -> Checkpoint:
    """Exports a checkpoint of a run into a new folder; returns the checkpoint. ``kind`` is one of ``WEIGHTS_KINDS``.

    Raises:
        ConfigError: no such checkpoint, a damaged one, one without averages or to be trusted, or an output that exists.
    """
    if output.exists():
        raise ConfigError(f"--output={output}: exists already; nothing is overwritten")
    checkpoint = open_checkpoint(run_folder, step, trusted=trusted)
    config = read_checkpoint_config(checkpoint.folder)
    weights = master_weights(checkpoint, kind)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
        origin = {
            "run": str(run_folder.resolve()),
            "step": checkpoint.manifest.step,
            "weights": kind,
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


def master_weights(checkpoint: Checkpoint, weights: str = TRAINED) -> dict[str, Tensor]:
    """Every parameter by name, fp32, contiguous, on the CPU; the files are verified first.

    Args:
        checkpoint: of any ZeRO stage and number of ranks.
        weights: one of ``WEIGHTS_KINDS``: as they were trained, or their moving average.

    Raises:
        ConfigError: a file is damaged or foreign, would have to be trusted, or weights or averages are missing.
    """
    damage = find_damage(checkpoint.folder, sorted(checkpoint.manifest.files), checkpoint.manifest)
    damage += find_foreign(checkpoint.folder, checkpoint.manifest)
    if damage:
        raise ConfigError(*damage)
    read = _unsharded_weights if checkpoint.manifest.zero_stage == 0 else _sharded_weights
    try:
        found = read(checkpoint, weights)
    except _NoAverageError:
        rule = "it holds no moving average, which train.ema_decay has a run keep; take --weights trained"
        raise ConfigError(f"{checkpoint.folder}: {rule}") from None
    names = {name for group in checkpoint.manifest.parameter_groups for name in group}
    missing = names - found.keys()
    if missing:
        raise ConfigError(f"{checkpoint.folder}: without the weights {', '.join(sorted(missing))}")
    # A clone each: slices of one flat buffer would all write the whole buffer, and safetensors refuses shared memory.
    return {name: tensor.detach().float().contiguous().clone() for name, tensor in found.items()}


class _NoAverageError(Exception):
    """The optimiser's state has no moving average."""


def _sharded_weights(checkpoint: Checkpoint, weights: str) -> dict[str, Tensor]:
    """ZeRO 1 to 3, put together by DeepSpeed's own tool, save for the one optimiser whose shards it refuses."""
    from deepspeed.utils import zero_to_fp32 as tool

    folder = str(checkpoint.folder / DEEPSPEED_TAG)
    shards = [_read(checkpoint, path)["optimizer_state_dict"] for path in tool.get_optim_files(folder)]
    if "zero_stage" not in shards[0]:
        return _bf16_optimizer_weights(checkpoint, shards, weights)
    key, inner = _KEYS[int(shards[0]["zero_stage"])]
    flat = [_flat_groups(shard[key], shard[inner], weights) for shard in shards]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        models = [_model_states(_read(checkpoint, path)) for path in tool.get_model_state_files(folder)]
        if shards[0]["zero_stage"] == 3:
            gathered = tool._get_fp32_state_dict_from_zero3_checkpoint(len(shards), flat, models, False)
            return tool.to_torch_tensor(gathered)
        paddings = shards[0].get("param_alignment_paddings")
        return tool._get_fp32_state_dict_from_zero2_checkpoint(len(shards), flat, models, False, paddings)


def _read(checkpoint: Checkpoint, path: Path | str) -> dict[str, Any]:
    return read_pickle(path, mapped=True, trusted=checkpoint.trusted)


def _model_states(content: dict[str, Any]) -> Any:
    """What DeepSpeed's tool makes of a file of model states, which it would unpickle whatever is in it."""
    from deepspeed.utils.zero_to_fp32 import zero_model_state

    return zero_model_state(
        buffers={name: content["module"][name].float() for name in content["buffer_names"]},
        param_shapes=content["param_shapes"],
        shared_params=[list(pair) for pair in content["shared_params"].items()],
        ds_version=content["ds_version"],
        frozen_param_shapes=content.get("frozen_param_shapes"),
        frozen_param_fragments=content.get("frozen_param_fragments"),
    )


def _flat_groups(masters: list[Tensor], optimizer: dict[str, Any], weights: str) -> list[Tensor]:
    """One rank's flat vectors: its master weights, or their averages from the optimiser's state, in the same order."""
    if weights == TRAINED:
        return masters
    state = optimizer["state"]
    if any(AVERAGE not in state.get(number, {}) for number, master in enumerate(masters) if master.numel()):
        raise _NoAverageError
    averages = (state.get(number, {}).get(AVERAGE, master) for number, master in enumerate(masters))
    # The state has the padding behind the last parameter that the saved masters are without.
    return [average.flatten()[: master.numel()] for average, master in zip(averages, masters, strict=True)]


def _bf16_optimizer_weights(checkpoint: Checkpoint, shards: list[dict[str, Any]], weights: str) -> dict[str, Tensor]:
    """ZeRO 1 in bf16 with gradients gathered in fp32: one flat vector a parameter group, cut over the ranks."""
    model = _read(checkpoint, checkpoint.folder / DEEPSPEED_TAG / "mp_rank_00_model_states.pt")
    found = {name: model["module"][name] for name in model["buffer_names"]}
    flat = [
        _flat_groups(shard["single_partition_of_fp32_groups"], shard["base_optimizer_state"], weights)
        for shard in shards
    ]
    for shapes, pieces in zip(model["param_shapes"], zip(*flat, strict=True), strict=True):
        whole = torch.cat(pieces)
        sizes = [shape.numel() for shape in shapes.values()]
        parts = whole[: sum(sizes)].split(sizes)  # what is left is padding
        found.update({name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)})
    return found


def _unsharded_weights(checkpoint: Checkpoint, weights: str) -> dict[str, Tensor]:
    """ZeRO 0, which DeepSpeed's own tool does not read: one file; in half precision its master weights are nameless."""
    content = _read(checkpoint, checkpoint.folder / DEEPSPEED_TAG / "mp_rank_00_model_states.pt")
    found: dict[str, Tensor] = dict(content["module"])
    names = [name for group in checkpoint.manifest.parameter_groups for name in group]
    masters = [found[name] for name in names]
    optimizer = content["optimizer"]
    if checkpoint.manifest.precision != "fp32":
        masters = [master for group in optimizer["fp32_groups"] for master in group]
        optimizer = optimizer["optimizer_state_dict"]
    if weights == AVERAGE:
        averages = _flat_groups(masters, optimizer, weights)
        masters = [average.view_as(master) for average, master in zip(averages, masters, strict=True)]
    return found | dict(zip(names, masters, strict=True))
