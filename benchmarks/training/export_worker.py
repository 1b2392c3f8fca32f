"""A rank that saves one checkpoint, started by benchmarks/training/export.py: ``export_worker.py RUN.json``.

It takes one real step with the trainer's engine, on few positions, as no parameter depends on their number. It saves
with the trainer's code, which computes the probe on the whole context.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from longstride.data_pipelines.order.lanes import StreamState
from longstride.launcher.checkpoints.saving import Saver
from longstride.launcher.config import RunConfig
from longstride.launcher.engine.build import build_engine
from longstride.launcher.engine.device import prepare_accelerator
from longstride.launcher.engine.step import EngineStep
from longstride.launcher.ranks.processes import Ranks, process_group

POSITIONS = 64  # of the step
TIMEOUT_SECONDS = 3600  # ranks that share few cores wait for each other


def main(arguments: list[str]) -> int:
    """Run the rank and return the exit code."""
    config = RunConfig.model_validate(json.loads(Path(arguments[0]).read_text()))
    ranks = Ranks.from_environment(os.environ)
    prepare_accelerator(config)
    with process_group(ranks, TIMEOUT_SECONDS):
        engine = build_engine(config, ranks)
        saver = Saver(engine, config, ranks, print)
        generator = torch.Generator().manual_seed(ranks.rank)
        tokens = torch.randint(0, 256, (1, POSITIONS), dtype=torch.uint8, generator=generator)
        EngineStep(engine).take(engine(tokens.to(engine.device), return_nats=True).mean())
        stream = StreamState(fingerprint="0" * 64, seed=0, epoch=0, step=1, global_batch=config.train.global_batch)
        saved = saver.save_last(stream, {})
    return 0 if saved else 1


if __name__ == "__main__":
    from longstride.launcher.ranks import leave

    leave(main(sys.argv[1:]))
