"""`longstride evaluate RUN`: bits per byte of a checkpoint over a whole split."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from data_pipelines import EvaluationBatch
from kernels.errors import ConfigError
from launcher.batches import RunData, together
from launcher.checkpoint import Checkpoint, newer_refusals, open_checkpoint
from launcher.config import RunConfig
from launcher.cpu_accelerator import prepare_accelerator
from launcher.engine import quieten
from launcher.export import master_weights
from launcher.manifest import read_checkpoint_config
from launcher.metrics import bits_per_byte
from launcher.processes import Ranks, barrier, gather_float64, process_group, ranks_from_environment
from launcher.reporting import tell_passed_over, told_at_once
from sparse_model import SparseTransformer

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, default=None, metavar="N", help="checkpoint (default: the newest)")
    parser.add_argument("--split", default=None, help="split to score (default: the run's validation split)")
    parser.add_argument("--data", default=None, metavar="DIR|URL", help="data folder (default: the run's)")
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
    batch_size = arguments.batch or config.train.micro_batch
    split = arguments.split or config.data.validation_split
    data = RunData(config, ranks, arguments.data)
    data.evaluation(split=split)  # says what does not fit before a process group is made
    start = time.perf_counter()
    with process_group(ranks, config.train.timeout_seconds):
        model = load_model(checkpoint, config, arguments.precision or checkpoint.manifest.precision, ranks)
        device = next(model.parameters()).device
        with told_at_once(lambda: barrier(ranks)):
            contexts = partial(data.evaluation, split=split, batch_size=batch_size)
            nats, tokens = score(model, contexts, batch_size, ranks, device)
    line = evaluation_line(checkpoint.manifest.step, split, nats, tokens, start)
    if ranks.is_first:
        print(json.dumps(line))
        print(f"{line['bits_per_byte']:.4f} bits per byte on {line['split']}", file=sys.stderr)
    return 0


def evaluate_split(engine: DeepSpeedEngine, config: RunConfig, ranks: Ranks, data: RunData) -> dict[str, Any]:
    """The validation split's line for metrics.jsonl, over as many contexts as the configuration says."""
    start = time.perf_counter()
    engine.eval()
    contexts = partial(data.evaluation, limit=config.train.evaluate_contexts)
    nats, tokens = score(engine, contexts, config.train.micro_batch, ranks, engine.device)
    engine.train()
    return evaluation_line(engine.global_steps, config.data.validation_split, nats, tokens, start)


def evaluation_line(step: int, split: str, nats: float, tokens: int, start: float) -> dict[str, Any]:
    """An evaluation as it is written and printed."""
    return {
        "step": step,
        "split": split,
        "loss_nats": nats / tokens,
        "bits_per_byte": bits_per_byte(nats / tokens),
        "tokens": tokens,
        "seconds": time.perf_counter() - start,
    }


def score(
    model: torch.nn.Module,
    contexts: Callable[[], Iterator[EvaluationBatch]],
    batch_size: int,
    ranks: Ranks,
    device: torch.device,
) -> tuple[float, int]:
    """(nats, bytes) over all ranks' contexts, summed in float64. All ranks must call, with equally many batches."""
    nats = torch.zeros((), dtype=torch.float64)
    num_bytes = 0
    with torch.no_grad():
        for taken in together(contexts, batch_size, ranks, device):
            batch = taken.batch
            each = model(batch.tokens.to(device), return_nats=True).double().cpu()
            nats += each[torch.arange(each.shape[1]) < batch.lengths[:, None]].sum()
            num_bytes += taken.num_bytes
    return gather_float64(nats, ranks, device).sum().item(), num_bytes


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
