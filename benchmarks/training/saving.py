"""Seconds by which a checkpoint delays training, written at once and in the background.

``python benchmarks/training/saving.py``: one process trains a model with DeepSpeed's engine and saves with the
trainer's code. The two ways take turns within one run: some steps alone, then a save and the same number of steps. The
cost of a save is the difference, whether the loop waits or the writing slows the steps down.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.machine import about
from benchmarks.report import markdown, new_parser, parse, write_result
from longstride.data_pipelines.order.lanes import StreamState
from longstride.data_pipelines.order.stream import Batch
from longstride.launcher.checkpoints.saving import Saver
from longstride.launcher.config import RunConfig
from longstride.launcher.config.json_file import load_json_object
from longstride.launcher.config.loading import DEEPSPEED_CONFIGS
from longstride.launcher.engine.build import build_engine
from longstride.launcher.engine.device import prepare_accelerator
from longstride.launcher.engine.step import EngineStep
from longstride.launcher.ranks.processes import Ranks, process_group
from longstride.launcher.training.loop import score
from longstride.launcher.training.profile import device_seconds

WAYS = {"at once": False, "in the background": True}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int, default=1_024)
    parser.add_argument("--deepspeed", default="zero1_bf16", help="a file of ds_configs/ (default: zero1_bf16)")
    parser.add_argument("--steps", type=int, default=6, help="behind each save (default: 6)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints go for the while (default: /tmp)")
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    options = parse(parser, arguments, "saving")
    prepare_accelerator()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, process_group(Ranks(), 600):
        result = measure(options, Path(folder))
    print_found(result)
    write_result(options, result)
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure each way's seconds."""
    (folder / "checkpoints").mkdir()
    config = configuration(options, folder)
    prepare_accelerator(config)
    engine = build_engine(config, Ranks())
    savers = {name: Saver(engine, in_background(config, way), Ranks(), print) for name, way in WAYS.items()}
    result: dict[str, Any] = {
        **about(engine.device),
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        **{name: getattr(options, name) for name in ("layers", "width", "context", "deepspeed", "steps", "repeats")},
        "steps_alone_seconds": [],
        "ways": {name: {"still_seconds": [], "longer_seconds": []} for name in WAYS},
    }
    take_steps(engine, config, 2, None)  # whatever is made at the first
    for _ in range(options.repeats):
        for name, saver in savers.items():
            alone, _ = take_steps(engine, config, options.steps, None)
            saved, still = take_steps(engine, config, options.steps, saver)
            result["steps_alone_seconds"].append(alone)
            result["ways"][name]["still_seconds"].append(still)
            result["ways"][name]["longer_seconds"].append(saved - alone)
    (newest,) = (folder / "checkpoints").glob("step-*")
    result["checkpoint_bytes"] = sum(path.stat().st_size for path in newest.rglob("*"))
    engine.destroy()
    return result


def configuration(options: argparse.Namespace, folder: Path) -> RunConfig:
    """Return a run that reads no data: its steps are taken here."""
    content = {
        "model": {
            "context": options.context,
            "layers": options.layers,
            "heads": 8,
            "width": options.width,
            "attention": {"type": "fixed", "stride": 32, "summary": 4},
            "embedding": {"type": "text", "row_width": 32},
        },
        "data": {"path": "none"},
        "train": {
            "output": str(folder),
            "steps": 10**6,
            "global_batch": 1,
            "micro_batch": 1,
            "learning_rate": 1e-4,
            "keep_last": 1,
        },
        "deepspeed": load_json_object(DEEPSPEED_CONFIGS / f"{options.deepspeed}.json"),
    }
    return RunConfig.model_validate(content)


def in_background(config: RunConfig, is_so: bool) -> RunConfig:
    """Return the same run with one way of saving."""
    return config.model_copy(update={"train": config.train.model_copy(update={"checkpoint_in_background": is_so})})


def take_steps(engine: Any, config: RunConfig, steps: int, saver: Saver | None) -> tuple[float, float]:
    """Measure some steps, after a save by ``saver`` if it is not None.

    Returns:
        The seconds of all, and the seconds in which only the saver worked.
    """
    context, still = config.model.context, 0.0
    state = StreamState(fingerprint="0" * 64, seed=0, epoch=0, step=engine.global_steps, global_batch=1)
    tokens, lengths = torch.randint(0, 256, (1, context), dtype=torch.uint8), torch.tensor([context])
    batch = Batch(tokens=tokens, lengths=lengths, sample_ids=torch.zeros(1, dtype=torch.int64), state=state)
    start = device_seconds(engine.device)
    if saver is not None:
        saver.save(state, {})
        still += device_seconds(engine.device) - start
    for step in range(steps):
        EngineStep(engine).take(score(engine, batch, slice(None)).loss / context)
        if saver is not None:
            before = device_seconds(engine.device)
            saver.finish() if step == steps - 1 else saver.poll()
            still += time.perf_counter() - before
    return device_seconds(engine.device) - start, still


def print_found(result: dict[str, Any]) -> None:
    """Print a table."""
    alone = statistics.median(result["steps_alone_seconds"])
    size = result["checkpoint_bytes"] / 1e6
    print(f"{result['parameters']:,} parameters, {result['deepspeed']}: {size:,.0f} MB a checkpoint", end=" ")
    print(f"on {result['device']}")
    print(f"{result['steps']} steps alone: {alone:.2f} s\n")
    rows = [
        [name, *(f"{statistics.median(way[key]):.2f}" for key in ("still_seconds", "longer_seconds"))]
        for name, way in result["ways"].items()
    ]
    print(markdown(["written", "the loop stands still, s", "steps and save take longer, s"], rows), end="")


if __name__ == "__main__":
    sys.exit(main())
