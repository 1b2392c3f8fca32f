"""`longstride export RUN --output DIR`: a sharded checkpoint as safetensors, config.json and a model card.

The weights are the trainer's fp32 master weights from any ZeRO stage and any number of processes, bit for bit or
rounded once. They go from the checkpoint's mapped files into the export's, one tensor at a time. Then the exported
model's loss on the checkpoint's probe is compared with the trainer's, with one residual block in memory at a time.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from longstride.data_pipelines.durable import whole_folder
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import (
    Checkpoint,
    SavedState,
    check_space,
    open_checkpoint,
    write_json,
    write_text,
)
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
    streamed_model,
    usable_device,
    write_tensors,
)
from longstride.launcher.output import counting, file_names, say
from longstride.launcher.verbs import DEFAULT_SHARD_SIZE
from longstride.sparse_model import ModelConfig

_PROBE = "probe (a check on random bytes, not the model's score)"  # whose loss is high: none can be learned
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B?)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB, 500MB or 2GiB; a number alone is bytes.

    Raises:
        ConfigError: it is no size, or 0.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    unit = match[2].removesuffix("B") + "B" if match and match[2] not in ("", "B") else ""
    size = int(float(match[1]) * _UNITS[unit]) if match and unit in _UNITS else 0
    if size < 1:
        raise ConfigError(f"--shard-size={text}: must be a size above 0 such as 5GB, 500MB or 2GiB")
    return size


@dataclass(frozen=True, slots=True)
class Options:
    """How a checkpoint is exported."""

    kind: str = TRAINED  # or AVERAGE
    dtype: str = "fp32"  # one of DTYPES
    shard_bytes: int = parse_size(DEFAULT_SHARD_SIZE)
    check: bool = True
    device: str = "cpu"  # of the check
    trusted: bool = False
    license: str | None = None  # for the card, as ``license_fields`` takes it


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns its exit code."""
    options = Options(
        kind=arguments.weights,
        dtype=arguments.dtype,
        shard_bytes=parse_size(arguments.shard_size),
        check=not arguments.no_check,
        device=arguments.device,
        trusted=arguments.trust_checkpoint,
        license=arguments.license,
    )
    if arguments.format is not None:
        if replace(options, check=True, trusted=False) != Options() or arguments.step is not None or arguments.refresh:
            rule = "takes the folder of an export, --output, --no-check and --trust-code, and no other option"
            raise ConfigError(f"--format={arguments.format}: {rule}")
        if arguments.output is None:
            raise ConfigError("--output: must name the folder to make")
        trust = options.trusted
        made = export_program(arguments.run, arguments.output, arguments.format, options.check, trust_code=trust)
        print(made, file=sys.stderr)
        return 0
    if arguments.refresh:
        if replace(options, trusted=False) != Options() or arguments.step is not None or arguments.output is not None:
            raise ConfigError("--refresh: takes the folder of an export and --trust-code, and no other option")
        print(refresh_stub(arguments.run, trust_code=options.trusted), file=sys.stderr)
        return 0
    if arguments.output is None:
        raise ConfigError("--output: must name the folder to make")

    def report_passed_over(checkpoint: Checkpoint) -> None:
        if arguments.step is None:
            for refusal in checkpoint.newer_refusals():
                say(f"passed over: {refusal}")

    checkpoint, checked = export(arguments.run, arguments.step, arguments.output, options, chosen=report_passed_over)
    print(checked, file=sys.stderr)
    what = f"step {checkpoint.manifest.step} of {arguments.run}"
    average = ", the moving average of its weights" if arguments.weights == AVERAGE else ""
    print(f"{arguments.output}: {what}{average}, {arguments.dtype}", file=sys.stderr)
    return 0


