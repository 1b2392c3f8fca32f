"""A step timed on this machine without the whole network: one block of each kind, by the run's own engine.

The engine is built around as few blocks as have all kinds of the network, and takes a few steps on random bytes. Every
moment at which a block begins or ends, forward and backward, is marked. A step of the whole is made of that: each block
as long as the one of its kind, what lies around the blocks (embedding, logits, loss) once a micro-batch, and the
optimiser's update in proportion to the parameters. Importing it imports deepspeed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig
from longstride.launcher.engine import EngineStep, build_engine, check_engine, prepare_accelerator
from longstride.launcher.planning.costs import engine_parameters
from longstride.launcher.ranks import Ranks, process_group
from longstride.sparse_model import BlockConfig, BlockContext

WARM_STEPS, STEPS = 2, 5  # taken before, which also compile and allocate, and measured
MOST_SECONDS = 60.0  # of steps that are measured, if three are
MOST_MICRO_BATCHES = 4  # of a step that is measured
MOST_TABLE_ROWS = 1 << 16  # of each order of n-grams: enough that no cache holds them


def local_device() -> str:
    """Return what runs compute on here: cuda, or cpu."""
    prepare_accelerator()
    return "cpu" if Ranks().device.type == "cpu" else "cuda"


def step_seconds(
    config: RunConfig, processes: list[int], clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Time a step by the number of processes, each on a device of its own; on a CPU they share this machine's.

    ``clock`` gives seconds.

    Raises:
        ConfigError: contexts are shared, or blocks are reversible, which cannot be timed one by one; or the engine
            cannot run here.
    """
    if (config.train.sequence_parallel or 1) > 1:
        rule = "times processes that have contexts of their own, and train.sequence_parallel shares them; give --tflops"
        raise ConfigError(f"--measure: {rule}")
    if config.model.reversible:
        rule = "times blocks one by one, and those of model.reversible run as one; give --tflops"
        raise ConfigError(f"--measure: {rule}")
    prepare_accelerator(config)
    ranks = Ranks()
    # As a run's processes take them, where nothing sets them.
    threads_are_set = ranks.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {count: torch.get_num_threads() if threads_are_set else max(1, cores // count) for count in processes}
    micro_batches = {count: config.train.global_batch // (config.train.micro_batch * count) for count in processes}
    few = _with_fewest_blocks(config, min(max(micro_batches.values()), MOST_MICRO_BATCHES))
    check_engine(few, ranks)
    with process_group(ranks, few.train.timeout_seconds):  # one engine for all: DeepSpeed remembers a process's group
        engine = build_engine(few, ranks)
        try:
            marks = _Marks(engine, clock)
            timed = {number: _timed(few, marks, number) for number in dict.fromkeys(threads.values())}
        finally:
            engine.destroy()
    return {count: timed[threads[count]].step_seconds(config, micro_batches[count]) for count in processes}


@dataclass(slots=True)
class Timed:
    """Seconds of the parts of a step, each the least of several: what others do on the machine is not the run's."""

    blocks: dict[BlockConfig, float]  # forward and backward over a micro-batch, recomputation included
    around: float  # the rest of a micro-batch
    update: float  # the optimiser's, of a network of so many parameters
    parameters: int

    def step_seconds(self, config: RunConfig, micro_batches: int) -> float:
        """Return the seconds of a step of the whole network in one process."""
        blocks = sum(self.blocks[block] for block in config.model.blocks())
        return micro_batches * (blocks + self.around) + self.update * engine_parameters(config.model) / self.parameters


def _timed(few: RunConfig, marks: _Marks, threads: int) -> Timed:
    """Time the parts of a step, over several steps on so many threads."""
    generator = torch.Generator().manual_seed(0)
    shape = few.train.global_batch // few.train.micro_batch, few.train.micro_batch, few.model.context
    kind_of = torch.uint8 if few.model.vocabulary <= 256 else torch.int32
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        steps: list[_Step] = []
        began = time.perf_counter()
        while len(steps) < WARM_STEPS + STEPS:
            if len(steps) >= WARM_STEPS + 3 and time.perf_counter() - began > MOST_SECONDS:
                break
            steps.append(marks.take_step(torch.randint(few.model.vocabulary, shape, generator=generator).to(kind_of)))
    finally:
        torch.set_num_threads(before)
    del steps[:WARM_STEPS]
    blocks: dict[BlockConfig, float] = {}
    for place, kind in enumerate(few.model.blocks()):
        blocks[kind] = min(blocks.get(kind, math.inf), *(step.blocks[place] for step in steps))
    around, update = (min(getattr(step, name) for step in steps) for name in ("around", "update"))
    return Timed(blocks, around, update, engine_parameters(few.model))


def _with_fewest_blocks(config: RunConfig, micro_batches: int) -> RunConfig:
    """Return the run with the first blocks alone that have all kinds, for one process."""
    blocks = config.model.blocks()
    count = next(n for n in range(1, len(blocks) + 1) if len(set(blocks[:n])) == len(set(blocks)))
    order = "".join("s" * (each.mixer is not None) + "f" * (each.feed_forward is not None) for each in blocks[:count])
    content = config.to_json()
    content["model"] |= {"layers": order.count("s"), "order": order}
    if config.model.ngrams is not None:
        content["model"]["ngrams"]["rows"] = min(config.model.ngrams.rows, MOST_TABLE_ROWS)
    content["train"] |= {"global_batch": micro_batches * config.train.micro_batch}
    content["train"] |= {"steps": 1_000, "epochs": None, "warmup_steps": 0}
    return RunConfig.model_validate(content)


@dataclass(slots=True)
class _Step:
    """Seconds of one step."""

    blocks: list[float] = field(default_factory=list)  # of each, over a micro-batch in the mean
    around: float = 0.0
    update: float = 0.0


class _Marks:
    """Steps of an engine, with a mark wherever a block begins or has ended."""

    def __init__(self, engine: Any, clock: Callable[[], float]) -> None:
        self._engine, self._clock = engine, clock
        self._times: list[float] = []
        model = engine.module
        inner: Callable[..., Any] | None = model.activation_checkpoint

        def run(block: Any, h: Tensor, context: BlockContext) -> Any:
            self._begin(h)
            return block(h, context) if inner is None else inner(block, h, context)

        model.activation_checkpoint = run
        model.norm.register_forward_pre_hook(lambda _, args: self._begin(args[0]))

    def _begin(self, h: Tensor) -> None:
        """A block begins, or what is behind the last; and in the backward pass, its work is done."""
        self._now()
        h.register_hook(lambda _: self._now() and None)  # a hook that returns something replaces the gradient

    def _now(self) -> float:
        if self._engine.device.type != "cpu":
            torch.accelerator.synchronize(self._engine.device)
        self._times.append(self._clock())
        return self._times[-1]

    def take_step(self, tokens: Tensor) -> _Step:
        """Take one step over (micro-batches, B, N) tokens on the host, and time its parts."""
        engine, step = self._engine, EngineStep(self._engine)
        count, micro_batches, timed = len(engine.module.blocks), len(tokens), _Step()
        timed.blocks = [0.0] * count
        for number, rows in enumerate(tokens):
            self._times.clear()
            began = self._now()
            output = engine(rows.to(engine.device), return_nats=True, return_extras=True)
            loss = (
                output.rows.mean()
                if output.auxiliary_loss is None
                else output.rows.mean() + output.auxiliary_loss.float()
            )
            if number + 1 < micro_batches:
                step.accumulate(loss)
                ended = self._now()
            else:  # the update begins where the backward pass ends
                ended = self._last_backward(step, loss)
            # Marked: the beginning, each block's and what is behind them, and the same backwards.
            forward, backward = self._times[1 : count + 2], self._times[count + 2 : 2 * count + 3][::-1]
            for place in range(count):
                both = forward[place + 1] - forward[place] + backward[place] - backward[place + 1]
                timed.blocks[place] += both / micro_batches
            timed.around += (ended - began) / micro_batches
        timed.around -= sum(timed.blocks)
        timed.update = self._now() - ended
        return timed

    def _last_backward(self, step: EngineStep, loss: Tensor) -> float:
        """Take the step; return the moment between its backward pass and the update."""
        engine, ended = self._engine, 0.0
        backward = engine.backward

        def then_mark(loss: Tensor, *more: Any, **named: Any) -> Any:
            nonlocal ended
            out = backward(loss, *more, **named)
            ended = self._now()
            return out

        engine.backward = then_mark
        try:
            step.take(loss)
        finally:
            engine.backward = backward
        return ended
