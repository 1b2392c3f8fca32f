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

from longstride.data_pipelines.order import Batch, ByteStream, StreamState
from longstride.launcher.checkpoints import NotSavedError, Saver
from longstride.launcher.config import RunConfig
from longstride.launcher.data import RunData, Taken, together
from longstride.launcher.engine import Before, poisoned, weights_are_finite
from longstride.launcher.engine import build as ours
from longstride.launcher.evaluation import evaluate_split
from longstride.launcher.output import AgreedError, bits_per_byte, holds_line
from longstride.launcher.ranks import Ranks, Watch, barrier, gather_float64, gather_objects
from longstride.launcher.stops import StopAskedError, StopFlag
from longstride.launcher.training.guards import Guards, GuardStopError
from longstride.launcher.training.incidents import as_number
from longstride.launcher.training.recorder import Recorder, device_seconds
from longstride.launcher.training.rewinding import Response


class Training:
    """A run on this rank: its engine, and all that has a say in its steps.

    ``trusted``: whether a checkpoint to rewind to may hold more than tensors and numbers.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        config: RunConfig,
        ranks: Ranks,
        data: RunData,
        guards: Guards,
        stop: StopFlag,
        watch: Watch,
        *,
        trusted: bool = False,
    ) -> None:
        self._engine, self._config, self._ranks, self._data = engine, config, ranks, data
        self._guards, self._stop, self._watch, self._trusted = guards, stop, watch, trusted
        self._recorder = Recorder(Path(config.train.output), engine, ranks.is_first, config.train.last_step)
        self._saver = Saver(engine, config, ranks, self._recorder.say)

    def run(self, state: StreamState | None) -> None:
        """Trains from the engine's step to the last, evaluating, recording and saving on the way. All ranks must call.

        ``state``: the next batch; None is the first.

        Raises:
            AgreedError: on every rank, where data cannot be read; what is done is saved.
            StopAskedError: on every rank, where any was asked to stop; what is done is saved.
            NotSavedError: on every rank, where what is done at the end could not be saved.
            GuardStopError: on every rank, where a guard stops the run; what is done before its step is saved.
        """
        engine, last = self._engine, self._config.train.last_step
        unevaluated = lacks_evaluation(engine.global_steps, self._config, self._ranks)
        self._open(state)
        self._recorder.say(ours.describe(self._config, engine, self._ranks))
        arguments = (engine, self._config, self._ranks, self._guards, self._recorder, self._state)
        self._response = Response(*arguments, trusted=self._trusted)
        engine.train()
        try:
            if unevaluated:
                self._evaluate()
            while engine.global_steps < last:
                self._step()
            self._end()
        except (AgreedError, StopAskedError, GuardStopError) as ending:
            self._watch.at(f"saving step {engine.global_steps}")
            if not self._save_what_is_done() and isinstance(ending, StopAskedError):
                raise NotSavedError(f"stopped by {ending}, unsaved at step {engine.global_steps}") from None
            raise
        finally:
            self._recorder.close()

    def _open(self, state: StreamState | None) -> None:
        """Takes the batches from a state on."""
        share = self._config.train.global_batch // self._ranks.world_size
        self._stream = self._data.stream(state)
        self._state = self._stream.state
        contexts = functools.partial(iter, self._stream)
        self._batches = together(contexts, share, self._ranks, self._engine.device, self._stop)

    def _step(self) -> None:
        """A step, and what is due after it; or back to a checkpoint, where a guard asks for that."""
        settings = self._config.train
        start = time.perf_counter()
        self._watch.at(f"step {self._engine.global_steps + 1}")
        taken = next(self._batches)
        line = train_step(self._engine, taken, settings.micro_batch, self._ranks, self._guards)
        line["seconds"] = device_seconds(self._engine.device) - start
        line["tokens_per_second"] = taken.num_bytes / line["seconds"]
        self._tell(line, taken)
        rewound = False
        if verdict := self._guards.verdict:
            self._saver.finish()  # a rewind looks for the newest checkpoint
            rewound = self._response.act(verdict, line, taken, self._state)
        self._state = taken.batch.state  # last: where a guard ends the run, its batch is the next one still
        if rewound:
            self._saver.saved = self._engine.global_steps
            self._batches.close()
            self._open(self._state)
            return
        self._saver.poll()
        step = line["step"]
        # Saved first: an evaluation that fails must not cost the checkpoint.
        if is_due(step, settings.checkpoint_every, settings.last_step):
            self._watch.at(f"saving step {step}")
            self._saver.save(self._state, self._guards.memory())
        if is_due(step, settings.evaluate_every, settings.last_step):
            self._evaluate()

    def _tell(self, line: dict[str, Any], taken: Taken[Batch]) -> None:
        """Records a step and shows how far the run is."""
        settings, step = self._config.train, line["step"]
        # What stood in for damaged data is recorded whatever the interval; what a guard did, by what follows on it.
        if not self._guards.verdict and (taken.substitutions or is_due(step, settings.log_every, settings.last_step)):
            self._recorder.write(line)
        loss = "no loss" if line["loss_nats"] is None else f"{line['bits_per_byte']:.3f} bits per byte"
        self._recorder.advance(step, loss)
        for text in data_news(self._stream, self._state, taken):
            self._recorder.say(f"step {step}: {text}")

    def _evaluate(self) -> None:
        """Evaluates after the engine's step, and records and tells the result."""
        self._watch.at(f"evaluation after step {self._engine.global_steps}")
        line = evaluate_split(self._engine, self._config, self._ranks, self._data, self._stop)
        self._recorder.write(line)
        self._recorder.say(f"step {line['step']}: {line['bits_per_byte']:.4f} bits per byte on {line['split']}")

    def _end(self) -> None:
        self._watch.at("the end")
        barrier(self._ranks)  # a rank that leaves while another still collects can abort it
        self._saver.finish()
        if self._saver.saved < self._engine.global_steps:
            raise NotSavedError(f"the run ends unsaved at step {self._engine.global_steps}")

    def _save_what_is_done(self) -> bool:
        """Saves the engine's step where a run ends early; returns whether it is saved."""
        step = self._engine.global_steps
        self._saver.finish()
        if self._saver.saved == step:
            return True
        if not weights_are_finite(self._engine, self._ranks):
            told = (
                f"not saved, as its weights are no finite numbers; --resume auto goes on from step {self._saver.saved}"
            )
            self._recorder.say(f"step {step}: {told}")
            return False
        saved = self._saver.save_last(self._state, self._guards.memory())
        if saved:
            self._recorder.say(f"step {step}: saved before the run ends; --resume auto goes on from there")
        return saved


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


def data_news(stream: ByteStream, before: StreamState, taken: Taken[Batch]) -> Iterator[str]:
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


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something happens after a step: every so many, and after the last; 0 is after the last alone."""
    return step == last or (every > 0 and step % every == 0)