def export(
    run_folder: Path,
    step: int | Literal["best"] | None,
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
    check_free(output)
    licensed = {} if options.license is None else license_fields(options.license)
    device = usable_device(options.device)
    checkpoint = open_checkpoint(run_folder, step, trusted=options.trusted)
    chosen(checkpoint)
    checkpoint.verify()
    state = SavedState(checkpoint, remapped=True)
    kind, shapes = state.kind_of(options.kind), state.model
    needed = DTYPES[options.dtype].itemsize * shapes.parameters
    check_space(output, needed, f"--output={output}", "the weights take")
    with whole_folder(output) as folder:
        _write(folder, run_folder, checkpoint, partial(state.tensor, kind=kind), shapes, options, licensed)
        checked = "probe: not checked, as --no-check asks"
        if options.check:
            exported = Exported(folder, trust_code=True)  # the run imports it already
            if exported.fingerprint() != exported.content["fingerprint"]:
                raise ConfigError(f"{folder}: reads otherwise than it was written: the disk is damaged")
            checked = check_losses(exported, checkpoint, state.tensor, options.kind, device)
    return checkpoint, checked


def _write(
    folder: Path,
    run_folder: Path,
    checkpoint: Checkpoint,
    tensor: Callable[[str], Tensor],
    shapes: Shapes,
    options: Options,
    licensed: dict[str, str],
) -> None:
    """Weights, config.json, the files for transformers and the card, each on the disk once it is written."""
    config, manifest = checkpoint.config, checkpoint.manifest
    model, data = config.to_json()["model"], replace(trained_on(checkpoint), splits={}, fingerprint=None)
    fingerprint = Fingerprint(model)
    counter = counting.WorkCounter("writing", len(shapes.of), "tensors")
    given = _counted(tensor, counter)
    write_weights(folder, shapes.of, given, DTYPES[options.dtype], options.shard_bytes, fingerprint, shapes.buffers)
    counter.close()
    content: dict[str, Any] = {
        "format": Exported.FORMAT,
        "model": model,
        **({"code": code} if (code := config.model.foreign_code()) else {}),
        "dtype": str(DTYPES[options.dtype]).removeprefix("torch."),
        "data": data.to_json(),
        **hub_fields(),
        "fingerprint": fingerprint.hexdigest(),
        "origin": {
            "run": run_folder.resolve().name,  # no more of a machine belongs into an export
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
        write_text(folder / name, text)
    card = model_card(run_folder, checkpoint, data, options.kind, options.dtype, fingerprint.hexdigest(), licensed)
    write_text(folder / file_names.MODEL_CARD, card)


def write_weights(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    tensor: Callable[[str], Tensor],
    dtype: torch.dtype,
    limit: int,
    fingerprint: Fingerprint,
    buffers: Set[str],
) -> None:
    """Writes the tensors of these names into a folder, one in memory at a time, and adds each to the fingerprint.

    They make one safetensors file, or several below a size with an index.

    Args:
        folder: that exists.
        shapes: by name, in the model's order: neighbours come to lie in one file.
        tensor: the fp32 tensor of a name.
        dtype: what they are stored in.
        limit: bytes of tensors a file; one tensor that is larger has a file of its own.
        fingerprint: of the model, still without tensors.
        buffers: names of tensors that are stored in fp32, as parts compute with them.

    Raises:
        ConfigError: a value is too large for the type.
    """

    def stored(names: Iterable[str]) -> Iterator[Tensor]:
        for name in names:
            exact = tensor(name)
            converted = exact if name in buffers else exact.to(dtype)
            lost = exact.isfinite() & ~converted.isfinite() if dtype != torch.float32 else None
            if lost is not None and bool(lost.any()):
                value, most = float(exact[lost].flatten()[0]), torch.finfo(dtype).max
                rule = f"is beyond {str(dtype).removeprefix('torch.')}, which ends at {most:.5g}; take --dtype fp32"
                raise ConfigError(f"{name}={value:.6g}: {rule}")
            fingerprint.add(name, converted)
            yield converted

    sizes = {name: (4 if name in buffers else dtype.itemsize) * math.prod(shape) for name, shape in shapes.items()}
    parts: list[list[str]] = [[]]
    for name, size in sizes.items():
        if parts[-1] and sum(sizes[each] for each in parts[-1]) + size > limit:
            parts.append([])
        parts[-1].append(name)
    file_of: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        file = file_names.WEIGHTS if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        # Tensors that leave the next one aligned come first: the format has no gaps between tensors.
        names.sort(key=lambda name: sizes[name] % ALIGNMENT != 0)
        write_tensors(folder / file, {name: shapes[name] for name in names}, stored(names), dtype, buffers=buffers)
        file_of |= dict.fromkeys(names, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(file_of.items()))}
        write_json(folder / file_names.WEIGHTS_INDEX, index)


def check_losses(
    exported: Exported, checkpoint: Checkpoint, masters: Callable[[str], Tensor], kind: str, device: torch.device
) -> str:
    """Compares the exported model's loss on the probe with the trainer's; returns a line about both.

    It is computed in the trainer's precision where the exported type holds that precision's weights, and else in the
    exported type. The moving average has another loss than the weights that the probe was taken of. So for an average
    the loss of the trained weights, which ``masters`` has by name, is compared, and that of the average is reported.

    Raises:
        ConfigError: they differ by more than rounding.
    """
    probe = checkpoint.probe
    if probe is None:
        return "probe: not checked, as the checkpoint has none"
    content = probe.read(exported.config)

    def loss(tensor: Callable[[str], Tensor], dtype: torch.dtype) -> tuple[float, ModelConfig]:
        """The mean nats of the context, and the configuration that computed them."""
        counter = counting.WorkCounter("checking one context", len(exported.names), "tensors")
        model = streamed_model(exported.config, _counted(tensor, counter), dtype, device)
        with torch.no_grad():
            mean = float(model(content[None].to(device), return_nats=True).double().mean())
        counter.close()
        return mean, model.config

    stored = next(name for name, dtype in DTYPES.items() if dtype == exported.dtype)
    compared = probe.precision if kind == AVERAGE or stored in ("fp32", probe.precision) else stored
    nats, config = loss(masters if kind == AVERAGE else exported.tensor, DTYPES[compared])
    difference = probe.difference(nats)
    tolerance = probe.tolerance(compared, device.type, config.backend)
    if not difference <= tolerance:  # a nan is wrong
        whose = "trained weights'" if kind == AVERAGE else "exported model's"
        raise ConfigError(
            f"{checkpoint.folder}: the {whose} loss on {probe.path.name} is {nats:.9g} nats, and the trainer's was "
            f"{probe.loss_nats:.9g}, {difference:.1e} apart where {tolerance:.0e} is rounding: nothing is exported; "
            f"--no-check leaves this out"
        )
    trainers = f"the trainer's {probe.loss_nats:.6f}"
    if nats != probe.loss_nats:
        trainers += f" ({difference:.1e} apart, where {tolerance:.0e} is rounding)"
    if kind == AVERAGE:
        average, _ = loss(exported.tensor, exported.dtype)
        return f"{_PROBE}: {average:.6f} nats; of the trained weights {nats:.6f}, {trainers}"
    return f"{_PROBE}: {nats:.6f} nats, {trainers}"


def _counted(tensor: Callable[[str], Tensor], counter: counting.WorkCounter) -> Callable[[str], Tensor]:
    """The same function of a name, each of whose tensors is counted."""

    def fetch(name: str) -> Tensor:
        counter.add(1)
        return tensor(name)

    return fetch
