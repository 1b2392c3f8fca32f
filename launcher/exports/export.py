"""`longstride export RUN --output DIR`: a sharded checkpoint as safetensors, config.json and a model card.

The weights are the trainer's fp32 master weights from any ZeRO stage and any number of processes, bit for bit or
rounded once. They go from the checkpoint's mapped files into the export's one tensor at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longstride.kernels.errors import ConfigError
from longstride.launcher.checkpoints import (
    MASTER,
    Checkpoint,
    SavedState,
    StreamedState,
    find_damage,
    find_foreign,
    flush_folder,
    newer_refusals,
    open_checkpoint,
    read_checkpoint_config,
    write_json,
    write_text,
)
from longstride.launcher.config import RunConfig, add_trust_argument
from longstride.launcher.engine import AVERAGE, TRAINED, add_weights_argument
from longstride.launcher.exports.check import check_files, check_losses
from longstride.launcher.exports.model_card import model_card
from longstride.launcher.exports.weight_files import parse_size, write_weights
from longstride.launcher.models import (
    DTYPES,
    EXPORT_FORMAT,
    Exported,
    combined,
    describe,
    empty_model,
    hub_fields,
    hub_files,
    usable_device,
)
from longstride.launcher.output import CONFIG, MODEL_CARD, tell_passed_over

DEFAULT_SHARD_SIZE = "5GB"
_KINDS = {TRAINED: MASTER, AVERAGE: AVERAGE}
_TYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # in config.json, as torch has them


@dataclass(frozen=True, slots=True)
class Options:
    """How a checkpoint is exported."""

    kind: str = TRAINED  # or AVERAGE
    dtype: str = "fp32"  # one of DTYPES
    shard_bytes: int = parse_size(DEFAULT_SHARD_SIZE)
    check: bool = True
    device: str = "cpu"  # of the check
    trusted: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--step", type=int, default=None, metavar="N", help="checkpoint to export (default: the newest)"
    )
    add_weights_argument(parser)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="of the weights (default: fp32, exact)")
    parser.add_argument(
        "--shard-size",
        default=DEFAULT_SHARD_SIZE,
        metavar="SIZE",
        help=f"weights above it are cut into several files (default: {DEFAULT_SHARD_SIZE})",
    )
    parser.add_argument("--no-check", action="store_true", help="leave out the loss on the checkpoint's probe")
    parser.add_argument("--device", default="cpu", help="that computes the check (default: cpu)")
    add_trust_argument(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to make")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns its exit code."""
    options = Options(
        kind=arguments.weights,
        dtype=arguments.dtype,
        shard_bytes=parse_size(arguments.shard_size),
        check=not arguments.no_check,
        device=arguments.device,
        trusted=arguments.trust_checkpoint,
    )
    passed_over = arguments.step is None

    def tell(checkpoint: Checkpoint) -> None:
        if passed_over:
            tell_passed_over(newer_refusals(arguments.run, checkpoint))

    checkpoint, seen = export(arguments.run, arguments.step, arguments.output, options, chosen=tell)
    print(seen, file=sys.stderr)
    what = f"step {checkpoint.manifest.step} of {arguments.run}"
    average = ", the moving average of its weights" if arguments.weights == AVERAGE else ""
    print(f"{arguments.output}: {what}{average}, {arguments.dtype}", file=sys.stderr)
    return 0


