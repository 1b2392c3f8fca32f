"""`longstride evaluate RUN`: bits per byte of a checkpoint over a whole split."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.order import EvaluationBatch
from longstride.kernels.errors import ConfigError
from longstride.launcher.checkpoints import (
    Checkpoint,
    agreed_checkpoints,
    newer_refusals,
    open_checkpoint,
    read_checkpoint_config,
)
from longstride.launcher.config import RunConfig, add_trust_argument
from longstride.launcher.data import RunData, together
from longstride.launcher.engine import add_weights_argument, compile_kernels, prepare_accelerator, quieten
from longstride.launcher.evaluation.by_position import bin_numbers, check_positions, position_edges, write_positions
from longstride.launcher.evaluation.exact_sums import ExactSums
from longstride.launcher.exports import master_weights
from longstride.launcher.output import bits_per_byte, tell_passed_over, told_at_once
from longstride.launcher.ranks import Ranks, adopt_place, barrier, process_group, ranks_from_environment
from longstride.launcher.stops import StopFlag
from longstride.sparse_model import SparseTransformer

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MOST_THREADS = 8
_MOST_ROWS = 1 << 19  # positions in work at a time: each thread holds the activations of a batch of its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, default=None, metavar="N", help="checkpoint (default: the newest)")
    parser.add_argument("--split", default=None, help="split to score (default: the run's validation split)")
    parser.add_argument("--data", default=None, metavar="DIR|URL", help="data folder (default: the run's)")
    parser.add_argument("--batch", type=int, default=None, help="contexts at once (default: the run's micro_batch)")
    parser.add_argument("--precision", choices=sorted(_DTYPES), default=None, help="default: the run's")
    add_weights_argument(parser)
    add_trust_argument(parser)
    parser.add_argument(
        "--min-context",
        type=int,
        default=0,
        metavar="M",
        help="earlier bytes that every scored byte sees, where there are so many (default: 0)",
    )
    parser.add_argument(
        "--positions", type=Path, metavar="FILE.png", help="draw the loss by position, with its numbers in FILE.json"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb, alone or as one rank under a launcher; prints one JSON line on rank 0."""
    from deepspeed.accelerator import get_accelerator

    if arguments.batch is not None and arguments.batch < 1:
        raise ConfigError(f"--batch={arguments.batch}: must be at least 1")
    adopt_place(os.environ)
    ranks = ranks_from_environment(os.environ)
    if arguments.positions is not None:
        check_positions(arguments.positions)
    checkpoint = open_checkpoint(arguments.run, arguments.step, trusted=arguments.trust_checkpoint)
    if arguments.step is None and ranks.is_first:
        tell_passed_over(newer_refusals(arguments.run, checkpoint))
    config = read_checkpoint_config(checkpoint.folder)
    prepare_accelerator()
    quieten(config)
    batch_size = arguments.batch or config.train.micro_batch
    split = arguments.split or config.data.validation_split
    data = RunData(config, ranks, arguments.data)
    contexts = partial(data.evaluation, split=split, batch_size=batch_size, min_context=arguments.min_context)
    contexts()  # says what does not fit before a process group is made
    start = time.perf_counter()
    edges = None if arguments.positions is None else position_edges(config.model.context)
    precision = arguments.precision or checkpoint.manifest.precision
    device = torch.device(get_accelerator().device_name(ranks.local_rank))
    compile_kernels(config.model, batch_size, _DTYPES[precision], device, training=False)
    with process_group(ranks, config.train.timeout_seconds, arguments.run) as watch:
        # A run that goes on may have saved once more while the ranks looked.
        trusted = arguments.trust_checkpoint
        (checkpoint,) = agreed_checkpoints(arguments.run, [checkpoint], ranks, trusted=trusted)
        precision = arguments.precision or checkpoint.manifest.precision
        model = load_model(checkpoint, config, precision, ranks, arguments.weights)
        threads = score_threads(device, batch_size * config.model.context)
        watch.at("evaluation")
        with told_at_once(lambda: barrier(ranks)):
            sums = score(model, contexts, batch_size, ranks, device, edges=edges, threads=threads)
    line = evaluation_line(checkpoint.manifest.step, split, sums, start, data.modality)
    line |= {"min_context": arguments.min_context, "weights": arguments.weights}
    if ranks.is_first:
        print(json.dumps(line))
        unit = "bits per dimension (and per byte)" if "bits_per_dimension" in line else "bits per byte"
        print(f"{line['bits_per_byte']:.4f} {unit} on {line['split']}", file=sys.stderr)
        if edges is not None:
            write_positions(arguments.positions, sums, edges, line, arguments.run)
            print(f"{arguments.positions}, {arguments.positions.with_suffix('.json')}: by position", file=sys.stderr)
    return 0


