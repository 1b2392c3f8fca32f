"""Estimate the time of a step on this machine from one block of each kind, with the run's own engine.

The engine is built with the fewest blocks that have all kinds of the network, and takes a few steps on random bytes.
The begin and the end of every block, forward and backward, are timed. A step of the whole network is the sum of its
blocks by kind, the time around the blocks (embedding, logits, loss) for each micro-batch, and the optimiser's update
in proportion to the parameters. Importing this module imports DeepSpeed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig
from longstride.launcher.engine import EngineStep, build_engine, check_engine, prepare_accelerator
from longstride.launcher.planning.costs import engine_parameters
from longstride.launcher.ranks import Ranks, process_group
from longstride.sparse_model import BlockConfig

WARM_STEPS, STEPS = 2, 5  # unmeasured steps, which also compile and allocate, and measured ones
MOST_SECONDS = 60.0  # of measured steps, once there are three
MOST_MICRO_BATCHES = 4  # of a measured step
MOST_TABLE_ROWS = 1 << 16  # of each order of n-grams: more than fit in caches


def local_device() -> str:
    """Return the device of runs on this machine: cuda or cpu."""
    prepare_accelerator()
    return "cpu" if Ranks().device.type == "cpu" else "cuda"


def step_seconds(
    config: RunConfig, processes: list[int], clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Estimate the seconds of a step for each number of processes.

    Each process has a GPU of its own; on CPUs they share this machine's cores. ``clock`` returns seconds.

    Raises:
        ConfigError: contexts are shared or blocks are reversible, which cannot be timed one by one; or the engine
            cannot run on this machine.
    """
    if (config.train.sequence_parallel or 1) > 1:
        rule = "cannot time processes that share contexts by train.sequence_parallel; give --tflops"
        raise ConfigError(f"--measure: {rule}")
    if config.train.expert_parallel is not None:
        rule = "cannot time processes that divide experts by train.expert_parallel; give --tflops"
        raise ConfigError(f"--measure: {rule}")
    if config.model.reversible:
        rule = "cannot time blocks of model.reversible one by one; give --tflops"
        raise ConfigError(f"--measure: {rule}")
    prepare_accelerator(config)
    ranks = Ranks()
    # The number of threads that a run's processes use if nothing sets it.
    threads_are_set = ranks.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {count: torch.get_num_threads() if threads_are_set else max(1, cores // count) for count in processes}
    micro_batches = {count: config.train.global_batch // (config.train.micro_batch * count) for count in processes}
    small = _with_fewest_blocks(config, min(max(micro_batches.values()), MOST_MICRO_BATCHES))
    check_engine(small, ranks)
    # One engine for all: DeepSpeed keeps the first group of a process.
    with process_group(ranks, small.train.timeout_seconds):
        engine = build_engine(small, ranks)
        try:
            timer = _StepTimer(engine, clock)
            times = {number: _time_parts(small, timer, number) for number in dict.fromkeys(threads.values())}
        finally:
            engine.destroy()
    return {count: times[threads[count]].step_seconds(config, micro_batches[count]) for count in processes}


@dataclass(slots=True)
class Timed:
    """The seconds of the parts of a step; each is a minimum, to exclude other load of the machine."""

    blocks: dict[BlockConfig, float]  # forward and backward over a micro-batch, recomputation included
    around: float  # in a micro-batch, outside of the blocks
    update: float  # of the optimiser, for a network of ``parameters``
    parameters: int

    def step_seconds(self, config: RunConfig, micro_batches: int) -> float:
        """Return the seconds of a step of the whole network in one process."""
        blocks = sum(self.blocks[block] for block in config.model.blocks())
        return micro_batches * (blocks + self.around) + self.update * engine_parameters(config.model) / self.parameters


def _time_parts(config: RunConfig, timer: _StepTimer, threads: int) -> Timed:
    """Time the parts of a step over several steps, with a number of threads."""
    generator = torch.Generator().manual_seed(0)
    shape = config.train.global_batch // config.train.micro_batch, config.train.micro_batch, config.model.context
    dtype = torch.uint8 if config.model.vocabulary <= 256 else torch.int32
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        steps: list[tuple[list[float], float, float]] = []
        begin = time.perf_counter()
        while len(steps) < WARM_STEPS + STEPS:
            if len(steps) >= WARM_STEPS + 3 and time.perf_counter() - begin > MOST_SECONDS:
                break
            steps.append(timer.take_step(torch.randint(config.model.vocabulary, shape, generator=generator).to(dtype)))
    finally:
        torch.set_num_threads(before)
    del steps[:WARM_STEPS]
    blocks: dict[BlockConfig, float] = {}
    for place, kind in enumerate(config.model.blocks()):
        blocks[kind] = min(blocks.get(kind, math.inf), *(seconds[place] for seconds, _, _ in steps))
    _, around, update = zip(*steps, strict=True)
    return Timed(blocks, min(around), min(update), engine_parameters(config.model))


def _with_fewest_blocks(config: RunConfig, micro_batches: int) -> RunConfig:
    """Shrink a run to the first blocks that have all kinds, and to one process."""
    blocks = config.model.blocks()
    count = next(n for n in range(1, len(blocks) + 1) if len(set(blocks[:n])) == len(set(blocks)))
    order = "".join("s" * (kind.mixer is not None) + "f" * (kind.feed_forward is not None) for kind in blocks[:count])
    content = config.to_json()
    content["model"] |= {"layers": order.count("s"), "order": order}
    if config.model.ngrams is not None:
        content["model"]["ngrams"]["rows"] = min(config.model.ngrams.rows, MOST_TABLE_ROWS)
    content["train"] |= {"global_batch": micro_batches * config.train.micro_batch}
    content["train"] |= {"steps": 1_000, "epochs": None, "warmup_steps": 0}
    return RunConfig.model_validate(content)


class _StepTimer:
    """Takes steps of an engine, and records the time whenever a block begins or ends."""

    def __init__(self, engine: Any, clock: Callable[[], float]) -> None:
        self._engine, self._clock = engine, clock
        self._times: list[float] = []
        model, backward = engine.module, engine.backward
        inner: Callable[..., Any] | None = model.activation_checkpoint

        def run(block: Any, h: Tensor, *inputs: Any) -> Any:
            self._record_input(h)
            return block(h, *inputs) if inner is None else inner(block, h, *inputs)

        def backward_and_record(*arguments: Any, **options: Any) -> Any:
            out = backward(*arguments, **options)
            self._record()
            return out

        model.activation_checkpoint = run
        model.norm.register_forward_pre_hook(lambda _, args: self._record_input(args[0]))
        engine.backward = backward_and_record

    def _record_input(self, h: Tensor) -> None:
        """Record when a block, or the final norm, takes its input, and when the input has its gradient."""
        self._record()
        h.register_hook(lambda _: self._record())  # its None leaves the gradient as it is

    def _record(self) -> None:
        if self._engine.device.type != "cpu":
            torch.accelerator.synchronize(self._engine.device)
        self._times.append(self._clock())

    def take_step(self, tokens: Tensor) -> tuple[list[float], float, float]:
        """Take one step over (micro-batches, B, N) tokens on the host.

        Returns:
            The seconds of each block and those around the blocks, in the mean of the micro-batches, and of the update.
        """
        engine, step = self._engine, EngineStep(self._engine)
        count, micro_batches, around = len(engine.module.blocks), len(tokens), 0.0
        blocks, model = [0.0] * count, engine.module.config
        for number, rows in enumerate(tokens, 1):
            lengths, numbers = torch.full(rows.shape[:1], rows.shape[1]), torch.arange(len(rows))
            corrupted = model.objective.corrupt(rows, lengths, numbers, number, model.vocabulary)
            extra = {} if corrupted is None else corrupted._asdict()
            extra = {name: values.to(engine.device) for name, values in extra.items()}
            self._times.clear()
            self._record()
            output = engine(rows.to(engine.device), return_nats=True, return_extras=True, **extra)
            loss = output.rows.mean()
            if output.auxiliary_loss is not None:
                loss = loss + output.auxiliary_loss.float()
            (step.accumulate if number < micro_batches else step.take)(loss)
            # Recorded: the begin, the input of each block and of the norm, these inputs backwards, and the end.
            begin, *forward = self._times[: count + 2]
            *backward, end = self._times[count + 2 :]
            backward.reverse()
            for place in range(count):
                both = forward[place + 1] - forward[place] + backward[place] - backward[place + 1]
                blocks[place] += both / micro_batches
            around += (end - begin) / micro_batches
        self._record()
        return blocks, around - sum(blocks), self._times[-1] - end
