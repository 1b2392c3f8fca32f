"""Training for a time in `benchmarks/reach.py`, in one process, with the trainer's optimisers and precision.

Contexts become longer from stage to stage. Weights and the optimiser's state go from one network to the next.

Letters: B contexts, N positions of a context.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.learner import Learner
from benchmarks.machine import synchronize
from benchmarks.reach_tasks import Task
from longstride.kernels.backends import has_bf16_products
from longstride.launcher.config import TrainConfig
from longstride.launcher.engine import prepare_accelerator
from longstride.sparse_model import ModelConfig, SparseTransformer

CLOCK_STEPS = 10_000  # that a run's time is divided into, for the schedule of the rate
SOLVED_BITS = 0.05  # above the floor
SOLVED_STEPS = 8  # over which training bits are averaged
SECTIONS = 8  # of a context, for the loss by position
SEED_OF_EVALUATION = 1 << 20


class Stage(NamedTuple):
    """A part of a run."""

    task: Task
    model: dict[str, Any]
    batch: int  # contexts in a step
    seconds: float


class Progress(NamedTuple):
    """The end of a stage."""

    state: dict[str, Any]
    seconds: float  # since the run began
    end: float  # when the stage should end
    steps: int  # of the stage
    seconds_per_step: float
    curve: list[float]  # bits per scored byte of each of its steps


def trained(
    stage: Stage, settings: dict[str, Any], seed: int, seconds: float, before: Progress | None = None
) -> tuple[SparseTransformer, Progress]:
    """Train a stage of a run that takes some seconds in all, from the end of the stage before it.

    The time counts steps only, neither making contexts nor evaluations. It is processor time, on a GPU wall time.
    """
    device = best_device()
    train = TrainConfig.model_validate(settings | {"output": "none", "seed": seed, "steps": CLOCK_STEPS})
    learner, spent = new_learner(stage.model, train), 0.0
    if before is not None:
        learner.load(before.state)
        spent = before.seconds
    end = stage.seconds + (0.0 if before is None else before.end)
    times: list[float] = []
    curve = []
    while spent < end:
        context = stage.model["context"]
        tokens, scored = stage.task.batch((seed, context, len(times)), context, stage.batch)
        begin = clock(device)
        number = min(round(spent / seconds * CLOCK_STEPS), CLOCK_STEPS - 1)
        nats = learner.step(tokens.to(device), number)
        times.append(clock(device) - begin)
        spent += times[-1]
        curve.append(float(nats[scored.to(device)].mean()) / math.log(2))
    return learner.network.eval(), Progress(learner.state(), spent, end, len(times), statistics.median(times), curve)


def new_learner(model: dict[str, Any], train: TrainConfig) -> Learner:
    """Draw a network in this machine's best precision."""
    prepare_accelerator()
    device = best_device()
    half = device.type != "cpu" or has_bf16_products()
    return Learner(ModelConfig.model_validate(model), train, device, torch.bfloat16 if half else torch.float32)


def best_device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def clock(device: torch.device) -> float:
    """Return the seconds of this process: of its processors, or on a GPU of the wall."""
    synchronize(device)
    return time.process_time() if device.type == "cpu" else time.perf_counter()


def solved_at(curve: Sequence[float], floor: float | None) -> int | None:
    """Return after how many steps the bits of new contexts, averaged over some steps, were near the floor.

    None: never, or there is no floor.
    """
    if floor is None:
        return None
    for last in range(SOLVED_STEPS, len(curve) + 1):
        if statistics.fmean(curve[last - SOLVED_STEPS : last]) <= floor + SOLVED_BITS:
            return last
    return None


@torch.no_grad()
def score(task: Task, network: SparseTransformer, count: int) -> dict[str, Any]:
    """Return bits per scored byte, per byte, and per scored byte of each section of held-out contexts."""
    context = network.config.context
    nats, scored = [], []
    for number in range(count):
        tokens, mask = task.batch((SEED_OF_EVALUATION, number), context, 1, held_out=True)
        nats.append(network(tokens.to(best_device()), return_nats=True).double().cpu())
        scored.append(mask)
    bits, mask = torch.cat(nats) / math.log(2), torch.cat(scored)
    sections = zip(bits.tensor_split(SECTIONS, 1), mask.tensor_split(SECTIONS, 1), strict=True)
    return {
        "bits": round(float(bits[mask].mean()), 4),
        "bits_per_byte": round(float(bits.mean()), 4),
        "by_position": [round(float(part[some].mean()), 4) if bool(some.any()) else None for part, some in sections],
    }
