"""`longstride plan` compared with real steps on a CPU: ``python benchmarks/training/plan_against_run.py``.

Each run is executed by DeepSpeed's engine in separate processes, on one thread. Measured are the most memory that steps
held beyond what the process had before the engine was built, and the least seconds of a step. They are compared with
the planned peak, and with the seconds that `longstride plan --measure` derives from one block of each kind, in another
process. A third figure is the plan's operations over the rate of a matrix product of the model's shape. Seconds are CPU
time, as other programs may use the cores.

In bf16 a run with experts holds more than planned. oneDNN, which multiplies there, keeps a routine for each new number
of rows, and experts have other numbers of rows in every step. So the memory that a process holds after products of many
different numbers of rows is measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.machine import about, in_turns, resident_bytes
from benchmarks.report import check_output, new_parser, rounded, write_result
from benchmarks.training.divided_memory import MAPPED_BYTES
from benchmarks.training.planned_memory import plan, take_steps
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.engine import device as engine_device
from longstride.launcher.models import DTYPES
from longstride.launcher.planning import measuring
from longstride.launcher.planning.rehearsal import activations

STEPS = 4  # the first also warms up
ROWS = (512, 1_024, 2_048)  # that products have had, from 1 on, when their memory is read
EXPERTS = (
    "model.layers=4", "model.width=256", "model.heads=4", "model.context=4096", "train.activation_checkpointing=false",
    "train.ema_decay=null",
)  # fmt: skip
UNPLANNED = "text with eight experts, bf16"  # for what its products keep
ALL = ("model.backend=cpu", "train.global_batch=2", "train.micro_batch=1")
# Name, preset, and what is changed of it.
RUNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "text strided, fp32",
        "enwik8_strided",
        ("model.layers=6", "model.width=256", "model.context=4096", "model.heads=4", "deepspeed=zero0_fp32",
         "train.activation_checkpointing=false", "train.ema_decay=null"),
    ),
    (
        "text fixed interleaved, bf16, recomputed",
        "enwik8_fixed",
        ("model.layers=12", "model.context=6144", "deepspeed=zero0_bf16",
         'model.attention={"type": "fixed", "stride": 128, "summary": 32, "combine": "interleaved"}'),
    ),
    (
        "pictures strided, fp32, recomputed",
        "cifar10_strided",
        ("model.layers=16", "train.micro_batch=2", "deepspeed=zero1_fp32", "train.activation_checkpointing=true"),
    ),
    (
        "sound with rotary positions and n-gram tables, bf16, Muon",
        "bytes_small",
        ("model.layers=6", "model.width=384", "model.heads=6", "model.context=8192", "model.ngrams.rows=32768",
         'model.attention=[{"type": "local", "window": 256}, {"type": "strided", "stride": 128}]'),
    ),
    (
        "pictures dense, in a palette, bf16",
        "image_gpt_small",
        ("model.layers=6", "train.global_batch=8", "train.micro_batch=4", "deepspeed=zero0_bf16"),
    ),
    ("text with eight experts, fp32", "enwik8_experts", (*EXPERTS, "deepspeed=zero0_fp32")),
    (UNPLANNED, "enwik8_experts", (*EXPERTS, "deepspeed=zero0_bf16")),
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--only", metavar="WORDS", help="runs alone whose names have these words")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("changes", nargs="*", metavar="path.to.key=value", help="of every run")
    options = parser.parse_intermixed_args(arguments)
    if not options.part:
        check_output(parser, options, "plan-against-run")
    if options.part:  # one of the processes
        print(json.dumps(PARTS[options.part](load_config(options.run, options.changes))))
        return 0
    rows = []
    for name, preset, changes in RUNS:
        if options.only and options.only not in name:
            continue
        changed = {change.split("=")[0] for change in changes}
        common = [change for change in ALL if change.split("=")[0] not in changed]
        rows.append(row(name, preset, [*changes, *common, *options.changes]))
        print(line(rows[-1]), flush=True)
    products = [in_a_process("products", "enwik8_experts", [f"deepspeed=zero0_{name}"]) for name in ("fp32", "bf16")]
    result = {"threads": 1, "steps": STEPS, "rows": rows, "products": products}
    write_result(options, {**about(torch.device("cpu")), **result})
    return 0


def row(name: str, preset: str, changes: list[str]) -> dict[str, Any]:
    """Return a run's plan, and the measurements of its steps."""
    config = load_config(preset, changes)
    planned, flops = plan(config, "cpu")
    # In turns, as the machine is quicker at one time than at another.
    before = in_a_process("measure", preset, changes)
    memory, steps = (in_a_process(part, preset, changes) for part in ("memory", "steps"))
    after = in_a_process("measure", preset, changes)
    seconds = (before["seconds"] + after["seconds"]) / 2
    rate = (before["flops_per_second"] + after["flops_per_second"]) / 2
    return {
        "name": name,
        "preset": preset,
        "changes": changes,
        "planned_bytes": planned,
        "held_bytes": memory["peak_bytes"],
        "bytes_ratio": rounded(planned / memory["peak_bytes"]),
        "flops": flops,
        "measured_seconds": rounded(seconds),
        "step_seconds": rounded(min(steps["seconds"][1:])),
        "seconds_ratio": rounded(seconds / min(steps["seconds"][1:])),
        "by_products_seconds": rounded(flops / rate),
    }


