"""`longstride export RUN --output DIR`: convert a sharded checkpoint to safetensors, config.json and a model card.

The weights are the trainer's fp32 master weights of any ZeRO stage and number of ranks, exact or rounded once. They are
copied from the checkpoint's mapped files one tensor at a time. Then the exported model's loss on the checkpoint's probe
is compared with the trainer's, with one residual block in memory at a time.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from longstride.data_pipelines.durable import complete_folder, write_over
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import Checkpoint, SavedState, open_checkpoint, write_json
from longstride.launcher.exports.for_hubs import hub_fields, hub_files, license_fields, model_card, refresh_stub
from longstride.launcher.exports.programs import export_program
from longstride.launcher.files import check_free
from longstride.launcher.identity import trained_on
from longstride.launcher.models import (
    ALIGNMENT,
    AVERAGE,
    DTYPES,
    TRAINED,
    Exported,
    Fingerprint,
    Shapes,
    stream_model,
    usable_device,
    write_tensors,
)
from longstride.launcher.output import counting, file_names, say
from longstride.launcher.verbs import DEFAULT_SHARD_SIZE
from longstride.sparse_model import ModelConfig

_PROBE = "probe (a check on random bytes, not the model's score)"  # random bytes have a high loss
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B?)", re.ASCII)


def parse_size(text: str) -> int:
    """Convert a size such as 5GB, 500MB or 2GiB to bytes (a bare number is bytes); ConfigError for others and 0."""
    match = _SIZE.fullmatch(text.strip().upper())
    unit = match[2].removesuffix("B") + "B" if match and match[2] not in ("", "B") else ""
    size = int(float(match[1]) * _UNITS[unit]) if match and unit in _UNITS else 0
    if size < 1:
        raise ConfigError(f"--shard-size={text}: must be a size above 0 such as 5GB, 500MB or 2GiB")
    return size


@dataclass(frozen=True, slots=True)
class Options:
    """How to export a checkpoint."""

    kind: str = TRAINED  # or AVERAGE
    dtype: str = "fp32"  # one of DTYPES
    shard_bytes: int = parse_size(DEFAULT_SHARD_SIZE)
    check: bool = True
    device: str = "cpu"  # of the check
    trusted: bool = False
    license: str | None = None  # for the card, see ``license_fields``


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return its exit code."""
    options = Options(
        kind=arguments.weights,
        dtype=arguments.dtype,
        shard_bytes=parse_size(arguments.shard_size),
        check=not arguments.no_check,
        device=arguments.device,
        trusted=arguments.trust_checkpoint,
        license=arguments.license,
    )
    takes_more = arguments.step is not None or replace(options, check=True, trusted=False) != Options()
    if arguments.format is not None and (takes_more or arguments.refresh):
        rule = "only takes the folder of an export, --output, --no-check and --trust-code"
        raise ConfigError(f"--format={arguments.format}: {rule}")
    if arguments.refresh and (takes_more or arguments.no_check or arguments.output is not None):
        raise ConfigError("--refresh: only takes the folder of an export and --trust-code")
    if not arguments.refresh and arguments.output is None:
        raise ConfigError("--output: must name the new folder")
    if arguments.refresh:
        lines = [refresh_stub(arguments.run, trust_code=options.trusted)]
    elif arguments.format is not None:
        trust = options.trusted
        lines = [export_program(arguments.run, arguments.output, arguments.format, options.check, trust_code=trust)]
    else:
        checkpoint, line = export(arguments.run, arguments.step, arguments.output, options)
        what = f"step {checkpoint.manifest.step} of {arguments.run}"
        average = ", the moving average of its weights" if arguments.weights == AVERAGE else ""
        lines = [line, f"{arguments.output}: {what}{average}, {arguments.dtype}"]
    print(*lines, sep="\n", file=sys.stderr)
    return 0


