"""`longstride plan CONFIG`: parameters, memory, operations and length of a run, before anything is started."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, load_config

MOST_PROCESSES = 8  # that are planned for where none are named: one machine's
_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("config", metavar="CONFIG", help="a run's JSON, or the name of one in ds_configs/experiments")
    parser.add_argument(
        "--processes",
        nargs="+",
        default=[],
        metavar="W",
        help=f"plan for so many processes (default: as many as the batch allows, at most {MOST_PROCESSES})",
    )
    parser.add_argument("--contexts", type=int, metavar="N", help="of the train split, where the data is not here")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument(
        "overrides", nargs="*", metavar="path.to.key=value", help="changes to the configuration; values are JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns its exit code.

    Raises:
        ConfigError: the configuration is wrong, or does not go with so many processes.
        DataError: the data is here, and does not fit the run.
    """
    # What stands behind --processes and is no number of them was meant to follow it.
    overrides = [*arguments.overrides, *(word for word in arguments.processes if "=" in word)]
    if arguments.contexts is not None and arguments.contexts < 1:
        raise ConfigError(f"--contexts={arguments.contexts}: must be at least 1")
    config = load_config(arguments.config, overrides)
    processes = _processes(config, [word for word in arguments.processes if "=" not in word])
    plan = make_plan(config, processes, arguments.contexts)
    print(json.dumps(plan) if arguments.json else describe(plan))
    return 0


def make_plan(config: RunConfig, processes: list[int], contexts: int | None = None) -> dict[str, Any]:
    """Everything that is planned, as JSON values; bytes and operations are whole numbers.

    Raises:
        ConfigError: the warm-up is longer than the run.
        DataError: the data is here, and does not fit the run.
    """
    # Late: with torch come seconds, which a mistake in the file should not cost.
    from longstride.launcher.planning import memory
    from longstride.launcher.planning import work as counted

    length = counted.run_length(config, contexts)
    model, train = config.model, config.train
    parts = counted.parameter_parts(model)
    total = sum(parts.values())
    pairs, dense = counted.layer_pairs(model), counted.dense_pairs(model)
    in_all = (sum(pairs), dense * model.layers)
    once, as_dense = (counted.work(model, each, train.micro_batch) for each in in_all)
    step = step_flops(once, config)
    kept = {name: memory.activations(config, on) for name, on in (("kept", False), ("recomputed", True))}
    return {
        "parameters": {"total": total, **parts},
        "precision": config.precision,
        "zero_stage": config.zero_stage,
        "activation_checkpointing": train.activation_checkpointing,
        "micro_batch": train.micro_batch,
        "activations": {name: asdict(each) for name, each in kept.items()},
        "memory": [
            {
                "processes": count,
                "stage": stage,
                **asdict(held := memory.states(total, config, count, stage)),
                **{f"peak_{name}": held.peak(each) for name, each in kept.items()},
            }
            for count in processes
            for stage in memory.STAGES
        ],
        "attention": {
            "density": [each / dense for each in pairs],
            "pairs": sum(pairs),
            "dense_pairs": dense * model.layers,
        },
        "step": {**step, "dense_flops": sum(step_flops(as_dense, config).values())},
        "length": {
            **asdict(length),
            "tokens_per_step": train.global_batch * model.context,
            "tokens": length.steps and length.steps * train.global_batch * model.context,
            "flops": length.steps and length.steps * sum(step.values()),
        },
    }


def describe(plan: dict[str, Any]) -> str:
    """The plan as a person reads it."""
    return "\n\n".join("\n".join(lines) for lines in (_parameters(plan), _memory(plan), _work(plan), _length(plan)))


def _processes(config: RunConfig, given: list[str]) -> list[int]:
    """The numbers of processes to plan for; ConfigError where the batch does not divide over them."""
    train = config.train
    if not given:
        units = train.global_batch // train.micro_batch
        return [max(count for count in range(1, MOST_PROCESSES + 1) if units % count == 0)]
    for word in given:
        if not (word.isascii() and word.isdecimal() and int(word)):
            raise ConfigError(f"--processes={word}: must be whole numbers of at least 1")
        config.check_world_size(int(word))
    return [int(word) for word in given]


def step_flops(work: Any, config: RunConfig) -> dict[str, int]:
    """Operations of one optimiser step, over all processes."""
    contexts = config.train.global_batch
    return {
        "forward_flops": contexts * work.forward,
        "backward_flops": contexts * work.backward,
        "recompute_flops": contexts * work.blocks if config.train.activation_checkpointing else 0,
    }


