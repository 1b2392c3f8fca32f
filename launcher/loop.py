"""The training loop.

Letters: G contexts a global batch, W ranks, N bytes a context.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from data_pipelines import Batch, ByteStream, EvaluationBatch, StreamState, evaluation_contexts
from launcher import engine as ours
from launcher.checkpoint import save_checkpoint
from launcher.config import RunConfig
from launcher.metrics import Recorder, bits_per_byte, device_seconds, holds_line
from launcher.processes import Ranks, barrier, gather_int64, gather_objects


class NonFiniteLossError(RuntimeError):
    """The loss is not a finite number; the step was not taken."""


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """What all ranks together saw in one step."""

    loss_nats: float  # a byte
    sample_ids_crc32: int  # of the G int64 sample ids in rank order, little-endian


def train(engine: DeepSpeedEngine, config: RunConfig, ranks: Ranks, state: StreamState | None) -> None:
    """Trains from the engine's step to the last, evaluating, recording and saving on the way. All ranks must call.

    Raises:
        NonFiniteLossError: on every rank, before the step that would have spoilt the weights.
    """
    settings = config.train
    unevaluated = lacks_evaluation(engine.global_steps, config, ranks)
    recorder = Recorder(Path(settings.output), engine, ranks.is_first, settings.steps)
    recorder.say(ours.describe(config, engine, ranks))
    engine.train()
    batches = iter(make_stream(config, ranks, state))
    try:
        if unevaluated:
            record_evaluation(engine, config, ranks, recorder)
        while engine.global_steps < settings.steps:
            start = time.perf_counter()
            batch = next(batches)
            line = train_step(engine, batch, settings.micro_batch, ranks)
            step = engine.global_steps
            line["seconds"] = device_seconds(engine.device) - start
            line["tokens_per_second"] = settings.global_batch * config.model.context / line["seconds"]
            if is_due(step, settings.log_every, settings.steps):
                recorder.write(line)
            recorder.advance(step, f"{line['bits_per_byte']:.3f} bits per byte")
            # Saved first: an evaluation that fails must not cost the checkpoint.
            if is_due(step, settings.checkpoint_every, settings.steps):
                save_checkpoint(engine, config, batch.state, ranks)
            if is_due(step, settings.evaluate_every, settings.steps):
                record_evaluation(engine, config, ranks, recorder)
        barrier(ranks)  # a rank that leaves while another still collects can abort it
    finally:
        recorder.close()


def train_step(engine: DeepSpeedEngine, batch: Batch, micro_batch: int, ranks: Ranks) -> dict[str, Any]:
    """One optimiser step over a global batch; returns its line for metrics.jsonl."""
    scale, rate = ours.loss_scale(engine), ours.learning_rate(engine)
    micro_batches = batch.tokens.split(micro_batch)
    nats = torch.zeros((), dtype=torch.float64, device=engine.device)
    for number, tokens in enumerate(micro_batches, start=1):
        # Contexts in training are whole, so that every rank and micro-batch holds equally many bytes: the mean of the
        # means, which DeepSpeed takes, is the sum over all bytes divided by their global number.
        loss = engine(tokens.to(engine.device), return_nats=True).mean()
        ours.backward(engine, loss)
        nats += loss.detach().double() / len(micro_batches)
        if number < len(micro_batches):
            engine.step()
    whole = gather_global_batch(nats, batch.sample_ids, ranks, engine.device)
    if not math.isfinite(whole.loss_nats):
        raise NonFiniteLossError(
            f"step {engine.global_steps + 1}: the loss is {whole.loss_nats}; sample_ids_crc32 {whole.sample_ids_crc32}"
        )
    norm = ours.take_step(engine)
    return {
        "step": engine.global_steps,
        "split": "train",
        "loss_nats": whole.loss_nats,
        "bits_per_byte": bits_per_byte(whole.loss_nats),
        "learning_rate": rate,
        "loss_scale": scale,
        "grad_norm": norm,
        "skipped_steps": engine.skipped_steps,
        "sample_ids_crc32": whole.sample_ids_crc32,
        "epoch": batch.state.epoch,
    }


def gather_global_batch(nats: Tensor, sample_ids: Tensor, ranks: Ranks, device: torch.device) -> GlobalBatch:
    """The mean loss of all ranks and the check sum of their sample ids, equal on every rank, in one collective.

    nats: () float64, the mean over this rank's bytes; sample_ids: (G / W,) int64.
    """
    # The float's bits travel among the integers, and come back unchanged.
    packed = torch.cat([nats.reshape(1).view(torch.int64), sample_ids.to(nats.device)])
    everyone = gather_int64(packed, ranks, device)  # (W, 1 + G / W)
    loss_nats = everyone[:, 0].contiguous().view(torch.float64).mean().item()
    ids = everyone[:, 1:].contiguous().numpy().astype("<i8")
    return GlobalBatch(loss_nats, zlib.crc32(ids.tobytes()))


def lacks_evaluation(step: int, config: RunConfig, ranks: Ranks) -> bool:
    """Whether a run goes on from a step whose evaluation was due and never recorded. All ranks must call."""
    settings = config.train
    if step == 0 or not is_due(step, settings.evaluate_every, settings.steps):
        return False
    lacks = ranks.is_first and not holds_line(Path(settings.output), step, config.data.validation_split)
    return bool(gather_objects(lacks, ranks)[0])


def record_evaluation(engine: DeepSpeedEngine, config: RunConfig, ranks: Ranks, recorder: Recorder) -> None:
    """Evaluates after the engine's step, and records and tells the result. All ranks must call."""
    line = evaluate_split(engine, config, ranks)
    recorder.write(line)
    recorder.say(f"step {line['step']}: {line['bits_per_byte']:.4f} bits per byte on {line['split']}")


