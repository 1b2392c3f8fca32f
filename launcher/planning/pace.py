"""The duration of a run: its operations at the rate of a process, from an option, from another run, or measured.

A *rate* is the number of operations that a process achieves per second, as `longstride plan` counts them. It is never
the promise of a card's data sheet.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from longstride.kernels import ConfigError
from longstride.launcher.config import load_config, load_json_object
from longstride.launcher.output import counting, file_names, metrics_file

TERA = 10**12
MANY_EPOCHS = 200  # beyond, the plan warns; the published runs have 120 epochs at most
WARM_STEPS = 2  # the first steps also compile and allocate
LEAST_TFLOPS, MOST_TFLOPS = 1e-6, 1e6  # per process: below any computer, and an exascale machine


class Rate(NamedTuple):
    """The operations that a process achieves per second."""

    flops_per_second: float
    origin: str  # description


def requested_rate(arguments: argparse.Namespace) -> Rate | None:
    """Return the rate of --tflops or --rate-of; None without these options.

    Raises:
        ConfigError: --tflops is not a rate of a process, or the run does not exist or has no steps for a rate.
    """
    if arguments.tflops is not None:
        try:
            rate = float(arguments.tflops)
        except ValueError:
            rate = math.nan
        if not LEAST_TFLOPS <= rate <= MOST_TFLOPS:
            rule = "must be the TFLOP/s of a process, from 0.000001 to 1,000,000; such as 0.1 for a few cores"
            rule += ", 150 for a card"
            raise ConfigError(f"--tflops={arguments.tflops}: {rule}")
        return Rate(rate * TERA, f"at {rate:g} TFLOP/s a process, as given by --tflops")
    return rate_of(arguments.rate_of) if arguments.rate_of is not None else None


def rate_of(run: Path) -> Rate:
    """Return the rate of a run's processes, by the median of its logged steps.

    Raises:
        ConfigError: no run, no logged steps after the first, or no checkpoint with its number of processes.
    """
    from longstride.launcher.planning.costs import step_flops, work

    if not ((run / file_names.CONFIG).is_file() and (run / file_names.METRICS).is_file()):
        what = "holds no run" if run.is_dir() else "no such run folder"
        raise ConfigError(f"--rate-of={run}: {what}; name one that `longstride train` wrote")
    config = load_config(run / file_names.CONFIG)
    logged = (line.get("seconds") for step, line in metrics_file.find_steps(run).items() if step > WARM_STEPS)
    seconds = [value for value in logged if isinstance(value, float) and value > 0]
    if not seconds:
        rule = f"has no logged step after its first {WARM_STEPS}; train longer, or give --tflops"
        raise ConfigError(f"--rate-of={run}: {rule}")
    manifests = sorted((run / file_names.CHECKPOINTS).glob("step-*/manifest.json"))
    processes = load_json_object(manifests[-1]).get("world_size") if manifests else None
    if type(processes) is not int or processes < 1:
        rule = "has no checkpoint, which would say how many processes it has; give --tflops"
        raise ConfigError(f"--rate-of={run}: {rule}")
    flops = sum(step_flops(work(config.model, config.train.micro_batch), config).values())
    rate = flops / (statistics.median(seconds) * processes)
    return Rate(rate, f"at {rate / TERA:.3g} TFLOP/s a process, as {run} had it")


def warn_of_length(epochs: float | None) -> str | None:
    """Return a warning about an unusual number of epochs; None if there is none."""
    if epochs is None:
        return None
    if epochs > MANY_EPOCHS:
        return f"the data is seen {epochs:,.0f} times: take more data, or fewer steps"
    if epochs < 1:
        share = f"{epochs:.0%}" if epochs >= 0.01 else "less than 1%"
        return f"{share} of the data is seen: take more steps, or a larger batch; epochs in place of steps see it all"
    return None


def pace_json(origin: str, steps: int | None, seconds: dict[int, float]) -> dict[str, Any]:
    """Return the pace of a plan as JSON values, from the seconds of a step by the number of processes.

    ``steps`` is the length of the run; None if it is unknown.
    """
    return {
        "origin": origin,
        "rows": [
            {"processes": count, "step_seconds": step, "run_seconds": steps and steps * step}
            for count, step in seconds.items()
        ],
    }


def describe(pace: dict[str, Any]) -> list[str]:
    """Format a pace as lines."""
    lines = [f"hours  {pace['origin']}"]
    for row in pace["rows"]:
        total = "" if row["run_seconds"] is None else f", {counting.duration(row['run_seconds'])} in all"
        step = counting.step_duration(row["step_seconds"])
        lines.append(f"  {counting.processes(row['processes'])}: {step} a step{total}")
    return [*lines, "  without evaluations, checkpoints and the start"]
