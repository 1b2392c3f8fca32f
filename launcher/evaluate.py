"""`longstride evaluate RUN`: bits per byte of a checkpoint over a whole split."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from data_pipelines import evaluation_contexts
from kernels.errors import ConfigError
from launcher.checkpoint import Checkpoint, newer_refusals, open_checkpoint
from launcher.config import RunConfig
from launcher.cpu_accelerator import prepare_accelerator
from launcher.engine import quieten
from launcher.export import master_weights
from launcher.loop import score
from launcher.manifest import read_checkpoint_config
from launcher.metrics import bits_per_byte
from launcher.processes import Ranks, process_group, ranks_from_environment
from launcher.reporting import tell_passed_over, told_at_once
from sparse_model import SparseTransformer

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, default=None, metavar="N", help="checkpoint (default: the newest)")
    parser.add_argument("--split", default=None, help="split to score (default: the run's validation split)")
    parser.add_argument("--data", type=Path, default=None, metavar="DIR", help="data folder (default: the run's)")
    parser.add_argument("--batch", type=int, default=None, help="contexts at once (default: the run's micro_batch)")
    parser.add_argument("--precision", choices=sorted(_DTYPES), default=None, help="default: the run's")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb, alone or as one rank under a launcher; prints one JSON line on rank 0."""
    if arguments.batch is not None and arguments.batch < 1:
        raise ConfigError(f"--batch={arguments.batch}: must be at least 1")
    ranks = ranks_from_environment(os.environ)
    checkpoint = open_checkpoint(arguments.run, arguments.step)
    if arguments.step is None and ranks.is_first:
        tell_passed_over(newer_refusals(arguments.run, checkpoint))
    config = read_checkpoint_config(checkpoint.folder)
    prepare_accelerator()
    quieten(config)
    contexts = evaluation_contexts(
        arguments.data or Path(config.data.path),
        arguments.split or config.data.validation_split,
        context=config.model.context,
        batch_size=arguments.batch or config.train.micro_batch,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    start = time.perf_counter()
    with process_group(ranks, config.train.timeout_seconds):
        model = load_model(checkpoint, config, arguments.precision or checkpoint.manifest.precision, ranks)
        with told_at_once():
            nats, tokens = score(model, contexts, ranks, next(model.parameters()).device)
    line: dict[str, Any] = {
        "step": checkpoint.manifest.step,
        "split": arguments.split or config.data.validation_split,
        "loss_nats": nats / tokens,
        "bits_per_byte": bits_per_byte(nats / tokens),
        "tokens": tokens,
        "seconds": time.perf_counter() - start,
    }
    if ranks.is_first:
        print(json.dumps(line))
        print(f"{line['bits_per_byte']:.4f} bits per byte on {line['split']}", file=sys.stderr)
    return 0


def load_model(checkpoint: Checkpoint, config: RunConfig, precision: str, ranks: Ranks) -> SparseTransformer:
    """The model of a checkpoint on this rank's device, for scoring.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    from deepspeed.accelerator import get_accelerator

    model = SparseTransformer(config.model)
    model.load_state_dict(master_weights(checkpoint))
    for parameter in model.parameters():  # parameters alone, as DeepSpeed casts them
        parameter.data = parameter.data.to(_DTYPES[precision])
    return model.to(get_accelerator().device_name(ranks.local_rank)).eval()
