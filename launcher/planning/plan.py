"""`longstride plan CONFIG`: parameters, memory, operations and length of a run, before anything is started.

Torch and the data room are imported after the configuration is read, so that a mistake in it is reported at once.
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
from longstride.launcher.output import counting, say
from longstride.launcher.planning import pace

Kind = TypeVar("Kind")
USUAL_PROCESSES = 8  # one machine, if no number of processes is named
BYTE_VALUES = 256
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
MOST_CONTEXTS = 10**12  # no split has more
_GIB = 2**30
# Bytes of the train splits that `longstride data build --dataset` creates.
PUBLISHED_TRAIN_BYTES = {
    "cifar10": 48_000 * 3_072,
    "enwik8": 90_000_000,
    "text8": 90_000_000,
    "imagenet64": 1_281_167 * 12_288,
}


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return its exit code."""
    # argparse gives --processes all words after it; those with a "=" are overrides.
    overrides = [*arguments.overrides, *(word for word in arguments.processes if "=" in word)]
    if arguments.contexts is not None and not 1 <= arguments.contexts <= MOST_CONTEXTS:
        raise ConfigError(f"--contexts={arguments.contexts}: must be from 1 to {MOST_CONTEXTS:,}; such as 10000")
    config = load_config(arguments.config, overrides, say)
    words = [word for word in arguments.processes if "=" not in word]
    for word in words:
        if not (
            word.isascii() and word.isdecimal() and len(word) <= 9 and 1 <= int(word) <= TrainConfig.MOST_PROCESSES
        ):
            rule = f"must be integers from 1 to {TrainConfig.MOST_PROCESSES:,}; such as 8"
            raise ConfigError(f"--processes={word}: {rule}")
        config.check_world_size(int(word))
    units = config.train.global_batch // config.train.micro_batch
    shared = config.train.sequence_parallel or 1
    most = max(count for count in range(1, max(1, USUAL_PROCESSES // shared) + 1) if units % count == 0)
    processes = [int(word) for word in words] or [most * shared]
    rate = pace.requested_rate(arguments)
    device = device_of(config, arguments.device, is_timed=arguments.measure)
    plan = make_plan(config, processes, arguments.contexts, device)
    stages = plan["stages"]
    if rate is not None:
        for stage in stages:
            stage["seconds"] = {count: stage["flops"] / (rate.flops_per_second * count) for count in processes}
    elif arguments.measure:
        from longstride.launcher.planning import measuring

        for stage, part in zip(stages, config.stages(), strict=True):
            stage["seconds"] = measuring.step_seconds(part.config, processes)
    if "seconds" in stages[0]:
        origin = rate.origin if rate is not None else "by blocks timed on this machine"
        plan["pace"] = pace.pace_json(origin, plan["length"]["steps"], mean_seconds(stages))
    print(json.dumps(plan) if arguments.json else describe(plan))
    return 0


def device_of(config: RunConfig, requested: str | None, *, is_timed: bool = False) -> str:
    """Return the kind of device to plan for, cpu or cuda; by default a GPU.

    Raises:
        ConfigError: --device contradicts the configuration, or the machine that --measure times.
    """
    if config.model.backend == "cpu":
        if requested == "cuda":
            rule = "model.backend=cpu computes only on a CPU; leave --device out, or give model.backend=auto"
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


def plan_run(config: RunConfig, processes: int, device: str | None, contexts: int | None = None) -> dict[str, Any]:
    """Return the plan of a run for a number of processes; see ``make_plan``. ``device``: its kind, None: see above."""
    config.check_world_size(processes)
    return make_plan(config, [processes], contexts, device_of(config, device))


def peak_bytes(plan: dict[str, Any]) -> int:
    """Return the peak memory of a process as configured, in a plan for one number of processes."""
    row = next(row for row in plan["memory"] if row["stage"] == plan["zero_stage"])
    peak: int = row["peak_recomputed" if plan["activation_checkpointing"] else "peak_kept"]
    return peak


def make_plan(
    config: RunConfig, processes: list[int], contexts: int | None = None, device: str = "cuda"
) -> dict[str, Any]:
    """Return the plan for a kind of device (cpu or cuda) as JSON values; bytes and operations are integers.

    Raises:
        ConfigError: the warm-up is longer than the run, or the context is too long to be rehearsed.
        DataError: the data is on this machine, and does not fit the run.
    """
    from longstride.launcher.planning import costs, rehearsal

    model, train = config.model, config.train
    if model.context > rehearsal.MOST_POSITIONS:
        rule = f"would take hours to plan; at most {rehearsal.MOST_POSITIONS} positions are allowed"
        raise ConfigError.at("model.context", model.context, rule)
    length = run_length(config, contexts)
    stages = stage_plans(config, length.steps, device)
    parts, numel = costs.parameter_parts(model), costs.engine_parameters(model)
    work, dense = costs.work(model, train.micro_batch), costs.dense_pairs(model)
    pairs = [layer.pairs for layer in work.layers]
    step = costs.step_flops(work, config)
    with_dense = model.model_copy(update={"attention": model.objective.dense})
    as_dense = costs.step_flops(costs.work(with_dense, train.micro_batch), config)
    activations = {
        name: max((stage["activations"][name] for stage in stages), key=lambda needed: needed.peak)
        for name in ("kept", "recomputed")
    }
    memory = []
    for count in processes:
        for stage in costs.STAGES:
            states = costs.states(numel, config, count, stage, device)
            peaks = {f"peak_{name}": states.peak(needed) for name, needed in activations.items()}
            memory.append({"processes": count, "stage": stage, **asdict(states), **peaks})
    experts = costs.expert_step(config)
    sequence = None
    if (shared := train.sequence_parallel) is not None:
        sequence = {
            "processes": shared,
            "positions": model.context // shared,
            "micro_batches": [train.global_batch * shared // (train.micro_batch * count) for count in processes],
            "layers": [exchange and asdict(exchange) for exchange in costs.exchanges(config)],
        }
    return {
        "parameters": {"total": sum(parts.values()), **parts},
        "buffer_numbers": costs.buffer_numbers(model),
        "device": device,
        "precision": config.precision,
        "zero_stage": config.zero_stage,
        "activation_checkpointing": train.activation_checkpointing,
        "micro_batch": train.micro_batch,
        "activations": {name: asdict(needed) for name, needed in activations.items()},
        "memory": memory,
        "tables": asdict(costs.table_step(config)),
        "experts": asdict(experts) if experts.numel else None,
        "carried_bytes": costs.carried_bytes(config),
        "sequence": sequence,
        "attention": {
            "density": [count / dense for count in pairs],
            "bounds": [layer.bound for layer in work.layers],  # if the data decides, the pairs are an upper bound
            "pairs": sum(pairs),
            "dense_pairs": dense * model.layers,
            "at_most": config.data.apart,  # documents have fewer pairs than a full context
        },
        "step": {**step, "dense_flops": sum(as_dense.values())},
        "length": {
            **{name: value for name, value in asdict(length).items() if name != "is_full"},
            "unit": "byte" if model.vocabulary == BYTE_VALUES else "token",
            "at_most": not length.is_full,  # padding and separators are not bytes of the data
            "tokens_per_step": train.global_batch * model.context,
            "tokens": length.steps and config.batches_in(length.steps) * train.global_batch * model.context,
            "flops": length.steps and sum(stage["steps"] * stage["flops"] for stage in stages),
        },
        "stages": [
            {**stage, "activations": {name: asdict(needed) for name, needed in stage["activations"].items()}}
            for stage in stages
        ],
        "pace": None,  # the duration, if a rate is requested: see ``pace.pace_json``
    }


def stage_plans(config: RunConfig, steps: int | None, device: str) -> list[dict[str, Any]]:
    """Return the length, operations and activations of each stage; ``steps`` of the run, if known."""
    from longstride.launcher.planning import costs, rehearsal

    stages, plans = config.stages(), []
    ends = [*(stage.first for stage in stages[1:]), steps]
    for stage, end in zip(stages, ends, strict=True):
        part = stage.config
        work = costs.work(part.model, part.train.micro_batch)
        flops = costs.step_flops(work, part)
        plans.append(
            {
                "context": stage.context,
                "steps": end and end - stage.first,
                "global_batch": part.train.global_batch,
                "density": work.blocks.pairs / (costs.dense_pairs(part.model) * part.model.layers),
                "flops": sum(flops.values()) if stage.trained is None else flops["forward_flops"],
                "activations": {
                    name: rehearsal.activations(part, is_recomputed, device)
                    for name, is_recomputed in (("kept", False), ("recomputed", True))
                },
            }
        )
    return plans


def mean_seconds(stages: list[dict[str, Any]]) -> dict[int, float]:
    """Return the mean seconds of a step by the number of processes; of the last stage if its length is unknown."""
    lengths = [stage["steps"] for stage in stages]
    if lengths[-1] is None:
        return stages[-1]["seconds"]
    return {
        count: sum(n * stage["seconds"][count] for n, stage in zip(lengths, stages, strict=True)) / sum(lengths)
        for count in stages[0]["seconds"]
    }


@dataclass(frozen=True, slots=True)
class Length:
    """The length of a run; None for what is unknown on this machine."""

    steps: int | None
    epochs: float | None
    contexts: int | None  # of the train split
    origin: str  # description of where the number of contexts comes from
    is_full: bool  # whether every position of every context is known to hold data


def run_length(config: RunConfig, contexts: int | None) -> Length:
    """Return the steps and epochs of a run, one computed from the other if the size of its train split is known.

    Raises:
        ConfigError: the warm-up is longer than the run.
        DataError: the data is on this machine, and does not fit the run.
    """
    train = config.train
    origin, is_full = "as given by --contexts", config.data.packed is True and config.data.separator is None
    if contexts is None:
        contexts, origin, is_full = _contexts_of(config, is_full)
    if contexts is None:
        return Length(train.steps, train.epochs, None, origin, is_full)
    if train.steps is not None:
        epochs = config.batches_in(train.steps) * train.global_batch / contexts
        return Length(train.steps, epochs, contexts, origin, is_full)
    assert train.epochs is not None
    from longstride.launcher.data import steps_of

    return Length(steps_of(config, contexts), train.epochs, contexts, origin, is_full)


def _contexts_of(config: RunConfig, is_full: bool) -> tuple[int | None, str, bool]:
    """Count the contexts of the train split, from the data on this machine or the published size of a data set.

    Returns:
        The number, a description of its origin, and whether the contexts are full. ``is_full`` is whether they are by
        the configuration alone.
    """
    data, location = config.data, config.data.path
    if Path(location).exists():
        from longstride.launcher.data import TrainingData
        from longstride.launcher.ranks import Ranks

        run_data = TrainingData(config, Ranks())
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
    """Format the plan for people."""
    hours = pace.describe(plan["pace"]) if plan["pace"] else []
    parts = (
        _parameters(plan),
        _memory(plan),
        _exchanges(plan),
        _experts(plan),
        _work(plan),
        _length(plan),
        _stages(plan),
        hours,
    )
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def sum_of_flops(plan: dict[str, Any]) -> int:
    """Sum the operations of a step over all processes, including recomputation."""
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
    stored, recomputed, tables = plan["activations"]["kept"], plan["activations"]["recomputed"], plan["tables"]
    device, experts = DEVICES[plan["device"]], plan["experts"]
    lines = [
        f"memory of a process on a {device}, GiB: {plan['precision']}, micro-batch {plan['micro_batch']}",
        f"  activations of all blocks kept {stored['kept'] / _GIB:.2f}, at most {stored['peak'] / _GIB:.2f}; "
        f"recomputed {recomputed['kept'] / _GIB:.2f}, at most {recomputed['peak'] / _GIB:.2f}"
        + (f", and {host / _GIB:.2f} on the host" if (host := recomputed["on_host"]) else ""),
        "  processes  ZeRO  weights  gradients  masters moments  average  buffers"
        f"{'  tables' if tables['rows'] else ''}{' experts' if experts else ''} | peak: kept  recomputed",
    ]
    names = ["weights", "gradients", "masters", "moments", "average", "buffers"] + ["tables"] * bool(tables["rows"])
    names += ["experts"] * bool(experts)
    for row in plan["memory"]:
        columns = (row[name] / _GIB for name in names)
        cells = "".join(
            f"{value:>{width}.2f}" for value, width in zip(columns, (9, 11, 9, 8, 9, 9, 8, 8), strict=False)
        )
        peaks = [f"{row[name] / _GIB:.2f}" for name in ("peak_kept", "peak_recomputed")]
        if row["stage"] == plan["zero_stage"]:
            peaks[plan["activation_checkpointing"]] += "*"
        lines.append(f"  {row['processes']:>9}{row['stage']:>6}{cells} |{peaks[0]:>11}{peaks[1]:>12}")
    if tables["rows"]:
        lines.append(
            f"  tables: {tables['rows']:,} rows, of which a step touches at most {tables['touched_rows']:,}; "
            f"all processes send {tables['sent_bytes'] / 2**20:.1f} MiB to every other"
        )
    if carried := plan["carried_bytes"]:
        lines.append(f"  carried from context to context by all lanes: {carried / 2**20:.1f} MiB, in each checkpoint")
    lines.append("  * as configured")
    return lines


def _experts(plan: dict[str, Any]) -> list[str]:
    experts = plan["experts"]
    if experts is None:
        return []
    most = counting.traffic(experts["most_rows"] * experts["row_bytes"])
    lines = [
        f"experts over {experts['processes']} processes: {experts['numel']:,} weights, layers: {experts['layers']}",
        f"  a process computes {experts['rows']:,} rows in a layer and micro-batch in even use, as planned above; "
        f"at most {experts['most_rows']:,}, {most}",
    ]
    for way in ("forward", "backward"):
        calls, sent = experts[f"{way}_calls"], counting.traffic(experts[f"{way}_bytes"])
        lines.append(f"  a {way} pass: {calls:,} exchanges; a process sends {sent} in even use")
    return lines


def _exchanges(plan: dict[str, Any]) -> list[str]:
    sequence = plan["sequence"]
    if sequence is None or (shared := sequence["processes"]) == 1:
        return []
    lines = [f"a context over {shared} processes: {sequence['positions']:,} positions and 1/{shared} of the work each"]
    counted = plan["activations"]["recomputed" if plan["activation_checkpointing"] else "kept"]
    counts = dict.fromkeys(row["processes"] for row in plan["memory"])
    for count, micro_batches in zip(counts, sequence["micro_batches"], strict=True):
        calls, sent, received = (micro_batches * counted[name] for name in ("calls", "sent_bytes", "received_bytes"))
        lines.append(
            f"  a step of the last of {count} processes: {calls:,} exchanges; it sends {counting.traffic(sent)} and "
            f"receives {counting.traffic(received)}"
        )
    lines.append("  by layer, what a process sends on average in the forward pass of a micro-batch:")
    for items, names in _group_layers([layer and tuple(layer.items()) for layer in sequence["layers"]]):
        if items is None:
            lines.append(f"    not counted by layer: {names}")
            continue
        layer = dict(items)
        amounts = {way: layer[f"{way}_bytes"] for way in ("heads", "keys")}
        facts = [
            ", ".join(f"by {way} {'impossible' if n is None else counting.traffic(n)}" for way, n in amounts.items())
            + f": {layer['taken']}"
        ]
        if layer["copies"] > 1:
            facts.append(f"keys and values copied {layer['copies']} times")
        if layer["anew"]:
            facts.append(f"{counting.traffic(layer['anew_bytes'])} to redistribute its rows")
        lines.append(f"    {'; '.join([*facts, names])}")
    return lines


def _group_layers(layers: Sequence[Kind]) -> Iterator[tuple[Kind, str]]:
    """Yield each kind of layer once, in order of its first layer, and the numbers of its layers in words."""
    users: dict[Kind, list[int]] = {}
    for layer, kind in enumerate(layers):
        users.setdefault(kind, []).append(layer)
    for kind, numbers in users.items():
        count = f", … ({len(numbers)} layers)" if len(numbers) > 6 else ""
        yield kind, f"layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:6]))}{count}"


def _work(plan: dict[str, Any]) -> list[str]:
    step, attention = plan["step"], plan["attention"]
    total = sum_of_flops(plan)
    share = attention["pairs"] / attention["dense_pairs"]
    dense = step["dense_flops"]
    flops = [counting.flops(count, ",.2f") for count in (total, dense)]
    lines = [f"a step  {flops[0]}; with dense attention {flops[1]}, {dense / total:.1f} times as many"]
    for name in ("forward", "backward", "recompute"):
        lines.append(f"  {name:<11}{counting.flops(step[f'{name}_flops'], ',.2f'):>14}")
    most = "at most " if any(attention["bounds"]) or attention["at_most"] else ""
    lines.append(f"  attention to {most}{share:.2%} of the pairs of dense attention; by layer:")
    for (density, bound), names in _group_layers([*zip(attention["density"], attention["bounds"], strict=True)]):
        lines.append(f"    {density:7.2%}  {names}{f': {bound}' if bound else ''}")
    return lines


def _stages(plan: dict[str, Any]) -> list[str]:
    if len(plan["stages"]) == 1:
        return []
    name = "recomputed" if plan["activation_checkpointing"] else "kept"
    lines = ["stages  the figures of a step above are of the last, and the memory is of the largest"]
    for stage in plan["stages"]:
        facts = [
            "the rest" if stage["steps"] is None else f"{stage['steps']:,} steps",
            f"{stage['global_batch']:,} contexts of {stage['context']:,}",
            f"{stage['density']:.2%} of the pairs",
            f"{counting.flops(stage['flops'], ',.2f')} a step",
            f"activations at most {stage['activations'][name]['peak'] / _GIB:.2f} GiB",
            *(f"{counting.step_duration(seconds)} a step" for seconds in [*stage.get("seconds", {}).values()][:1]),
        ]
        lines.append(f"  {', '.join(facts)}")
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
        flops = counting.flops(length["flops"], ",.2f")
        lines.append(f"  {most}{length['tokens']:,} {length['unit']}s and {flops} in all")
    if warning := pace.warn_of_length(epochs):
        lines.append(f"  {warning}")
    return lines
