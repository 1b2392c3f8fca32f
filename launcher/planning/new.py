"""`longstride new NAME`: a first configuration that fits a data folder and a machine.

The recipe of docs/recipes.md, or the preset of `--like`, is fitted to the data (`recipes`). Then the plan finds the
largest micro-batch that fits the memory of a process, with activation checkpointing if necessary.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from longstride.data_pipelines.modalities import MODALITIES, modality_named
from longstride.kernels import ConfigError, nearest
from longstride.launcher.config import EXPERIMENTS, RunConfig, TrainConfig, load_config, load_content
from longstride.launcher.files import check_new, write_new
from longstride.launcher.output import counting
from longstride.launcher.verbs import SIZES
from longstride.sparse_model import ModelConfig

SCHEMA_FILE = "longstride.schema.json"  # in the folder of the configurations that name it
MOST_MICRO_BATCH = {"cpu": 4, "cuda": 64}
MOST_POSITIONS = 1 << 15  # of a micro-batch: more make products no faster
FREE_SHARE = {"cpu": 0.7, "cuda": 0.9}  # of the memory for a plan: Python and allocators need some
MOST_CPU_PROCESSES = 8
MOST_MEMORY_GIB = 1_000_000  # of a card
_GIB = 2**30
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{,99}")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that a run has to fit."""

    kind: str  # cpu or cuda
    processes: int
    process_bytes: int  # memory of a process for a plan
    precision: str
    words: str  # description


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return its exit code."""
    from longstride.launcher.data import check_data
    from longstride.launcher.planning import recipes

    output, location = _check_options(arguments)
    data = recipes.Data.read(location)
    if arguments.modality not in (None, data.modality):
        rule = f"{location} holds {data.modality}; leave --modality out, or name another folder with --data"
        raise ConfigError(f"--modality={arguments.modality}: {rule}")
    machine = _machine(arguments)
    preset = None if arguments.like is None else load_content(arguments.like)
    size = recipes.SIZES[arguments.size] if preset is None else recipes.SHRUNK
    if preset is None:
        model = recipes.model_of(size, data)
    else:
        model = recipes.model_like(arguments.like, preset["model"], size, data)
    context = int(model["context"])
    # A power of two contexts for each process: about ``step_bytes`` bytes, or fewer, to read small data in more steps.
    contexts = max(1, size.step_bytes // (context * machine.processes))
    global_batch = machine.processes * (1 << (contexts.bit_length() - 1))
    least_bytes = recipes.most_bytes(data, model) // size.steps
    while global_batch > machine.processes and global_batch // 2 * context >= least_bytes:
        global_batch //= 2
    train = recipes.train_of(size, data, model, global_batch)
    order: dict[str, Any] = {"shuffle_bytes": max(1 << 20, min(1 << 25, data.train_bytes // 64))}
    if ModelConfig.model_validate(model).carries:
        order = {"shuffle_bytes": 0, "shuffle_shards": False}
    content: dict[str, Any] = {
        "notes": "",
        "model": model,
        "data": {"path": location, **order},
        "train": {
            "output": f"runs/{arguments.name}",
            **(train if preset is None else recipes.train_like(preset["train"], train)),
            "global_batch": global_batch,
        },
        "deepspeed": f"zero1_{machine.precision}",
    }
    peak = _fit(content, machine, arguments.size)
    check_data(_resolve(content))
    notes = _notes(content, data, machine, arguments.like, arguments.size, peak)
    content["notes"] = " ".join(notes)
    _write(output, content)
    print("\n".join([f"wrote {output}", *(f"  {line}" for line in notes), "next:"]))
    processes = f" --processes {machine.processes}"
    timed = " --measure    # memory, operations, hours" if arguments.memory is None else "    # memory, operations"
    print(f"  longstride plan {output}{processes} --device {machine.kind}{timed}")
    print(f"  longstride train --config {output}{processes if machine.kind == 'cpu' else ''}")  # else on all GPUs
    return 0


def _check_options(arguments: argparse.Namespace) -> tuple[Path, str]:
    """Check the options; return the file to write and the location of the data."""
    if not _NAME.fullmatch(arguments.name):
        rule = "must be at most 100 letters, digits, dots, dashes and underscores, the first a letter or a digit"
        rule += "; such as mine. --output names a file elsewhere"
        raise ConfigError(f"NAME={arguments.name}: {rule}")
    if arguments.size not in SIZES:
        raise ConfigError(f"--size={arguments.size}: must be one of {', '.join(SIZES)}; such as tiny")
    if arguments.modality is not None and arguments.modality not in MODALITIES:
        raise ConfigError(f"--modality={arguments.modality}: must be one of {', '.join(MODALITIES)}; such as text")
    if arguments.like is not None:
        presets = sorted(file.stem for file in EXPERIMENTS.glob("*.json"))
        if arguments.like not in presets:
            raise ConfigError(f"--like={arguments.like}: no preset of that name; {nearest(arguments.like, presets)}")
        if arguments.size != SIZES[0]:
            rule = (
                f'--like shrinks a preset to {SIZES[0]}; leave --size out, or write {{"extends": "{arguments.like}"}}'
            )
            raise ConfigError(f"--size={arguments.size}: {rule} in a file for the preset in its own size")
    output = arguments.output or Path(f"{arguments.name.removesuffix('.json')}.json")
    if output.suffix == ".json" and os.path.lexists(output):
        raise ConfigError(f"{output}: already exists; give another NAME, or another file with --output")
    check_new(output, "--output", ".json")
    usual_data = load_content(arguments.like)["data"]["path"] if arguments.like else f"data/{arguments.name}"
    location = usual_data if arguments.data is None else arguments.data
    if not location:
        raise ConfigError("--data=: must name a folder, such as data/mine; or leave it out")
    if "://" not in location and not Path(location).is_dir():
        kind = f" --modality {arguments.modality}" if arguments.modality not in (None, "text") else ""
        if Path(location).is_file():
            rule = (
                f"build one from it with `longstride data build {location}{kind} --output DIR`, and pass it as --data"
            )
            raise ConfigError(f"--data={location}: is a file, not a data folder; {rule}")
        rule = f"build it with `longstride data build FILES{kind} --output {location}`, or name another with --data"
        raise ConfigError(f"{location}: no such folder; {rule}")
    return output, location


def _machine(arguments: argparse.Namespace) -> Machine:
    """Return this machine, or the one that the options describe."""
    import torch

    from longstride.kernels import has_bf16_products

    processes = arguments.processes
    if processes is not None:
        processes = _number("--processes", processes, TrainConfig.MOST_PROCESSES, "8", is_integer=True)
    if arguments.memory is not None:
        memory = _number("--memory", arguments.memory, MOST_MEMORY_GIB, "80")
        count = int(processes or 1)
        words = f"{count} GPU{'s' if count > 1 else ''} of {memory:g} GiB, as given by --memory"
        return Machine("cuda", count, int(FREE_SHARE["cuda"] * memory * _GIB), "bf16", words)
    if torch.cuda.is_available():
        count = int(processes or torch.cuda.device_count())
        card = torch.cuda.get_device_properties(0)
        precision = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        words = f"{count} x {card.name} of {card.total_memory / _GIB:.0f} GiB"
        return Machine("cuda", count, int(FREE_SHARE["cuda"] * card.total_memory), precision, words)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = int(processes or 1 << (min(cores, MOST_CPU_PROCESSES).bit_length() - 1))
    free = free_bytes()
    precision = "bf16" if has_bf16_products() else "fp32"
    words = f"{cores} core{'s' if cores > 1 else ''}, {free / _GIB:.0f} GiB of memory free, no GPU"
    return Machine("cpu", count, int(FREE_SHARE["cpu"] * free / count), precision, words)


def _number(option: str, text: str, most: int, suggestion: str, *, is_integer: bool = False) -> float:
    """Parse a number from 1 to ``most``; raise ConfigError for anything else."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= most or (is_integer and number != int(number)):
        what = "an integer" if is_integer else "a number"
        raise ConfigError(f"{option}={text}: must be {what} from 1 to {most:,}; such as {suggestion}")
    return number