def export(
    run_folder: Path, step: int | Literal["best"] | None, output: Path, options: Options | None = None
) -> tuple[Checkpoint, str]:
    """Export a checkpoint of a run into a new folder; return it, and a line about the check.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, lacks averages or must be trusted, the dtype cannot
            hold a value, the model computes something else than the trainer's, or the output exists.
    """
    options = options or Options()
    check_free(output)
    licensed = {} if options.license is None else license_fields(options.license)
    device = usable_device(options.device)
    checkpoint = open_checkpoint(run_folder, step, trusted=options.trusted)
    if step is None:
        for refusal in checkpoint.newer_refusals():
            say(f"passed over: {refusal}")
    checkpoint.verify()
    state = SavedState(checkpoint, remapped=True)
    kind, shapes = state.kind_of(options.kind), state.model
    needed = DTYPES[options.dtype].itemsize * shapes.parameters
    free = shutil.disk_usage(next(parent for parent in output.absolute().parents if parent.exists())).free
    if needed > free:
        sizes = f"the weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise ConfigError(f"--output={output}: {sizes}; free some space")
    with complete_folder(output) as folder:
        _write(folder, run_folder, checkpoint, partial(state.tensor, kind=kind), shapes, options, licensed)
        line = "probe: not checked, as --no-check asks"
        if options.check:
            exported = Exported(folder, trust_code=True)  # the run already imports it
            if exported.fingerprint() != exported.content["fingerprint"]:
                raise ConfigError(f"{folder}: differs from what was written: the disk is damaged")
            line = check_losses(exported, checkpoint, state.tensor, options.kind, device)
    return checkpoint, line


def _write(
    folder: Path,
    run_folder: Path,
    checkpoint: Checkpoint,
    tensor: Callable[[str], Tensor],
    shapes: Shapes,
    options: Options,
    licensed: dict[str, str],
) -> None:
    """Write weights, config.json, the files for transformers and the card, each flushed to the disk."""
    config, manifest = checkpoint.config, checkpoint.manifest
    model, data = config.to_json()["model"], replace(trained_on(checkpoint), splits={}, fingerprint=None)
    fingerprint = Fingerprint(model)
    counter = counting.WorkCounter("writing", len(shapes.of), "tensors")
    fetch = _count_calls(tensor, counter)
    write_weights(folder, shapes.of, fetch, DTYPES[options.dtype], options.shard_bytes, fingerprint, shapes.buffers)
    counter.close()
    content: dict[str, Any] = {
        "format": Exported.FORMAT,
        "model": model,
        **({"code": code} if (code := config.model.foreign_code()) else {}),
        "dtype": str(DTYPES[options.dtype]).removeprefix("torch."),
        "data": data.to_json(),
        **hub_fields(config.model),
        "fingerprint": fingerprint.hexdigest(),
        "origin": {
            "run": run_folder.resolve().name,  # without the path, which belongs to this machine
            "step": manifest.step,
            "weights": options.kind,
            "world_size": manifest.world_size,
            "zero_stage": manifest.zero_stage,
            "precision": manifest.precision,
            "versions": manifest.versions,
            "notes": config.notes,
            **({} if manifest.origin is None else {"from": manifest.origin}),
        },
    }
    write_json(folder / file_names.CONFIG, content)
    for name, text in hub_files(config.model, data.palette is not None).items():
        write_over(folder / name, text.encode())
    card = model_card(run_folder, checkpoint, data, options.kind, options.dtype, fingerprint.hexdigest(), licensed)
    write_over(folder / file_names.MODEL_CARD, card.encode())


