"""Cost and gain of `train.compile`: ``python benchmarks/training/compiled.py``.

Compiling: wall seconds until a process has run one compiled step, with an empty cache and with a filled one, each in a
separate process. A step: forward, loss and backward of the demo's size (two layers of 128 channels, a local window of
128, four contexts of 1,024), compiled and not, in turns in one process with one thread. On a CPU seconds are the
thread's own, and the ratio is the median over pairs of turns, so that other programs matter little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor

from benchmarks.machine import about, in_turns
from benchmarks.report import check_output, new_parser, rounded, write_result
from longstride.launcher.engine.device import compile_blocks
from longstride.sparse_model import ModelConfig, SparseTransformer

DTYPES = ("float32", "bfloat16")
CPU = torch.device("cpu")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--context", type=int, default=1_024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--once", choices=DTYPES, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.once is not None:
        print(json.dumps(first_step_seconds(options)))
        return 0
    check_output(parser, options, "compiled")
    sizes = {name: getattr(options, name) for name in ("context", "batch", "width", "repeats")}
    rows = [measure(options, dtype) for dtype in DTYPES]
    print(f"{'type':<10}{'uncompiled':>12}{'compiled':>12}{'ratio':>8}{'cold':>10}{'warm':>10}")
    for row in rows:
        steps = f"{row['seconds']:>10.4f} s{row['compiled_seconds']:>10.4f} s{row['ratio']:>8.3f}"
        print(f"{row['dtype']:<10}{steps}{row['cold_seconds']:>8.1f} s{row['warm_seconds']:>8.1f} s")
    write_result(options, {**about(CPU), **sizes, "steps": rows})
    return 0


def model_of(options: argparse.Namespace, dtype: str) -> tuple[SparseTransformer, Tensor]:
    """Make a model of the demo's size in training, and tokens for it."""
    torch.manual_seed(0)
    config = {
        "context": options.context,
        "layers": 2,
        "heads": 1,
        "width": options.width,
        "attention": {"type": "local", "window": 128},
        "embedding": {"type": "text", "row_width": 32},
    }
    model = SparseTransformer(ModelConfig.model_validate(config)).to(getattr(torch, dtype)).train()
    return model, torch.randint(0, 256, (options.batch, options.context))


def step(model: SparseTransformer, tokens: Tensor) -> None:
    """Run forward and backward."""
    model.zero_grad()
    model(tokens, return_nats=True).mean().backward()


def first_step_seconds(options: argparse.Namespace) -> float:
    """Measure the seconds until this process has run a compiled step."""
    model, tokens = model_of(options, options.once)
    start = time.perf_counter()
    compile_blocks(model)
    step(model, tokens)
    return time.perf_counter() - start


def measure(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Measure the row of a dtype."""
    command = [sys.executable, __file__, "--once", dtype]
    command += [f"--{name}={getattr(options, name)}" for name in ("context", "batch", "width")]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        outputs = [subprocess.check_output(command, env=environment, text=True) for _ in range(2)]
    cold, warm = (float(output.splitlines()[-1]) for output in outputs)  # below DeepSpeed's own lines
    models = {"plain": model_of(options, dtype)[0], "compiled": model_of(options, dtype)[0]}
    _, tokens = model_of(options, dtype)
    compile_blocks(models["compiled"])
    for model in models.values():
        step(model, tokens)
    seconds = in_turns({name: partial(step, model, tokens) for name, model in models.items()}, options.repeats)
    return {
        "dtype": dtype,
        "seconds": rounded(statistics.median(seconds["plain"])),
        "compiled_seconds": rounded(statistics.median(seconds["compiled"])),
        "ratio": rounded(statistics.median(a / b for a, b in zip(seconds["plain"], seconds["compiled"], strict=True))),
        "cold_seconds": rounded(cold),
        "warm_seconds": rounded(warm),
    }


if __name__ == "__main__":
    sys.exit(main())
