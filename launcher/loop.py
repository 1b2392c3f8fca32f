"""The training loop.

Letters: G contexts a global batch, W ranks, N bytes a context.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from data_pipelines import Batch, ByteStream, PlainStream, StreamState
from launcher import engine as ours
from launcher.batches import RunData, Taken, together
from launcher.config import RunConfig
from launcher.evaluate import evaluate_split
from launcher.guards import Guards, GuardStopError
from launcher.hangs import Watch
from launcher.incidents import as_number
from launcher.metrics import Recorder, bits_per_byte, device_seconds, holds_line
from launcher.processes import Ranks, barrier, gather_float64, gather_objects
from launcher.reporting import AgreedError
from launcher.rewinding import Response
from launcher.saving import NotSavedError, Saver
from launcher.skipping import Before, poisoned, weights_are_finite
from launcher.stopping import StopAskedError, StopFlag


def train(
    engine: DeepSpeedEngine,
    config: RunConfig,
    ranks: Ranks,
    data: RunData,
    state: StreamState | None,
    stop: StopFlag,
    watch: Watch,
    guards: Guards,
    *,
    trusted: bool = False,
) -> None:
    """Trains from the engine's step to the last, evaluating, recording and saving on the way. All ranks must call.

    ``trusted``: whether a checkpoint to rewind to may hold more than tensors and numbers.

    Raises:
        AgreedError: on every rank, where data cannot be read; what is done is saved.
        StopAskedError: on every rank, where any was asked to stop; what is done is saved.
        NotSavedError: on every rank, where what is done at the end could not be saved.
        GuardStopError: on every rank, where a guard stops the run; what is done before its step is saved.
    """
    settings = config.train
    unevaluated = lacks_evaluation(engine.global_steps, config, ranks)
    stream = data.stream(state)
    state = stream.state
    share = settings.global_batch // ranks.world_size
    recorder = Recorder(Path(settings.output), engine, ranks.is_first, settings.last_step)
    saver = Saver(engine, config, ranks, recorder.say)
    recorder.say(ours.describe(config, engine, ranks))
    response = Response(engine, config, ranks, guards, recorder, state, trusted=trusted)
    engine.train()
    try:
        if unevaluated:
            watch.at(f"evaluation after step {engine.global_steps}")
            record_evaluation(engine, config, ranks, data, recorder, stop)
        batches = together(functools.partial(iter, stream), share, ranks, engine.device, stop)
        while engine.global_steps < settings.last_step:
            start = time.perf_counter()
            watch.at(f"step {engine.global_steps + 1}")
            taken = next(batches)
            line = train_step(engine, taken, settings.micro_batch, ranks, guards)
            step, verdict = line["step"], guards.verdict
            line["seconds"] = device_seconds(engine.device) - start
            line["tokens_per_second"] = taken.num_bytes / line["seconds"]
            # What stood in for damaged data is recorded whatever the interval; what a guard did, by what follows on it.
            if not verdict and (taken.substitutions or is_due(step, settings.log_every, settings.last_step)):
                recorder.write(line)
            recorder.advance(
                step, "no loss" if line["loss_nats"] is None else f"{line['bits_per_byte']:.3f} bits per byte"
            )
            for text in data_news(stream, state, taken):
                recorder.say(f"step {step}: {text}")
            if verdict:
                saver.finish()  # a rewind looks for the newest checkpoint
            rewound = verdict is not None and response.act(verdict, line, taken, state)
            state = taken.batch.state
            if rewound:
                saver.saved = engine.global_steps
                batches.close()
                stream = data.stream(state)
                batches = together(functools.partial(iter, stream), share, ranks, engine.device, stop)
                continue
            saver.poll()
            # Saved first: an evaluation that fails must not cost the checkpoint.
            if is_due(step, settings.checkpoint_every, settings.last_step):
                watch.at(f"saving step {step}")
                saver.save(state, guards.memory())
            if is_due(step, settings.evaluate_every, settings.last_step):
                watch.at(f"evaluation after step {step}")
                record_evaluation(engine, config, ranks, data, recorder, stop)
        watch.at("the end")
        barrier(ranks)  # a rank that leaves while another still collects can abort it
        saver.finish()
        if saver.saved < engine.global_steps:
            raise NotSavedError(f"the run ends unsaved at step {engine.global_steps}")
    except (AgreedError, StopAskedError, GuardStopError) as ending:
        watch.at(f"saving step {engine.global_steps}")
        if not save_what_is_done(engine, saver, state, guards, ranks, recorder) and isinstance(ending, StopAskedError):
            raise NotSavedError(f"stopped by {ending}, unsaved at step {engine.global_steps}") from None
        raise
    finally:
        recorder.close()


def train_step(
    engine: DeepSpeedEngine,
    taken: Taken[Batch],
    micro_batch: int,
    ranks: Ranks,
    guards: Guards,
    context_nats: list[float] | None = None,
) -> dict[str, Any]:
    """One optimiser step over a global batch; returns its line for metrics.jsonl.

    ``guards.verdict`` tells whether the step was taken: where it is to be skipped, the engine has dropped it, and where
    the run is to stop or rewind, the engine is as it was before. ``context_nats`` gets the sum of each context of this
    rank.
    """
    before, scale, rate = Before(engine), ours.loss_scale(engine), ours.learning_rate(engine)
    batch = taken.batch
    num_micro_batches = len(batch.tokens) // micro_batch
    # DeepSpeed takes the mean over micro-batches and ranks, of which each may hold another number of bytes: this makes
    # of it the sum over all bytes divided by their global number.
    factor = num_micro_batches * ranks.world_size / taken.num_bytes
    nats = torch.zeros((), dtype=torch.float64, device=engine.device)
    for number in range(num_micro_batches):
        total = sum_nats(engine, batch, slice(number * micro_batch, (number + 1) * micro_batch), context_nats)
        nats += total.detach().double()
        if number + 1 < num_micro_batches:
            ours.backward(engine, total * factor)
            engine.step()
    # Judged before the last backward pass, which can still have the step dropped.
    rank_nats = gather_float64(nats, ranks, engine.device).tolist()
    loss_nats = sum(rank_nats) / taken.num_bytes
    unwanted = guards.judge_loss(loss_nats)
    ours.backward(engine, (poisoned(total) if unwanted else total) * factor)
    norm = ours.take_step(engine)
    step = engine.global_steps
    verdict = unwanted or guards.judge_gradients(step, loss_nats, before.overflow(), scale)
    if verdict and verdict.outcome != "skip":
        before.put_back()
    elif verdict and verdict.guard != "loss_scale_floor":  # which is the scale's own affair
        before.put_back_scale()
    is_number = math.isfinite(loss_nats)
    line = {
        "step": step,
        "split": "train",
        "loss_nats": loss_nats if is_number else None,
        "bits_per_byte": bits_per_byte(loss_nats) if is_number else None,
        "tokens": taken.num_bytes,
        "learning_rate": rate,
        "loss_scale": scale,
        "grad_norm": norm,
        "skipped_steps": engine.skipped_steps,
        "sample_ids_crc32": taken.sample_ids_crc32,
        "epoch": batch.state.epoch,
        "substitutions": [str(each) for each in taken.substitutions],
    }
    told = {"guard": str(verdict), "rank_nats": [as_number(each) for each in rank_nats]} if verdict else {}
    return line | told


def save_what_is_done(
    engine: DeepSpeedEngine, saver: Saver, state: StreamState, guards: Guards, ranks: Ranks, recorder: Recorder
) -> bool:
    """Saves the engine's step where a run ends early; returns whether it is saved. All ranks must call."""
    step = engine.global_steps
    saver.finish()
    if saver.saved == step:
        return True
    if not weights_are_finite(engine, ranks):
        told = f"not saved, as its weights are no finite numbers; --resume auto goes on from step {saver.saved}"
        recorder.say(f"step {step}: {told}")
        return False
    saved = saver.save_last(state, guards.memory())
    if saved:
        recorder.say(f"step {step}: saved before the run ends; --resume auto goes on from there")
    return saved


