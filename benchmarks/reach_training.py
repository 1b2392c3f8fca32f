"""Training for a time in `benchmarks/reach.py`, in one process, with the trainer's optimisers and precision.

Contexts become longer from stage to stage. Weights and the optimiser's state go from one network to the next.

Letters: B contexts, N positions of a context.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.machine import synchronize
from benchmarks.reach_tasks import Task
from longstride.kernels.backends import has_bf16_products
from longstride.launcher.config import TrainConfig
from longstride.launcher.engine import parameter_groups, prepare_accelerator
from longstride.launcher.engine.muon import Muon, matrices_in
from longstride.launcher.engine.optimizer import MATRICES, make_optimizer, rate_factor
from longstride.launcher.engine.states import MOMENTUM, Slice, Vector
from longstride.launcher.engine.tables import Tables
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import ModelConfig, SparseTransformer

CLOCK_STEPS = 10_000  # that a run's time is divided into, for the schedule of the rate
LARGEST_NORM = 1.0  # of the gradient
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


class Learner:
    """A network and its optimiser, with fp32 masters of its weights."""

    def __init__(self, model: dict[str, Any], train: TrainConfig, device: torch.device) -> None:
        """Draw the weights."""
        prepare_accelerator()
        half = device.type != "cpu" or has_bf16_products()
        torch.manual_seed(train.seed)
        self.network = SparseTransformer(ModelConfig.model_validate(model))
        self.train, self.tables = train, None
        if self.network.embedding.ngrams is not None:
            self.tables = Tables(self.network.embedding.ngrams, train, Ranks(), sharded=False)
        self.network.to(device, torch.bfloat16 if half else torch.float32)
        self.weights = dict(self.network.named_parameters())
        self.masters = {name: nn.Parameter(weight.detach().float()) for name, weight in self.weights.items()}
        groups = parameter_groups(self.network, split=train.optimizer is not None)
        self.optimizer = make_optimizer(self.masters, groups, train, half=half)
        self.rates = [train.rate_of(group.get("part")) for group in self.optimizer.param_groups]
        if isinstance(self.optimizer, Muon):
            roles = self.network.parameter_roles().items()
            matrices = {
                name: matrices_in(self.masters[name].shape, role.rows) for name, role in roles if role.part == MATRICES
            }
            vectors = [
                Vector(self.masters[name], (MOMENTUM,), ((Slice(name, 0, 0, self.masters[name].numel()),),))
                for name in matrices
            ]
            self.optimizer.lay_out(vectors, matrices, device)

    def state(self) -> dict[str, Any]:
        """Return a copy of the weights, the optimiser's state and the tables."""
        content = {"masters": self.masters, "optimizer": self.optimizer.state_dict()}
        return deepcopy(content | ({} if self.tables is None else {"tables": self.tables.share()}))

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Continue from the state of another network whose parameters have the same names and shapes.

        It may lack n-gram tables, whose rows then stay zero.
        """
        assert self.masters.keys() == state["masters"].keys()
        for name, master in self.masters.items():
            self.weights[name].copy_(master.copy_(state["masters"][name]))
        self.optimizer.load_state_dict(state["optimizer"])
        if self.tables is not None and "tables" in state:
            self.tables.fill(0, 1, state["tables"], None)

    def step(self, tokens: Tensor, share: float) -> Tensor:
        """Take a step when ``share`` of the run is over; return the nats (B, N) of its bytes."""
        nats, auxiliary, statistics = self.network(tokens, return_nats=True, return_extras=True)
        (nats.mean() if auxiliary is None else nats.mean() + auxiliary).backward()
        for name, master in self.masters.items():
            gradient, self.weights[name].grad = self.weights[name].grad, None
            master.grad = None if gradient is None else gradient.float()
        nn.utils.clip_grad_norm_(self.masters.values(), LARGEST_NORM)
        number = min(round(share * CLOCK_STEPS), CLOCK_STEPS - 1)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * rate_factor(self.train, number)
        self.optimizer.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.weights[name].copy_(master)
        if self.tables is not None:
            self.tables.step(number, 1.0)
        for part, total in zip(self.network.observers, statistics, strict=True):
            part.observe(total.detach().double())
        return nats.detach()


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
    learner, spent = Learner(stage.model, train, device), 0.0
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
        nats = learner.step(tokens.to(device), spent / seconds)
        times.append(clock(device) - begin)
        spent += times[-1]
        curve.append(float(nats[scored.to(device)].mean()) / math.log(2))
    return learner.network.eval(), Progress(learner.state(), spent, end, len(times), statistics.median(times), curve)


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
