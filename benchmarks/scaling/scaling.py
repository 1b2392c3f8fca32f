"""From one GPU to 4,096: ``python -m benchmarks.scaling.scaling [RUN [path.to.key=value …]]``.

With a run, by name or file, it only prints: what a rank sends in a step and what a GPU holds, for every ZeRO stage and
number of GPUs, and what GPUs that share contexts exchange. Every GPU has the same work whatever their number:
``--micro-batches`` of the run's micro-batch a step.

Without a run it writes this for RUNS to the result file, the source of the tables of docs/clusters.md. The predicted
bytes are compared with counted ones by tests/benchmarks/scaling/test_communication.py.

Seconds of communication are not measured: ``--within`` and ``--between`` (bytes a second that a GPU sends within its
host and to others) give a model of them without overlap and without latency.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.machine import about
from benchmarks.report import check_output, new_parser, positive, write_result
from benchmarks.scaling import divided
from benchmarks.scaling.collectives import DEEPSPEED, OURS, num_calls, total_sent
from benchmarks.scaling.zero_communication import Run
from longstride.kernels import ConfigError
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import rows_sent
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.planning import costs as plan_memory
from longstride.launcher.planning.rehearsal import activations

CARDS = [2**power for power in range(13)]
# Name, run and changes: the paper's text and longest music, and what music would be at the size of today's models.
RUNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("enwik8_fixed", "enwik8_fixed", ()),
    ("music_65k", "music_65k", ()),
    ("music_1m", "music_1m", ("deepspeed=zero1_fp16",)),
    ("music_1m_152m", "music_1m_152m", ()),
    ("music_65k, widened", "music_65k", ("model.width=4096", "model.heads=32", "model.layers=32")),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = read_options(arguments)
    if options.run:
        try:
            result = scale(options.run, load_config(options.run, options.changes), options.cards, options.micro_batches)
        except (ConfigError, OSError) as error:
            print(f"scaling: error: {error}", file=sys.stderr)
            return 2
        print(described(result, options))
        return 0
    runs = []
    for name, run, changes in RUNS:
        config = load_config(run, list(changes))
        runs.append({"changes": list(changes), **scale(name, config, options.cards, options.micro_batches)})
        print(described(runs[-1], options) + "\n", flush=True)
    result = {**about(torch.device("cpu")), "deepspeed": importlib.metadata.version("deepspeed"), "runs": runs}
    write_result(options, result)
    return 0


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("run", nargs="?", help="a run's JSON, or the name of one in ds_configs/experiments")
    parser.add_argument("changes", nargs="*", metavar="path.to.key=value", help="of the run")
    parser.add_argument(
        "--cards", type=positive(int), nargs="+", default=CARDS, metavar="W", help="by default to 4,096"
    )
    parser.add_argument("--micro-batches", type=positive(int), default=1, metavar="m", help="of a card and step")
    parser.add_argument(
        "--within", type=positive(float), default=300e9, help="bytes a second of a card within its host"
    )
    parser.add_argument("--between", type=positive(float), default=25e9, help="and to other hosts")
    parser.add_argument("--cards-per-host", type=positive(int), default=8)
    options = parser.parse_intermixed_args(arguments)
    if not options.run:
        check_output(parser, options, "scaling")
    return options


def scale(name: str, config: RunConfig, cards: Sequence[int], micro_batches: int) -> dict[str, Any]:
    """Return all figures of a run as JSON values.

    Raises:
        ConfigError: the run has a setting whose communication is not modelled.
    """
    run, train = Run(config), config.train
    taken = activations(config, train.activation_checkpointing)
    rows = []
    for count in cards:
        for stage in plan_memory.STAGES:
            collectives = run.step(count, micro_batches, stage)
            costs = plan_memory.states(run.parameters.total, config, count, stage)
            rows.append(
                {
                    "cards": count,
                    "stage": stage,
                    "sent": total_sent(collectives, count, DEEPSPEED),
                    "calls": sum(num_calls(collectives, DEEPSPEED).values()),
                    "own_sent": sum(total_sent(collectives, count, OURS).values()),
                    "peak_bytes": costs.peak(taken),
                }
            )
    return {
        "name": name,
        "parameters": run.parameters.total,
        "context": config.model.context,
        "micro_batch": train.micro_batch,
        "micro_batches": micro_batches,
        "precision": config.precision,
        "activation_checkpointing": train.activation_checkpointing,
        "activations": asdict(taken),
        "cards": rows,
        "divided": [_shared(config, ranks, micro_batches) for ranks in divided.shares(config.model)],
    }


def _shared(config: RunConfig, ranks: int, micro_batches: int) -> dict[str, Any]:
    """Compute what a GPU sends on average, and holds at most, if ``ranks`` GPUs share a context."""
    result: dict[str, Any] = {"ranks": ranks}
    for name, exchange in (("heads_sent", "heads"), ("sent", "auto")):
        changes = {"sequence_parallel": ranks, "sequence_exchange": exchange}
        changed = config.model_copy(update={"train": config.train.model_copy(update=changes)})
        exchanges = [divided.exchanges(changed, rank, micro_batches, _rows_sent) for rank in range(ranks)]
        result[name] = sum(divided.sent_to_others(of_rank, ranks) for of_rank in exchanges) / ranks
    result["calls"] = sum(num_calls(exchanges[0]).values())
    return {**result, "activations": asdict(activations(changed, config.train.activation_checkpointing))}


def _rows_sent(patterns: tuple[Pattern, ...], key_heads: int, context: int, sections: int) -> list[list[int]]:
    """Count as the model does: masks would have an entry for every two positions."""
    counts: list[list[int]] = rows_sent(patterns, key_heads, context, sections).tolist()
    return counts


def modelled_seconds(sent: float, cards: int, options: argparse.Namespace) -> float:
    """Return the seconds to send these bytes from each rank: a ring is as slow as its slowest link."""
    return sent / float(options.within if cards <= options.cards_per_host else options.between)


def described(result: dict[str, Any], options: argparse.Namespace) -> str:
    """Format a run for the terminal."""
    lines = [
        f"{result['name']}: {result['parameters']:,} parameters, {result['context']:,} bytes a context, "
        f"{result['micro_batches']} × {result['micro_batch']} of them a card and step, {result['precision']}",
        "  cards  ZeRO   MB sent a rank   collectives   ours, kB   GiB a card   modelled ms",
    ]
    for row in result["cards"]:
        sent, local = sum(row["sent"].values()), row["own_sent"] / 1e3
        lines.append(
            f"  {row['cards']:>5}{row['stage']:>6}{sent / 1e6:>17,.1f}{row['calls']:>14,}{local:>11,.1f}"
            f"{row['peak_bytes'] / 2**30:>13.2f}{modelled_seconds(sent, row['cards'], options) * 1e3:>14.1f}"
        )
    lines.append(
        "  cards that share a context: MB sent a rank by heads, and by what sends least   collectives   peak, GiB"
    )
    for row in result["divided"]:
        peak = row["activations"]["peak"] / 2**30
        sent = "".join(f"{row[name] / 1e6:>24,.1f}" for name in ("heads_sent", "sent"))
        lines.append(f"  {row['ranks']:>26}{sent}{row['calls']:>14,}{peak:>12.2f}")
    lines.append(
        f"  modelled: {options.within / 1e9:g} GB/s within {options.cards_per_host} cards, "
        f"{options.between / 1e9:g} GB/s a card between hosts, nothing overlapped"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
