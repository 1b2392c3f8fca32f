"""`longstride train --dry-run`: the start of a run and a step of its first process, without the other processes.

One process stands for the first of W with torch's fake process group, which sends nothing and waits for nobody. So a
configuration for a cluster is tried on one machine: the DeepSpeed section, the data, the checkpoint to resume, the
first weights, the kernels and the memory of one process. Nothing is written. Importing this module imports DeepSpeed.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

import torch

from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import Checkpoint, first_undamaged
from longstride.launcher.config import RunConfig, Stage
from longstride.launcher.data import RunSetup, WeightSource, count_targets
from longstride.launcher.engine import build_engine
from longstride.launcher.output import counting, exit_codes, metrics_file, print_if_slow, say
from longstride.launcher.planning.new import free_bytes
from longstride.launcher.planning.plan import describe, make_plan, peak_bytes
from longstride.launcher.ranks import FakeRanks, Ranks, check_unlocked, process_group
from longstride.launcher.training import (
    Guards,
    InitialWeights,
    agree_on_initial,
    choose_start,
    compile_step,
    open_initial,
    set_up,
    train_step,
)

_GIB = 2**30


def start(config: RunConfig, processes: int, resume: str, source: WeightSource | None, *, trusted: bool) -> int:
    """Try the start of a run, and print its plan; return the exit code.

    Args:
        processes: the number of processes of the run.
        resume: the value of --resume.
        source: source of the first weights.
        trusted: whether checkpoints may hold more than tensors and numbers.

    Raises:
        ConfigError, DataError, AgreedError: the run would not start.
    """
    config = config.without_monitors()
    ranks = FakeRanks(world_size=processes, sequence_parallel=config.train.sequence_parallel or 1)
    run = replace(set_up(config, ranks, resume), trusted=trusted, source=source)
    check_unlocked(run.folder)
    offered = choose_start(run)
    with print_if_slow("verifying the checkpoint"):
        checkpoint, damaged = first_undamaged(run.folder, offered.candidates, Ranks())
    damaged = [*offered.refused, *damaged]
    if checkpoint is None and offered.candidates:
        raise ConfigError("no checkpoint is complete:", *damaged)
    for line in damaged:
        say(f"would be skipped: {line}")
    initial = open_initial(run, checkpoint)
    plan = make_plan(run.config, [processes], device=ranks.device.type)
    print(describe(plan), flush=True)
    count, device = counting.processes(processes), ranks.device.type
    say(f"dry run: this process acts as the first of {count}, on {device}; it writes nothing")
    if checkpoint is not None:
        say(f"the run would continue from {checkpoint.folder}, which is complete; this step uses fresh weights")
    needed = peak_bytes(plan)
    free = free_bytes() if device == "cpu" else torch.cuda.mem_get_info(ranks.device)[0]
    if needed > free:
        rule = f"it takes {needed / _GIB:.1f} GiB, and {free / _GIB:.1f} are free here; everything else is ready"
        say(f"no step is taken: {rule}")
        return exit_codes.DONE
    return _take_step(run, checkpoint, initial)


def _take_step(run: RunSetup, checkpoint: Checkpoint | None, initial: InitialWeights | None) -> int:
    """Build the engine, read the first batch after a checkpoint, and take a step with one micro-batch of it."""
    step, state = (checkpoint.manifest.step, checkpoint.stream) if checkpoint else (0, None)
    config, ranks = run.config, run.ranks
    stage = Stage.after(step, config.stages())
    size = stage.rows
    train = config.train.model_copy(update={"global_batch": config.train.micro_batch * ranks.data_world_size})
    with process_group(ranks, config.train.timeout_seconds) as watchdog:
        initial = agree_on_initial(run, initial, None, watchdog.hosts)
        with print_if_slow("compiling kernels"):
            compile_step(run)
        with print_if_slow("building the engine"):
            fill = None if initial is None else initial.fill
            engine = build_engine(config.model_copy(update={"train": train}), ranks, fill)
        for line in initial.lines() if initial is not None else ():
            say(line)
        with closing(run.data.batches(state, step, engine.device, run.stop)) as batches:
            batch = next(batches)
        part = batch.part
        for substitution in batch.substitutions:
            say(str(substitution))
        names = ("tokens", "lengths", "sample_ids", "begins", "separators", "inputs", "predicted", "labels")
        rows = {name: value[:size] for name in names if (value := getattr(part, name)) is not None}
        first = replace(part, **rows)
        counts = (count_targets(first), int(first.content.sum()))
        tokens, content = (count * ranks.data_world_size for count in counts)
        batch = replace(batch, part=first, num_tokens=tokens, content=content)
        guards, begin = Guards(config.train.guards), time.perf_counter()
        engine.train()
        with print_if_slow("taking a step"):
            engine.module.use_attention(stage.attention)
            metrics = train_step(engine, batch, stage, ranks, guards, unit=run.data.unit)
        seconds = time.perf_counter() - begin
        engine.destroy()
    unit, bits = metrics_file.bits_of(metrics)
    if guards.verdict is not None:
        say(f"the first step would not pass the guards: {guards.verdict}")
        return exit_codes.GUARDED
    # Without the weights and rows of the other processes the loss means nothing.
    groups = ranks.sequence_parallel, config.train.expert_parallel or 1
    loss = f", {bits:.4f} {unit}" if bits is not None and config.zero_stage < 3 and groups == (1, 1) else ""
    count = len(part.tokens)
    say(f"read the first batch; this process has {count} context{'s' if count > 1 else ''}")
    time_taken = f"{seconds:.1f} s, with the preparations of a first step"
    say(f"took a step with one micro-batch of it, of {size}: {time_taken}{loss}")
    say("the same command without --dry-run starts the run")
    return exit_codes.DONE