def write_weights(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    tensor: Callable[[str], Tensor],
    dtype: torch.dtype,
    limit: int,
    fingerprint: Fingerprint,
    buffers: Set[str],
) -> None:
    """Write tensors into a folder, one in memory at a time, and add each to the fingerprint.

    The result is one safetensors file, or several up to a size, with an index.

    Args:
        folder: an existing folder.
        shapes: by name, in the model's order, so that neighbours share a file.
        tensor: returns the fp32 tensor of a name.
        dtype: to store.
        limit: bytes of tensors for each file; a larger tensor gets its own file.
        fingerprint: of the model, still without tensors.
        buffers: names of tensors that are stored in fp32, because parts compute with them.

    Raises:
        ConfigError: a value is too large for the dtype.
    """

    def convert(names: Iterable[str]) -> Iterator[Tensor]:
        for name in names:
            exact = tensor(name)
            converted = exact if name in buffers else exact.to(dtype)
            lost = exact.isfinite() & ~converted.isfinite() if dtype != torch.float32 else None
            if lost is not None and bool(lost.any()):
                value, most = float(exact[lost].flatten()[0]), torch.finfo(dtype).max
                rule = f"is beyond {str(dtype).removeprefix('torch.')}, whose maximum is {most:.5g}; use --dtype fp32"
                raise ConfigError(f"{name}={value:.6g}: {rule}")
            fingerprint.add(name, converted)
            yield converted

    sizes = {name: (4 if name in buffers else dtype.itemsize) * math.prod(shape) for name, shape in shapes.items()}
    parts: list[list[str]] = [[]]
    for name, size in sizes.items():
        if parts[-1] and sum(map(sizes.__getitem__, parts[-1])) + size > limit:
            parts.append([])
        parts[-1].append(name)
    file_of: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        file = file_names.WEIGHTS if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        # The format has no gaps between tensors, so those that leave the next one aligned come first.
        names.sort(key=lambda name: sizes[name] % ALIGNMENT != 0)
        dtypes = {name: dtype for name in names if name not in buffers}
        write_tensors(folder / file, {name: shapes[name] for name in names}, convert(names), dtypes)
        file_of |= dict.fromkeys(names, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(file_of.items()))}
        write_json(folder / file_names.WEIGHTS_INDEX, index)


def check_losses(
    exported: Exported, checkpoint: Checkpoint, masters: Callable[[str], Tensor], kind: str, device: torch.device
) -> str:
    """Compare the exported model's loss on the probe with the trainer's; return a line about both.

    The loss is computed in the trainer's precision if the exported dtype can hold its weights, else in the exported
    dtype. An average has another loss than the weights that the probe was taken with. For an average, the trained
    weights are therefore compared, which ``masters`` returns by name, and the average's loss is reported.

    Raises:
        ConfigError: they differ by more than rounding.
    """
    probe = checkpoint.probe
    if probe is None:
        return "probe: not checked, as the checkpoint has none"
    content = probe.read(exported.config)

    def loss(tensor: Callable[[str], Tensor], dtype: torch.dtype) -> tuple[float, ModelConfig]:
        """Return the mean nats of the context, and the configuration that computed them."""
        counter = counting.WorkCounter("checking one context", len(exported.names), "tensors")
        model = stream_model(exported.config, _count_calls(tensor, counter), dtype, device)
        count = model.config.objective.num_predicted(len(content))
        mean = float(probe.summed_nats(model, model.config, content, device) / count)
        counter.close()
        return mean, model.config

    stored = next(name for name, dtype in DTYPES.items() if dtype == exported.dtype)
    compared = probe.record.precision if kind == AVERAGE or stored in ("fp32", probe.record.precision) else stored
    nats, config = loss(masters if kind == AVERAGE else exported.tensor, DTYPES[compared])
    computed = compared, device.type, config.backend
    if mismatch := probe.mismatch(nats, *computed):
        whose = "trained weights'" if kind == AVERAGE else "exported model's"
        advice = "nothing is exported; --no-check skips this"
        raise ConfigError(f"{checkpoint.folder}: the {whose} {mismatch}; {advice}")
    trainers = f"the trainer's {probe.record.loss_nats:.6f}"
    if nats != probe.record.loss_nats:
        trainers += f" ({probe.difference(nats):.1e} apart; rounding explains {probe.tolerance(*computed):.0e})"
    if kind == AVERAGE:
        average, _ = loss(exported.tensor, exported.dtype)
        return f"{_PROBE}: {average:.6f} nats; of the trained weights {nats:.6f}, {trainers}"
    return f"{_PROBE}: {nats:.6f} nats, {trainers}"


def _count_calls(tensor: Callable[[str], Tensor], counter: counting.WorkCounter) -> Callable[[str], Tensor]:
    """Return the same function of a name, which counts each tensor."""

    def fetch(name: str) -> Tensor:
        counter.add(1)
        return tensor(name)

    return fetch
