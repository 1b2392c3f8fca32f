"""How long a run takes: its operations at the rate of a process, which is given, taken from a run, or measured here.

A *rate* is that of a process, in operations a second as `longstride plan` counts them: what was achieved, never what a
card's data sheet promises.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstride.kernels import ConfigError
from longstride.launcher.config import load_config, load_json_object
from longstride.launcher.output import counting, file_names, metrics_file

TERA = 10**12
MANY_EPOCHS = 200  # from here on a word is said; the published runs see their data 120 times at most
WARM_STEPS = 2  # of a run, which also compile and allocate
LEAST_TFLOPS, MOST_TFLOPS = 1e-6, 1e6  # of a process: less is no computer of today, more is a whole exascale machine


@dataclass(frozen=True, slots=True)
class Rate:
    """What a process achieves."""

    flops_per_second: float
    origin: str  # in words

    def step_seconds(self, step_flops: int, processes: int) -> float:
        """Return the seconds of a step of so many operations, which processes share out evenly."""
        return step_flops / (self.flops_per_second * processes)


def given_rate(arguments: argparse.Namespace) -> Rate | None:
    """Return the rate that --tflops or --rate-of names; None where neither is given.

    Raises:
        ConfigError: --tflops is no rate of a process, or there is no run, or it has no steps to take a rate from.
    """
    if arguments.tflops is not None:
        try:
            rate = float(arguments.tflops)
        except ValueError:
            rate = math.nan
        if not LEAST_TFLOPS <= rate <= MOST_TFLOPS:
            rule = "must be what a process achieves, from 0.000001 to 1,000,000; such as 0.1 for a few cores"
            rule += ", 150 for a card"
            raise ConfigError(f"--tflops={arguments.tflops}: {rule}")
        return Rate(rate * TERA, f"at {rate:g} TFLOP/s a process, as given by --tflops")
    return rate_of(arguments.rate_of) if arguments.rate_of is not None else None


def rate_of(run: Path) -> Rate:
    """Return the rate that the processes of a run have had, by the median of its logged steps.

    Raises:
        ConfigError: no run, no logged steps behind the first, or nothing that says how many processes it had.
    """
    from longstride.launcher.planning.costs import step_flops, work

    if not ((run / file_names.CONFIG).is_file() and (run / file_names.METRICS).is_file()):
        what = "holds no run" if run.is_dir() else "no such run folder"
        raise ConfigError(f"--rate-of={run}: {what}; name one that `longstride train` wrote")
    config = load_config(run / file_names.CONFIG)
    logged = (line.get("seconds") for step, line in metrics_file.find_steps(run).items() if step > WARM_STEPS)
    seconds = [each for each in logged if isinstance(each, float) and each > 0]
    if not seconds:
        rule = f"has logged no step behind its first {WARM_STEPS}; train on, or give --tflops"
        raise ConfigError(f"--rate-of={run}: {rule}")
    processes = _processes_of(run)
    flops = sum(step_flops(work(config.model, config.train.micro_batch), config).values())
    rate = flops / (statistics.median(seconds) * processes)
    if not LEAST_TFLOPS <= rate / TERA <= MOST_TFLOPS:
        rule = f"steps of {statistics.median(seconds):.3g} s are no measure of a process; give --tflops"
        raise ConfigError(f"--rate-of={run}: {rule}")
    return Rate(rate, f"at {rate / TERA:.3g} TFLOP/s a process, as {run} had it")


def _processes_of(run: Path) -> int:
    """Return how many processes a run has, as its newest checkpoint says."""
    manifests = sorted((run / file_names.CHECKPOINTS).glob("step-*/manifest.json"))
    count = load_json_object(manifests[-1]).get("world_size") if manifests else None
    if type(count) is not int or count < 1:
        rule = "has no checkpoint, which would say how many processes it has; give --tflops"
        raise ConfigError(f"--rate-of={run}: {rule}")
    return count


def words_on_length(epochs: float | None) -> str | None:
    """Say what is unusual about the length of a run, in words; None where nothing is, or where it is not known."""
    if epochs is None:
        return None
    if epochs > MANY_EPOCHS:
        return f"the data is seen {epochs:,.0f} times: take more data, or fewer steps"
    if epochs < 1:
        seen = f"{epochs:.0%}" if epochs >= 0.01 else "less than 1%"
        return f"{seen} of the data is seen: take more steps, or a larger batch; epochs in place of steps see it all"
    return None


def pace_json(origin: str, steps: int | None, seconds: dict[int, float]) -> dict[str, Any]:
    """Return the pace of a plan as JSON values: seconds of a step by the number of processes, and of the run.

    ``steps`` of the run; None: its length is not known here.
    """
    return {
        "origin": origin,
        "rows": [
            {"processes": count, "step_seconds": each, "run_seconds": steps and steps * each}
            for count, each in seconds.items()
        ],
    }


def describe(pace: dict[str, Any]) -> list[str]:
    """Write a pace as lines."""
    lines = [f"hours  {pace['origin']}"]
    for row in pace["rows"]:
        many = f"{row['processes']:,} process{'es' if row['processes'] > 1 else ''}"
        whole = "" if row["run_seconds"] is None else f", {counting.duration(row['run_seconds'])} in all"
        lines.append(f"  {many}: {counting.step_duration(row['step_seconds'])} a step{whole}")
    return [*lines, "  without evaluations, checkpoints and the start"]
