"""`longstride plan CONFIG`: parameters, memory, operations and length of a run, before anything is started.

Torch and the data room are imported once the configuration is read: a mistake in it is reported at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from longstride.data_pipelines.errors import DataError
from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, TrainConfig, load_config
from longstride.launcher.output import say
from longstride.launcher.planning import pace

Kind = TypeVar("Kind")
USUAL_PROCESSES = 8  # that are planned for where none are named: one machine's
BYTE_VALUES = 256
DEVICES = {"cpu": "CPU", "cuda": "GPU"}  # that are planned for, in words
MOST_CONTEXTS = 10**12  # of a split: no data is larger
_GIB = 2**30
# Bytes of the train splits that `longstride data build --dataset` makes.
PUBLISHED_TRAIN_BYTES = {
    "cifar10": 48_000 * 3_072,
    "enwik8": 90_000_000,
    "text8": 90_000_000,
    "imagenet64": 1_281_167 * 12_288,
}


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return its exit code.

    Raises:
        ConfigError: the configuration or an option is wrong, or does not go with so many processes or that device.
        DataError: the data is here, and does not fit the run.
    """
    # argparse gives --processes all words after it: those that are no numbers are overrides.
    overrides = [*arguments.overrides, *(word for word in arguments.processes if "=" in word)]
    if arguments.contexts is not None and not 1 <= arguments.contexts <= MOST_CONTEXTS:
        raise ConfigError(f"--contexts={arguments.contexts}: must be from 1 to {MOST_CONTEXTS:,}; such as 10000")
    config = load_config(arguments.config, overrides, say)
    words = [word for word in arguments.processes if "=" not in word]
    for word in words:
        if not (
            word.isascii() and word.isdecimal() and len(word) <= 9 and 1 <= int(word) <= TrainConfig.MOST_PROCESSES
        ):
            rule = f"must be whole numbers from 1 to {TrainConfig.MOST_PROCESSES:,}; such as 8"
            raise ConfigError(f"--processes={word}: {rule}")
        config.check_world_size(int(word))
    units = config.train.global_batch // config.train.micro_batch
    shared = config.train.sequence_parallel or 1
    most = max(count for count in range(1, max(1, USUAL_PROCESSES // shared) + 1) if units % count == 0)
    processes = [int(word) for word in words] or [most * shared]
    rate = pace.given_rate(arguments)
    device = device_of(config, arguments.device, is_timed=arguments.measure)
    plan = make_plan(config, processes, arguments.contexts, device)
    if rate is not None:
        seconds = {count: rate.step_seconds(sum_of_flops(plan), count) for count in processes}
        plan["pace"] = pace.pace_json(rate.origin, plan["length"]["steps"], seconds)
    elif arguments.measure:
        from longstride.launcher.planning import measuring

        seconds = measuring.step_seconds(config, processes)
        plan["pace"] = pace.pace_json("by blocks timed on this machine", plan["length"]["steps"], seconds)
    print(json.dumps(plan) if arguments.json else describe(plan))
    return 0


def device_of(config: RunConfig, requested: str | None, *, is_timed: bool = False) -> str:
    """Return the kind of device that is planned for, cpu or cuda: a GPU, where nothing says otherwise.

    Raises:
        ConfigError: --device is not what the configuration computes on, or not what --measure times.
    """
    if config.model.backend == "cpu":
        if requested == "cuda":
            rule = "model.backend=cpu computes on a CPU alone; leave --device out, or give model.backend=auto"
            raise ConfigError(f"--device=cuda: {rule}")
        return "cpu"
    if is_timed:
        from longstride.launcher.planning import measuring

        local = measuring.local_device()
        if requested not in (None, local):
            rule = f"--measure times this machine, which computes on {local}; leave one of the two out"
            raise ConfigError(f"--device={requested}: {rule}")
        return local
    return requested or "cuda"


def make_plan(
    config: RunConfig, processes: list[int], contexts: int | None = None, device: str = "cuda"
) -> dict[str, Any]:
    """Plan everything for a kind of device (cpu or cuda), as JSON values; bytes and operations are whole.

    Raises:
        ConfigError: the warm-up is longer than the run, or a context too long to be rehearsed.
        DataError: the data is here, and does not fit the run.
    """
    from longstride.launcher.planning import costs, rehearsal

    model, train = config.model, config.train
    if model.context > rehearsal.MOST_POSITIONS:
        rule = f"takes hours to rehearse; a plan is made of at most {rehearsal.MOST_POSITIONS} positions"
        raise ConfigError.at("model.context", model.context, rule)
    length = run_length(config, contexts)
    parts, numel = costs.parameter_parts(model), costs.engine_parameters(model)
    work, dense = costs.work(model, train.micro_batch), costs.dense_pairs(model)
    pairs = [layer.pairs for layer in work.layers]
    step = costs.step_flops(work, config)
    with_dense = model.model_copy(update={"attention": {"type": "dense"}})
    as_dense = costs.step_flops(costs.work(with_dense, train.micro_batch), config)
    kept = {name: rehearsal.activations(config, on, device) for name, on in (("kept", False), ("recomputed", True))}
    return {
        "parameters": {"total": sum(parts.values()), **parts},
        "buffer_numbers": costs.buffer_numbers(model),
        "device": device,
        "precision": config.precision,
        "zero_stage": config.zero_stage,
        "activation_checkpointing": train.activation_checkpointing,
        "micro_batch": train.micro_batch,
        "activations": {name: asdict(activations) for name, activations in kept.items()},
        "memory": [
            {
                "processes": count,
                "stage": stage,
                **asdict(held := costs.states(numel, config, count, stage, device)),
                **{f"peak_{name}": held.peak(activations) for name, activations in kept.items()},
            }
            for count in processes
            for stage in costs.STAGES
        ],
        "tables": asdict(costs.table_step(config)),
        "sequence": None if train.sequence_parallel is None else _sequence(config, processes),
        "attention": {
            "density": [each / dense for each in pairs],
            "bounds": [layer.bound for layer in work.layers],  # where the data decide, and the pairs are at most these
            "pairs": sum(pairs),
            "dense_pairs": dense * model.layers,
            "at_most": config.data.apart,  # where documents end, pairs do
        },
        "step": {**step, "dense_flops": sum(as_dense.values())},
        "length": {
            **{name: value for name, value in asdict(length).items() if name != "is_full"},
            "unit": "byte" if model.vocabulary == BYTE_VALUES else "token",
            "at_most": not length.is_full,  # of bytes: padding and separators are none
            "tokens_per_step": train.global_batch * model.context,
            "tokens": length.steps and length.steps * train.global_batch * model.context,
            "flops": length.steps and length.steps * sum(step.values()),
        },
        "pace": None,  # how long it takes, where a rate is asked for: see ``pace.pace_json``
    }


def _sequence(config: RunConfig, processes: list[int]) -> dict[str, Any]:
    """Return what the processes that share a context have of it, and what attention sends between them."""
    from longstride.launcher.planning import costs

    train = config.train
    shared = train.sequence_parallel or 1
    return {
        "processes": shared,
        "positions": config.model.context // shared,
        "micro_batches": [train.global_batch * shared // (train.micro_batch * count) for count in processes],
        "layers": [each and asdict(each) for each in costs.exchanges(config)],
    }


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run is; None where it cannot be known here."""

    steps: int | None
    epochs: float | None
    contexts: int | None  # of the train split
    origin: str  # of the number of contexts, in words
    is_full: bool  # whether every position of every context is known to hold the data


def run_length(config: RunConfig, contexts: int | None) -> Length:
    """Return the steps and epochs of a run, one from the other where the size of its train split is known.

    Raises:
        ConfigError: the warm-up is longer than the run.
        DataError: the data is here, and does not fit the run.
    """
    train = config.train
    origin, is_full = "as given by --contexts", config.data.packed is True and config.data.separator is None
    if contexts is None:
        contexts, origin, is_full = _contexts_of(config, is_full)
    if contexts is None:
        return Length(train.steps, train.epochs, None, origin, is_full)
    if train.steps is not None:
        return Length(train.steps, train.steps * train.global_batch / contexts, contexts, origin, is_full)
    assert train.epochs is not None
    from longstride.launcher.data import steps_of

    return Length(steps_of(train, contexts), train.epochs, contexts, origin, is_full)


def _contexts_of(config: RunConfig, is_full: bool) -> tuple[int | None, str, bool]:
    """Count the contexts of the train split: of the data that is here, or by the published size of a set of that name.

    The last value is whether they are full; ``is_full`` is what the configuration alone says of that.
    """
    data, location = config.data, config.data.path
    if Path(location).exists():
        from longstride.launcher.data import RunData
        from longstride.launcher.ranks import Ranks

        run_data = RunData(config, Ranks())
        return run_data.stream().lanes.num_contexts, f"in {location}", run_data.fills_contexts
    name = location.rstrip("/").rpartition("/")[2]
    usual = (data.train_split, data.packing, data.separator, data.hop) == ("train", None, None, None)
    if name in PUBLISHED_TRAIN_BYTES and usual:
        contexts = PUBLISHED_TRAIN_BYTES[name] // config.model.context
        if contexts == 0:
            raise DataError(f"model.context={config.model.context}: longer than the train split of {name}")
        return contexts, f"as published; {location} is not here", True
    return None, f"{location} is not here; give --contexts N", is_full


def describe(plan: dict[str, Any]) -> str:
    """Write the plan as a person reads it."""
    hours = pace.describe(plan["pace"]) if plan["pace"] else []
    parts = (_parameters(plan), _memory(plan), _exchanges(plan), _work(plan), _length(plan), hours)
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def sum_of_flops(plan: dict[str, Any]) -> int:
    """Count the operations of a step over all processes, what is recomputed with them."""
    return sum(plan["step"][f"{name}_flops"] for name in ("forward", "backward", "recompute"))


def _parameters(plan: dict[str, Any]) -> list[str]:
    total = plan["parameters"]["total"]
    lines = [f"parameters  {total:,}, {4 * total / _GIB:.2f} GiB in fp32"]
    for name, count in plan["parameters"].items():
        if name != "total":
            lines.append(f"  {name:<14}{count:>14,}  {count / total:6.1%}")
    if numbers := plan["buffer_numbers"]:
        lines.append(
            f"  and in buffers, which are not trained: {numbers:,} numbers, {4 * numbers / _GIB:.2f} GiB in fp32"
        )
    return lines


def _memory(plan: dict[str, Any]) -> list[str]:
    kept, recomputed = plan["activations"]["kept"], plan["activations"]["recomputed"]
    device = DEVICES[plan["device"]]
    lines = [
        f"memory of a process on a {device}, GiB: {plan['precision']}, micro-batch {plan['micro_batch']}",
        f"  activations of all blocks kept {kept['kept'] / _GIB:.2f}, at most {kept['peak'] / _GIB:.2f}; "
        f"recomputed {recomputed['kept'] / _GIB:.2f}, at most {recomputed['peak'] / _GIB:.2f}"
        + (f", and {host / _GIB:.2f} on the host" if (host := recomputed["on_host"]) else ""),
        "  processes  ZeRO  weights  gradients  masters moments  average  buffers"
        f"{'  tables' if (tables := plan['tables'])['rows'] else ''} | peak: kept  recomputed",
    ]
    names = [
        "weights",
        "gradients",
        "masters",
        "moments",
        "average",
        "buffers",
        *(["tables"] if tables["rows"] else []),
    ]
    for row in plan["memory"]:
        columns = (row[name] / _GIB for name in names)
        cells = "".join(f"{value:>{width}.2f}" for value, width in zip(columns, (9, 11, 9, 8, 9, 9, 8), strict=False))
        peaks = [f"{row[name] / _GIB:.2f}" for name in ("peak_kept", "peak_recomputed")]
        if row["stage"] == plan["zero_stage"]:
            peaks[plan["activation_checkpointing"]] += "*"
        lines.append(f"  {row['processes']:>9}{row['stage']:>6}{cells} |{peaks[0]:>11}{peaks[1]:>12}")
    if tables["rows"]:
        lines.append(
            f"  n-gram tables: {tables['rows']:,} rows, of which a step touches at most {tables['touched_rows']:,}; "
            f"all processes send {tables['sent_bytes'] / 2**20:.1f} MiB to every other"
        )
    lines.append("  * as configured")
    return lines


def _exchanges(plan: dict[str, Any]) -> list[str]:
    sequence = plan["sequence"]
    if sequence is None or (shared := sequence["processes"]) == 1:
        return []
    lines = [f"a context over {shared} processes: {sequence['positions']:,} positions and 1/{shared} of the work each"]
    taken = plan["activations"]["recomputed" if plan["activation_checkpointing"] else "kept"]
    counts = dict.fromkeys(row["processes"] for row in plan["memory"])
    for count, micro_batches in zip(counts, sequence["micro_batches"], strict=True):
        calls, sent, received = (micro_batches * taken[name] for name in ("calls", "sent_bytes", "received_bytes"))
        lines.append(
            f"  a step of the last of {count} processes: {calls:,} exchanges; it sends {_decimal(sent)} and "
            f"receives {_decimal(received)}"
        )
    lines.append("  by layer, what a process sends in the mean in the forward pass of a micro-batch:")
    for each, shown in _layers_alike([each and tuple(each.items()) for each in sequence["layers"]]):
        if each is None:
            lines.append(f"    not counted by layer: {shown}")
            continue
        layer = dict(each)
        ways = ", ".join(f"by {way} {_decimal(layer[f'{way}_bytes'])}" for way in ("heads", "keys"))
        more = f"; keys and values copied {layer['copies']} times" if layer["copies"] > 1 else ""
        if layer["anew"]:
            more += f"; {_decimal(layer['anew_bytes'])} to divide its rows anew"
        lines.append(f"    {ways}: {layer['taken']}{more}; {shown}")
    return lines


def _decimal(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "impossible"
    return f"{num_bytes / 1e9:,.3f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.3f} MB"


def _layers_alike(layers: Sequence[Kind]) -> Iterator[tuple[Kind, str]]:
    """Yield each kind of layer once, in the order of the first of them, and which layers are so, in words."""
    users: dict[Kind, list[int]] = {}
    for layer, kind in enumerate(layers):
        users.setdefault(kind, []).append(layer)
    for kind, those in users.items():
        more = f", … ({len(those)} layers)" if len(those) > 6 else ""
        yield kind, f"layer{'s' if len(those) > 1 else ''} {', '.join(map(str, those[:6]))}{more}"


def _work(plan: dict[str, Any]) -> list[str]:
    step, attention = plan["step"], plan["attention"]
    total = sum_of_flops(plan)
    share = attention["pairs"] / attention["dense_pairs"]
    dense = step["dense_flops"]
    lines = [f"a step  {_flops(total)}; with dense attention {_flops(dense)}, {dense / total:.1f} times as many"]
    for name in ("forward", "backward", "recompute"):
        lines.append(f"  {name:<11}{_flops(step[f'{name}_flops']):>14}")
    most = "at most " if any(attention["bounds"]) or attention["at_most"] else ""
    lines.append(f"  attention to {most}{share:.2%} of the pairs of dense causal attention; by layer:")
    for (density, bound), shown in _layers_alike([*zip(attention["density"], attention["bounds"], strict=True)]):
        lines.append(f"    {density:7.2%}  {shown}{f': {bound}' if bound else ''}")
    return lines


def _length(plan: dict[str, Any]) -> list[str]:
    length = plan["length"]
    steps, epochs = length["steps"], length["epochs"]
    most = "up to " if length["at_most"] else ""
    facts = [
        f"{most}{length['tokens_per_step']:,} {length['unit']}s a step",
        "steps unknown" if steps is None else f"{steps:,} steps",
        "epochs unknown" if epochs is None else f"{epochs:,.6g} epochs",
    ]
    contexts = "" if length["contexts"] is None else f"{length['contexts']:,} contexts in the train split, "
    lines = [f"the run  {', '.join(facts)}", f"  {contexts}{length['origin']}"]
    if steps is not None:
        lines.append(f"  {most}{length['tokens']:,} {length['unit']}s and {_flops(length['flops'])} in all")
    if words := pace.words_on_length(epochs):
        lines.append(f"  {words}")
    return lines


def _flops(count: int) -> str:
    """Write a number of operations with a prefix."""
    for prefix, size in (("E", 10**18), ("P", 10**15), ("T", 10**12), ("G", 10**9)):
        if count >= size:
            return f"{count / size:,.2f} {prefix}FLOP"
    return f"{count:,} FLOP"