def export(
    run_folder: Path,
    step: int | None,
    output: Path,
    options: Options | None = None,
    *,
    chosen: Callable[[Checkpoint], None] = lambda _: None,
) -> tuple[Checkpoint, str]:
    """Exports a checkpoint of a run into a new folder; returns it, and a line about the check.

    ``chosen`` is called with the checkpoint before it is verified.

    Raises:
        ConfigError: no such checkpoint, a damaged one, one without averages or to be trusted, a value that the type
            cannot hold, a model that computes something else than the trainer's, or an output that exists.
    """
    options = options or Options()
    if output.exists() or output.is_symlink():
        raise ConfigError(f"--output={output}: exists already; nothing is overwritten")
    device = usable_device(options.device)
    checkpoint = open_checkpoint(run_folder, step, trusted=options.trusted)
    chosen(checkpoint)
    config = read_checkpoint_config(checkpoint.folder)
    verify(checkpoint)
    state = StreamedState(checkpoint)
    _require(state.state, checkpoint, options.kind)
    shapes = _shapes(checkpoint, config, state.state)
    _check_space(output, options, shapes)
    folder = output.with_name(f".{output.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    missing = [parent for parent in folder.parents if not parent.exists()]
    folder.mkdir(parents=True)
    try:
        _write(folder, run_folder, checkpoint, config, state, shapes, options)
        seen = "probe: not checked, as --no-check asks"
        if options.check:
            exported = Exported(folder)
            check_files(exported)
            seen = check_losses(exported, checkpoint, state.tensor, options.kind, device)
        flush_folder(folder)
        folder.rename(output)
        flush_folder(output.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # something else has come to lie there
            for parent in missing:
                parent.rmdir()
        raise
    return checkpoint, seen


def master_weights(checkpoint: Checkpoint, weights: str = TRAINED) -> dict[str, Tensor]:
    """Every parameter by name, fp32, contiguous, on the CPU; the files are verified first.

    Args:
        checkpoint: of any ZeRO stage and number of ranks.
        weights: ``TRAINED`` or ``AVERAGE``: as they were trained, or their moving average.

    Raises:
        ConfigError: a file is damaged or foreign, would have to be trusted, or weights or averages are missing.
    """
    verify(checkpoint)
    state = SavedState(checkpoint)
    _require(state, checkpoint, weights)
    found = {name: state.tensor(name, _KINDS[weights]) for name in state.shapes}
    return found | {name: buffer.clone() for name, buffer in state.buffers.items()}


def verify(checkpoint: Checkpoint) -> None:
    """Raise ConfigError where a file of the checkpoint is damaged, or one lies there that is not named."""
    damage = find_damage(checkpoint.folder, sorted(checkpoint.manifest.files), checkpoint.manifest)
    damage += find_foreign(checkpoint.folder, checkpoint.manifest)
    if damage:
        raise ConfigError(*damage)


def _require(state: SavedState, checkpoint: Checkpoint, weights: str) -> None:
    """Raise ConfigError where there are no such weights."""
    if _KINDS[weights] not in state.kinds:
        rule = "it holds no moving average, which train.ema_decay has a run keep; take --weights trained"
        raise ConfigError(f"{checkpoint.folder}: {rule}")


def _write(
    folder: Path,
    run_folder: Path,
    checkpoint: Checkpoint,
    config: RunConfig,
    state: StreamedState,
    shapes: dict[str, torch.Size],
    options: Options,
) -> None:
    """Weights, config.json and card, each on the disk once it is written."""
    tensor = partial(state.tensor, kind=_KINDS[options.kind])
    hashes = write_weights(folder, shapes, tensor, DTYPES[options.dtype], options.shard_bytes)
    model = config.to_json()["model"]
    fingerprint = combined(model, hashes)
    manifest = checkpoint.manifest
    origin = {
        "run": str(run_folder.resolve()),
        "step": manifest.step,
        "weights": options.kind,
        "world_size": manifest.world_size,
        "zero_stage": manifest.zero_stage,
        "precision": manifest.precision,
        "versions": manifest.versions,
        "notes": config.notes,
    }
    content: dict[str, Any] = {"format": EXPORT_FORMAT, "model": model, "dtype": _TYPE_NAMES[options.dtype]}
    content |= {"data": describe(config)} | hub_fields()
    write_json(folder / CONFIG, content | {"fingerprint": fingerprint, "origin": origin})
    for name, text in hub_files(config.model).items():
        write_text(folder / name, text)
    card = model_card(run_folder, checkpoint, config, options.kind, options.dtype, fingerprint)
    write_text(folder / MODEL_CARD, card)


def _shapes(checkpoint: Checkpoint, config: RunConfig, state: SavedState) -> dict[str, torch.Size]:
    """The model's tensors in its own order; ConfigError where they are not those that the checkpoint holds."""
    shapes = {name: tensor.shape for name, tensor in empty_model(config.model).state_dict().items()}
    wrong = sorted(name for name in shapes.keys() | state.shapes.keys() if shapes.get(name) != state.shapes.get(name))
    if wrong:
        rule = f"its weights are not those of the model in its {CONFIG}: {', '.join(wrong[:3])}"
        raise ConfigError(f"{checkpoint.folder}: {rule}{' and more' if len(wrong) > 3 else ''}")
    return shapes


def _check_space(output: Path, options: Options, shapes: dict[str, torch.Size]) -> None:
    """Whether the weights fit on the disk; ConfigError if not."""
    needed = DTYPES[options.dtype].itemsize * sum(math.prod(shape) for shape in shapes.values())
    above = next(parent for parent in output.absolute().parents if parent.exists())
    free = shutil.disk_usage(above).free
    if needed > free:
        rule = f"the weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; make room"
        raise ConfigError(f"--output={output}: {rule}")
