"""`longstride export RUN --output DIR`: a sharded checkpoint as model.safetensors and config.json.

The weights are the trainer's fp32 master weights, bit for bit, from any ZeRO stage and any number of processes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from kernels.errors import ConfigError
from launcher.checkpoint import Checkpoint, newer_refusals, open_checkpoint
from launcher.folders import CONFIG, WEIGHTS
from launcher.manifest import find_damage, find_foreign, flush_folder, read_checkpoint_config, write_json
from launcher.reporting import tell_passed_over
from launcher.saved_state import MASTER, SavedState
from launcher.trust import add_trust_argument
from launcher.weight_average import AVERAGE, TRAINED, add_weights_argument

EXPORT_FORMAT = 1


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
    state = SavedState(checkpoint)
    kind = {TRAINED: MASTER, AVERAGE: AVERAGE}[weights]
    if kind not in state.kinds:
        rule = "it holds no moving average, which train.ema_decay has a run keep; take --weights trained"
        raise ConfigError(f"{checkpoint.folder}: {rule}")
    found = {name: state.tensor(name, kind) for name in state.shapes}
    return found | {name: buffer.clone() for name, buffer in state.buffers.items()}