def in_a_process(part: str, preset: str, changes: list[str]) -> dict[str, Any]:
    """Run a part of the measurement in a separate process, on one thread."""
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part, "--run", preset, *changes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if part in ("memory", "products"):  # with what is freed handed back at once, or it would count as held
        environment["MALLOC_MMAP_THRESHOLD_"] = str(MAPPED_BYTES)
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def hold_steps(config: RunConfig) -> dict[str, Any]:
    """Measure the most memory that steps hold beyond that of a process that has planned them, with its libraries
    loaded.
    """
    activations(config, config.train.activation_checkpointing, "cpu")
    engine_device._keep_freed_memory = lambda: None
    return time_steps(config)


def time_steps(config: RunConfig) -> dict[str, Any]:
    """Measure the processor seconds of each of some steps, and the most memory that they hold."""
    return take_steps(config, STEPS, time.process_time)


def time_blocks(config: RunConfig) -> dict[str, Any]:
    """Measure the seconds of a step by one block of each kind, and the rate of a large matrix product."""
    torch.set_num_threads(1)
    step_seconds = measuring.step_seconds(config, [1], time.process_time)[1]
    rows, width = config.train.micro_batch * config.model.context, config.model.width
    dtype = DTYPES[config.precision]
    a, b = torch.randn(rows, width, dtype=dtype), torch.randn(width, config.model.feed_forward_width, dtype=dtype)
    (taken,) = in_turns({"product": lambda: a @ b}, 7).values()
    return {"seconds": step_seconds, "flops_per_second": 2 * rows * width * b.shape[1] / min(taken[2:])}


def keep_products(config: RunConfig) -> dict[str, Any]:
    """Measure the memory that a process keeps after products of many numbers of rows, in the run's precision."""
    dtype, width, extra_bytes = DTYPES[config.precision], config.model.width, []
    rows, weights = torch.ones(max(ROWS), width, dtype=dtype), torch.ones(width, width, dtype=dtype)
    rows[:1] @ weights
    before = resident_bytes("VmRSS")
    for count in range(1, max(ROWS) + 1):
        rows[:count] @ weights
        if count in ROWS:
            extra_bytes.append(resident_bytes("VmRSS") - before)
    return {"precision": config.precision, "numbers_of_rows": ROWS, "kept_bytes": extra_bytes}


PARTS = {"memory": hold_steps, "products": keep_products, "steps": time_steps, "measure": time_blocks}


def line(row: dict[str, Any]) -> str:
    """Format a run."""
    memory = f"planned {row['planned_bytes'] / 2**20:.0f} MiB, held {row['held_bytes'] / 2**20:.0f}"
    return (
        f"{row['name']}: {memory} ({row['bytes_ratio']:.2f}); {row['measured_seconds']:.2f} s by its blocks, "
        f"{row['step_seconds']:.2f} s a step ({row['seconds_ratio']:.2f}); by matrix products "
        f"{row['by_products_seconds']:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
