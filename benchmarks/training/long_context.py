"""A training step over up to a million bytes: ``python benchmarks/training/long_context.py``.

The network of ``ds_configs/experiments/music_1m.json`` trains with ``longstride train`` itself, each context in a
separate process: DeepSpeed in fp32, one context a step, activation checkpointing, the stride the context's root.
Seconds are those of metrics.jsonl (the shortest step), memory is the process's peak. The sound is synthetic: some
seconds of decaying strings in 8-bit mu-law.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import wave
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

from benchmarks.machine import about
from benchmarks.report import new_parser, parse, write_result
from longstride.data_pipelines.building.build import build
from longstride.launcher.output import metrics_file
from longstride.sparse_model import ModelConfig, SparseTransformer

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = ROOT / "ds_configs" / "experiments" / "music_1m.json"
CONTEXTS = (65_536, 262_144, 1_048_576)
WARM_CONTEXT = 262_144  # up to here a first step is taken, and not counted
RATE = 12_000  # frames a second of the sound


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = read_options(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        data = make_sound(Path(name), max(options.contexts))
        rows = []
        for context in options.contexts:
            rows.append(measure(context, data, Path(name), options.changes))
            print(line(rows[-1]), flush=True)
    result = {**about(torch.device("cpu")), "experiment": EXPERIMENT.stem, "changes": options.changes, "rows": rows}
    write_result(options, result)
    return 0


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="squares of whole numbers")
    parser.add_argument("--folder", type=Path, default=None, help="for data and runs (default: the temporary one)")
    parser.add_argument("changes", nargs="*", metavar="path.to.key=value", help="of the experiment")
    options = parse(parser, arguments, "long-context")
    for context in options.contexts:
        if math.isqrt(context) ** 2 != context:
            parser.error(f"--contexts={context}: must be a square; nearest {round(math.sqrt(context)) ** 2}")
    return options


def make_sound(folder: Path, context: int) -> Path:
    """Build a data folder with a sound longer than a context for training, and a short one for evaluation."""
    source, random = folder / "source", np.random.default_rng(0)
    source.mkdir()
    for name, frames in (("train", context + 4096), ("validation", 4096)):
        notes = [pluck(random, min(frames, RATE)) for _ in range(-(-frames // RATE) + 1)]
        sound = (np.concatenate(notes)[:frames] * 20_000).astype("<i2")
        with wave.open(str(source / f"{name}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(sound.tobytes())
    # Which of the two files is held out is a hash of the seed: the first seed that holds out the short one.
    for seed in range(64):
        manifest = build([source], folder / f"data-{seed}", modality="audio", validation_fraction=0.01, seed=seed)
        if manifest.splits["validation"].content_bytes == 4096:
            return folder / f"data-{seed}"
    raise AssertionError("no seed of 64 holds out the short sound")


def pluck(random: np.random.Generator, frames: int) -> np.ndarray:
    """Synthesise a string's decaying tone with its overtones: (frames,) from -1 to 1."""
    time, pitch = np.arange(frames) / RATE, 110 * 2 ** (random.integers(24) / 12)
    return sum(np.sin(2 * np.pi * pitch * k * time) * np.exp(-3 * k * time) / 2**k for k in range(1, 5))


def measure(context: int, data: Path, folder: Path, changes: list[str]) -> dict[str, Any]:
    """Measure one context's training step in a separate process."""
    stride, run = math.isqrt(context), folder / f"run-{context}"
    overrides = [
        f"model.context={context}",
        f"model.attention.stride={stride}",
        f"model.embedding.row_width={stride}",
        "train.global_batch=1",
        "train.micro_batch=1",
        f"train.steps={2 if context <= WARM_CONTEXT else 1}",
        "train.warmup_steps=0",
        "train.evaluate_contexts=1",
        "deepspeed=zero1_fp32",
        *changes,
    ]
    command = [sys.executable, str(ROOT / "launcher" / "train.py"), "--config", str(EXPERIMENT)]
    command += [*overrides, f"data.path={data}", f"train.output={run}"]
    with (folder / f"{context}.log").open("w+") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, usage = os.wait4(started.pid, 0)
        started.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        assert started.returncode == 0, log.read()
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    model = ModelConfig.model_validate(json.loads((run / "config.json").read_text())["model"])
    steps, scored = ([entry for entry in lines if metrics_file.is_step(entry) == is_step] for is_step in (True, False))
    return {
        "context": context,
        "stride": stride,
        "parameters": SparseTransformer.num_parameters(model),
        "step_seconds": min(entry["seconds"] for entry in steps),
        "evaluation_seconds": scored[-1]["seconds"],
        "peak_bytes": usage.ru_maxrss * 1024,
        "bits_per_byte": steps[0]["bits_per_byte"],
    }


def line(row: dict[str, Any]) -> str:
    """Format a measurement."""
    return (
        f"{row['context']:>9,} bytes, l = {row['stride']:>5,}: {row['step_seconds']:8.1f} s a step, at most "
        f"{row['peak_bytes'] / 2**30:5.2f} GiB, {row['bits_per_byte']:.4f} bits per byte"
    )


if __name__ == "__main__":
    sys.exit(main())