def data_news(stream: ByteStream | PlainStream, before: StreamState, taken: Taken[Batch]) -> Iterator[str]:
    """What is to be said about a step's data: what stood in for damage, and what the end of an epoch carries over."""
    yield from map(str, taken.substitutions)
    epoch = taken.batch.state.epoch
    carried = stream.carried(epoch) if epoch > before.epoch else None
    if carried:
        yield carried


def sum_nats(engine: DeepSpeedEngine, batch: Batch, rows: slice, context_nats: list[float] | None = None) -> Tensor:
    """The cross-entropy of some contexts of a batch, padding left out: () fp32.

    ``context_nats`` gets the sum of each of them.
    """
    tokens, lengths = batch.tokens[rows], batch.lengths[rows]
    nats = engine(tokens.to(engine.device), return_nats=True)  # (B, N)
    if not bool((lengths == tokens.shape[1]).all()):
        real = torch.arange(tokens.shape[1]) < lengths[:, None]
        nats = nats.masked_fill(~real.to(engine.device), 0.0)
    if context_nats is not None:
        context_nats += nats.detach().double().sum(1).tolist()
    return nats.sum()


def lacks_evaluation(step: int, config: RunConfig, ranks: Ranks) -> bool:
    """Whether a run goes on from a step whose evaluation was due and never recorded. All ranks must call."""
    settings = config.train
    if step == 0 or not is_due(step, settings.evaluate_every, settings.last_step):
        return False
    lacks = ranks.is_first and not holds_line(Path(settings.output), step, config.data.validation_split)
    return bool(gather_objects(lacks, ranks)[0])


def record_evaluation(
    engine: DeepSpeedEngine, config: RunConfig, ranks: Ranks, data: RunData, recorder: Recorder, stop: StopFlag
) -> None:
    """Evaluates after the engine's step, and records and tells the result. All ranks must call."""
    line = evaluate_split(engine, config, ranks, data, stop)
    recorder.write(line)
    recorder.say(f"step {line['step']}: {line['bits_per_byte']:.4f} bits per byte on {line['split']}")


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something happens after a step: every so many, and after the last; 0 is after the last alone."""
    return step == last or (every > 0 and step % every == 0)