def _parameters(plan: dict[str, Any]) -> list[str]:
    total = plan["parameters"]["total"]
    lines = [f"parameters  {total:,}, {_gib(4 * total)} in fp32"]
    for name, count in plan["parameters"].items():
        if name != "total":
            lines.append(f"  {name:<14}{count:>14,}  {count / total:6.1%}")
    return lines


def _memory(plan: dict[str, Any]) -> list[str]:
    kept, recomputed = plan["activations"]["kept"], plan["activations"]["recomputed"]
    lines = [
        f"memory of a process, GiB: {plan['precision']}, micro-batch {plan['micro_batch']}",
        f"  activations of all blocks kept {kept['kept'] / _GIB:.2f}, at most {kept['peak'] / _GIB:.2f}; "
        f"recomputed {recomputed['kept'] / _GIB:.2f}, at most {recomputed['peak'] / _GIB:.2f}",
        "  processes  ZeRO  weights  gradients  masters   Adam  average  buffers | peak: kept  recomputed",
    ]
    for row in plan["memory"]:
        columns = [row[name] / _GIB for name in ("weights", "gradients", "masters", "adam", "average", "buffers")]
        widths = (9, 11, 9, 7, 9, 9)
        cells = "".join(f"{value:>{width}.2f}" for value, width in zip(columns, widths, strict=True))
        own = row["stage"] == plan["zero_stage"]
        marks = ["", ""]
        if own:
            marks[int(plan["activation_checkpointing"])] = "*"
        peaks = [
            f"{row[name] / _GIB:.2f}{mark}" for name, mark in zip(("peak_kept", "peak_recomputed"), marks, strict=True)
        ]
        lines.append(f"  {row['processes']:>9}{row['stage']:>6}{cells} |{peaks[0]:>11}{peaks[1]:>12}")
    lines.append("  * as configured")
    return lines


def _work(plan: dict[str, Any]) -> list[str]:
    step, attention = plan["step"], plan["attention"]
    total = step["forward_flops"] + step["backward_flops"] + step["recompute_flops"]
    share = attention["pairs"] / attention["dense_pairs"]
    dense = step["dense_flops"]
    lines = [f"a step  {_flops(total)}; with dense attention {_flops(dense)}, {dense / total:.1f} times as many"]
    for name in ("forward", "backward", "recompute"):
        lines.append(f"  {name:<11}{_flops(step[f'{name}_flops']):>14}")
    lines.append(f"  attention to {share:.2%} of the pairs of dense causal attention; by layer:")
    lines += [f"    {text}" for text in _densities(attention["density"])]
    return lines


def _densities(density: list[float]) -> list[str]:
    """Layers of the same density together, in the order of the first of them."""
    users: dict[float, list[int]] = {}
    for layer, value in enumerate(density):
        users.setdefault(value, []).append(layer)
    lines = []
    for value, layers in users.items():
        shown = ", ".join(map(str, layers[:6])) + (f", … ({len(layers)} layers)" if len(layers) > 6 else "")
        lines.append(f"{value:7.2%}  layers {shown}" if len(layers) > 1 else f"{value:7.2%}  layer {shown}")
    return lines


def _length(plan: dict[str, Any]) -> list[str]:
    length = plan["length"]
    steps, epochs = length["steps"], length["epochs"]
    told = [f"{length['tokens_per_step']:,} bytes a step"]
    told.append("steps unknown" if steps is None else f"{steps:,} steps")
    told.append("epochs unknown" if epochs is None else f"{epochs:,.6g} epochs")
    lines = [f"the run  {', '.join(told)}"]
    if length["contexts"] is None:
        lines.append(f"  {length['origin']}")
    else:
        lines.append(f"  {length['contexts']:,} contexts in the train split, {length['origin']}")
    if steps is not None:
        lines.append(f"  {length['tokens']:,} bytes and {_flops(length['flops'])} in all")
    return lines


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"


def _flops(count: int) -> str:
    """Operations with a prefix."""
    for prefix, size in (("E", 10**18), ("P", 10**15), ("T", 10**12), ("G", 10**9)):
        if count >= size:
            return f"{count / size:,.2f} {prefix}FLOP"
    return f"{count:,} FLOP"