def free_bytes() -> int:
    """Return the free bytes of this machine's memory, or of this process's control group if these are fewer."""
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (most := limit.read_text().strip()).isdecimal():
        free = min(free, max(0, int(most) - int(used.read_text())))
    return free


def _resolve(content: dict[str, Any]) -> RunConfig:
    """Validate the configuration like `longstride train`, with the section that `deepspeed` names."""
    section = load_config("demo", [f"deepspeed={content['deepspeed']}"]).deepspeed
    return RunConfig.model_validate(content | {"deepspeed": section})


def _fit(content: dict[str, Any], machine: Machine, size: str) -> int:
    """Set the largest micro-batch that fits, with activation checkpointing if necessary; return the peak in bytes.

    Raises:
        ConfigError: not even one context fits.
    """
    from longstride.launcher.planning.costs import engine_parameters, states
    from longstride.launcher.planning.rehearsal import Activations, activations

    train = content["train"]
    peak = 0
    for recomputed in (False, True):
        most = max(1, min(MOST_MICRO_BATCH[machine.kind], MOST_POSITIONS // content["model"]["context"]))
        micro_batch = min(train["global_batch"] // machine.processes, 1 << (most.bit_length() - 1))
        while micro_batch:
            train |= {"micro_batch": micro_batch, "activation_checkpointing": recomputed}
            config = _resolve(content)
            numel = engine_parameters(config.model)
            fixed = states(numel, config, machine.processes, config.zero_stage, machine.kind)
            peak = fixed.peak(Activations(0, 0))
            if peak > machine.process_bytes:  # with any micro-batch
                break
            peak = fixed.peak(activations(config, recomputed, machine.kind))
            if peak <= machine.process_bytes:
                return peak
            micro_batch //= 2
    smaller = "--size tiny, " if size != SIZES[0] else ""
    rule = f"takes {peak / _GIB:.1f} GiB per process at least, but {machine.process_bytes / _GIB:.1f} are free here"
    raise ConfigError(
        f"--size={size}: {rule} ({machine.words}); give {smaller}fewer --processes, or the --memory of GPUs"
    )


def _notes(content: dict[str, Any], data: Any, machine: Machine, preset: str | None, size: str, peak: int) -> list[str]:
    """Explain the choices, one sentence per line."""
    from longstride.launcher.planning.costs import engine_parameters, parameter_parts

    model, train = content["model"], content["train"]
    config = _resolve(content).model
    numel = engine_parameters(config)
    num_table_parameters = sum(parameter_parts(config).values()) - numel
    unit = "pixels" if data.colours is not None else "bytes"
    num_positions = train["steps"] * train["global_batch"] * model["context"]
    epochs = num_positions / data.train_bytes
    batch = train["micro_batch"]
    what = {"image": "a picture is one context", "audio": "no longer than sounds are in the mean"}
    most = "" if modality_named(data.modality).packing or data.picture is not None else "up to "  # others are padded
    source, lengths = "the recipe of docs/recipes.md,", "the size has"
    if preset is not None:
        source, lengths = f"the preset {preset}, shrunk to", "size and preset have"
    why = what.get(data.modality, f"as long as {lengths} it, or a sixteenth of the data")
    saved, unless = "saved", ", and never evaluated, as the data has no split 'validation'"
    if data.is_evaluated:
        saved, unless = "evaluated and saved", ""
    recomputed = ", recomputed in the backward pass" if train["activation_checkpointing"] else ""
    tables = f" and n-gram tables of {num_table_parameters:,}" if num_table_parameters else ""
    return [
        f"Data: {data.location}, {data.modality}, {data.train_bytes:,} {unit} to train on.",
        f"Model: {source} size {size}: {numel:,} parameters{tables}.",
        f"Context: {model['context']:,} {unit}, {why}.",
        f"Length: {train['steps']:,} steps of {most}{train['global_batch'] * model['context']:,} {unit}, "
        f"{most}{epochs:.3g} times the data; {saved} every {train['checkpoint_every']:,}{unless}.",
        f"Machine: {machine.words}; {counting.processes(machine.processes)} in {machine.precision}.",
        f"Micro-batch: {batch} context{'s' if batch > 1 else ''}{recomputed}, planned at {peak / _GIB:.2f} GiB a "
        f"process, of {machine.process_bytes / _GIB:.2f}.",
    ]


def _write(output: Path, content: dict[str, Any]) -> None:
    """Write the configuration with a line for each key of a section, and the schema that it names if it is missing."""
    lines = []
    for name, section in {"$schema": f"./{SCHEMA_FILE}", **content}.items():
        text = json.dumps(section)
        if isinstance(section, dict):
            keys = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in section.items())
            text = f"{{\n{keys}\n  }}"
        lines.append(f"  {json.dumps(name)}: {text}")
    write_new(output, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    schema = output.parent / SCHEMA_FILE
    if not os.path.lexists(schema):
        write_new(schema, f"{json.dumps(RunConfig.model_json_schema(), indent=1)}\n".encode())