def evaluate_split(engine: DeepSpeedEngine, config: RunConfig, ranks: Ranks) -> dict[str, Any]:
    """The validation split's line for metrics.jsonl, over as many contexts as the configuration says."""
    start = time.perf_counter()
    engine.eval()
    contexts = evaluation_contexts(
        Path(config.data.path),
        config.data.validation_split,
        context=config.model.context,
        batch_size=config.train.micro_batch,
        rank=ranks.rank,
        world_size=ranks.world_size,
        limit=config.train.evaluate_contexts,
    )
    nats, tokens = score(engine, contexts, ranks, engine.device)
    engine.train()
    return {
        "step": engine.global_steps,
        "split": config.data.validation_split,
        "loss_nats": nats / tokens,
        "bits_per_byte": bits_per_byte(nats / tokens),
        "tokens": tokens,
        "seconds": time.perf_counter() - start,
    }


def score(
    model: torch.nn.Module, contexts: Iterable[EvaluationBatch], ranks: Ranks, device: torch.device
) -> tuple[float, int]:
    """(nats, bytes) over all ranks' contexts, summed in float64. All ranks must call, with equally many batches."""
    nats = torch.zeros((), dtype=torch.float64)
    count = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        for batch in contexts:
            each = model(batch.tokens.to(device), return_nats=True).double().cpu()
            nats += each[batch.mask].sum()
            count += batch.mask.sum()
    packed = gather_int64(torch.cat([nats.reshape(1).view(torch.int64), count]), ranks, device)  # (W, 2)
    return packed[:, 0].contiguous().view(torch.float64).sum().item(), int(packed[:, 1].sum())


def make_stream(config: RunConfig, ranks: Ranks, state: StreamState | None = None) -> ByteStream:
    """This rank's training batches from a state on; None is the beginning.

    Raises:
        DataError: the folder, split or state does not fit the run.
    """
    return ByteStream(
        Path(config.data.path),
        config.data.train_split,
        context=config.model.context,
        global_batch=config.train.global_batch,
        seed=config.data.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
        shuffle_bytes=config.data.shuffle_bytes,
        state=state,
    )


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something happens after a step: every so many, and after the last; 0 is after the last alone."""
    return step == last or (every > 0 and step % every == 0)
