"""Steps of a run compared with its plan: ``python -m benchmarks.training.planned_memory RUN [path=value …]``.

DeepSpeed's engine takes a few steps of the run on this machine's device, in one process, on batches of noise, with the
training loop's own functions. The most memory that it held is compared with the peak of `longstride plan` for the run's
ZeRO stage, and a step's seconds with its operations. On a CPU the memory is what the system gave the process for it.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import about, resident_bytes, synchronize
from benchmarks.report import check_output, new_parser, positive, write_json
from longstride.data_pipelines.order.lanes import StreamState
from longstride.data_pipelines.order.stream import Batch
from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.data.run_data import global_batches
from longstride.launcher.engine.build import build_engine, check_engine
from longstride.launcher.engine.device import prepare_accelerator
from longstride.launcher.planning.costs import engine_parameters, states, step_flops, work
from longstride.launcher.planning.rehearsal import activations
from longstride.launcher.ranks.processes import Ranks, process_group
from longstride.launcher.training.guards import Guards
from longstride.launcher.training.loop import train_step


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("run", help="a run's JSON, or the name of one in ds_configs/experiments")
    parser.add_argument("changes", nargs="*", metavar="path.to.key=value", help="of the run")
    parser.add_argument("--steps", type=positive(int), default=3, help="the first also compiles")
    options = parser.parse_intermixed_args(arguments)
    options.device = str(Ranks().device)
    check_output(parser, options, "planned-memory")
    try:
        config = load_config(options.run, options.changes)
        config.check_world_size(1)
    except (ConfigError, OSError) as error:
        print(f"planned_memory: error: {error}", file=sys.stderr)
        return 2
    device = Ranks().device
    planned, flops = plan(config, "cpu" if device.type == "cpu" else "cuda")
    result = take_steps(config, options.steps)
    print(
        f"{options.run}: planned {planned / 2**30:.2f} GiB, costs {result['peak_bytes'] / 2**30:.2f}; "
        f"{min(result['seconds']):.1f} s a step, {flops / min(result['seconds']) / 1e12:.1f} TFLOP/s"
    )
    row = {"run": options.run, "changes": options.changes, "planned_bytes": planned, "flops": flops, **result}
    write_json(options.output, {**about(device), **row})
    return 0


def plan(config: RunConfig, kind: str) -> tuple[int, int]:
    """Return the planned peak of one process in bytes, and the operations of its step."""
    costs = states(engine_parameters(config.model), config, 1, config.zero_stage, kind)
    peak = costs.peak(activations(config, config.train.activation_checkpointing, kind))
    return peak, sum(step_flops(work(config.model, config.train.micro_batch), config).values())


def take_steps(config: RunConfig, steps: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Measure the most memory that some steps hold, and the seconds of each.

    On a CPU, what the process held before the engine was built does not count.
    """
    ranks, train = Ranks(), config.train
    prepare_accelerator(config)
    check_engine(config, ranks)
    with process_group(ranks, train.timeout_seconds):
        before = resident_bytes("VmRSS")
        engine = build_engine(config, ranks)
        batches = global_batches(lambda: noise(config, train.global_batch), train.global_batch, ranks, engine.device)
        on_card = engine.device.type != "cpu"
        if on_card:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        seconds, losses, guards = [], [], Guards(train.guards, None)
        for _ in range(steps):
            began = clock()
            line = train_step(engine, next(batches), config.stages()[0], ranks, guards)
            losses.append(line["loss_nats"])
            synchronize(engine.device)
            seconds.append(clock() - began)
        peak = torch.cuda.max_memory_allocated() if on_card else resident_bytes("VmHWM") - before
        engine.destroy()
    return {"peak_bytes": peak, "seconds": seconds, "loss_nats": losses}


def noise(config: RunConfig, rows: int) -> Iterator[Batch]:
    """Yield batches of ``rows`` whole contexts of random bytes."""
    generator, context = torch.Generator().manual_seed(0), config.model.context
    for number in itertools.count(1):
        yield Batch(
            tokens=torch.randint(256, (rows, context), dtype=torch.uint8, generator=generator),
            lengths=torch.full((rows,), context),
            sample_ids=torch.arange(rows),
            state=StreamState(
                fingerprint="noise", seed=0, epoch=0, step=number, global_batch=config.train.global_batch
            ),
        )


if __name__ == "__main__":
    sys.exit(main())