def evaluate_split(
    engine: DeepSpeedEngine, config: RunConfig, ranks: Ranks, data: RunData, stop: StopFlag | None = None
) -> dict[str, Any]:
    """The validation split's line for metrics.jsonl, over as many contexts as the configuration says."""
    start = time.perf_counter()
    engine.eval()
    contexts = partial(data.evaluation, limit=config.train.evaluate_contexts)
    sums = score(engine, contexts, config.train.micro_batch, ranks, engine.device, stop=stop)
    engine.train()
    return evaluation_line(engine.global_steps, config.data.validation_split, sums, start, data.modality)


def evaluation_line(step: int, split: str, sums: ExactSums, start: float, modality: str) -> dict[str, Any]:
    """An evaluation as it is written and printed."""
    loss_nats = sums.mean()
    return {
        "step": step,
        "split": split,
        "loss_nats": loss_nats,
        "bits_per_byte": bits_per_byte(loss_nats),
        f"bits_per_{modality_named(modality).unit}": bits_per_byte(loss_nats),
        "tokens": sums.count,
        "seconds": time.perf_counter() - start,
    }


def score(
    model: torch.nn.Module,
    contexts: Callable[[], Iterator[EvaluationBatch]],
    batch_size: int,
    ranks: Ranks,
    device: torch.device,
    *,
    edges: np.ndarray | None = None,
    threads: int = 0,
    stop: StopFlag | None = None,
) -> ExactSums:
    """The nats of all ranks' scored bytes, summed without rounding: in all, or by the bins of positions ``edges``.

    Batches hold the same rows for any number of ranks and the sum has no order, so that neither do its bits depend on
    it. ``threads`` above 0 compute a batch each, at the same time, by one thread of torch: the bits of a matrix product
    may depend on how many threads share it. All ranks must call, with equally many batches.

    Raises:
        StopAskedError: on every rank, where any rank has been asked to stop.
    """
    sums = ExactSums(1 if edges is None else len(edges) - 1)
    bins = None if edges is None else bin_numbers(edges)

    def nats_of(batch: EvaluationBatch) -> Tensor:
        with torch.no_grad():  # of this thread
            return model(batch.tokens.to(device), return_nats=True).float().cpu()  # (B, N)

    for batch, nats in _in_turn(
        nats_of, (taken.batch for taken in together(contexts, batch_size, ranks, device, stop)), threads
    ):
        scored = batch.scored  # (B, N)
        sums.add(nats[scored].numpy(), None if bins is None else bins[scored.nonzero()[:, 1].numpy()])
    sums.gather(ranks, device)
    return sums


def score_threads(device: torch.device, rows: int) -> int:
    """How many batches of so many positions are computed at a time, by a thread each; 0: one, by all threads."""
    if device.type != "cpu":
        return 0
    return max(1, min(torch.get_num_threads(), _MOST_THREADS, _MOST_ROWS // rows))


def _in_turn(
    work: Callable[[EvaluationBatch], Tensor], batches: Iterator[EvaluationBatch], threads: int
) -> Iterator[tuple[EvaluationBatch, Tensor]]:
    """Each batch with what was computed of it, in sequence."""
    if not threads:
        yield from ((batch, work(batch)) for batch in batches)
        return
    before = torch.get_num_threads()
    pending: deque[tuple[EvaluationBatch, Future[Tensor]]] = deque()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for batch in batches:
                pending.append((batch, pool.submit(work, batch)))
                if len(pending) > threads:
                    first, computed = pending.popleft()
                    yield first, computed.result()
            yield from ((batch, computed.result()) for batch, computed in pending)
    finally:
        torch.set_num_threads(before)


def load_model(
    checkpoint: Checkpoint, config: RunConfig, precision: str, ranks: Ranks, weights: str
) -> SparseTransformer:
    """The model of a checkpoint, with its weights of one kind, on this rank's device, for scoring.

    Raises:
        ConfigError: the checkpoint is damaged, or keeps no such weights.
    """
    from deepspeed.accelerator import get_accelerator

    model = SparseTransformer(config.model)
    model.load_state_dict(master_weights(checkpoint, weights))
    for parameter in model.parameters():  # parameters alone, as DeepSpeed casts them
        parameter.data = parameter.data.to(_DTYPES[precision])
    return model.to(get_accelerator().device_name(ranks.local_rank)).eval()
