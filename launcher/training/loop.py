"""The training loop, and the lines in which a run reports its end.

Letters: B contexts of a micro-batch, N bytes of a context.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from longstride.data_pipelines.durable import write_over
from longstride.data_pipelines.order import Batch, LostWorkerError, StreamState
from longstride.launcher.checkpoints import Checkpoint, NotSavedError, Saver, Score, error_line
from longstride.launcher.config import Stage
from longstride.launcher.data import GlobalBatch, RunSetup, discard_start
from longstride.launcher.engine import EngineStep, StepPart, compile_kernels, weights_are_finite
from longstride.launcher.evaluation import evaluate_split
from longstride.launcher.output import AgreedError, counting, exit_codes, file_names, metrics_file, say
from longstride.launcher.ranks import Ranks, Watchdog
from longstride.launcher.stops import StopRequestedError
from longstride.launcher.training.guards import GuardResponse, Guards, GuardStopError, Plateau, as_number
from longstride.launcher.training.profile import StepProfiler, Utilization, device_seconds, peak_memory_bytes
from longstride.launcher.training.recorder import Recorder
from longstride.launcher.training.samples import write_samples
from longstride.sparse_model import Division, MixerOutput, SparseTransformer


def compile_step(run: RunSetup) -> None:
    """Compile the kernels of a training step as this rank will call them. Needs no process group."""
    ranks, exchange = run.ranks, run.config.train.sequence_exchange
    for stage in run.config.stages():
        config = stage.config
        compile_kernels(
            config.model,
            config.train.micro_batch,
            config.precision,
            ranks.device,
            train=config.train,
            apart=config.data.apart,
            padded=not run.data.packed,
            division=Division(ranks.sequence_rank, ranks.sequence_parallel, None, exchange),
        )


class Trainer:
    """Trains a run on this rank, from the engine's step to the last one.

    ``checkpoint`` is the one from which the engine was restored; None for a new run.
    """

    def __init__(
        self, run: RunSetup, engine: DeepSpeedEngine, checkpoint: Checkpoint | None, watchdog: Watchdog
    ) -> None:
        self._run, self._engine, self._watchdog = run, engine, watchdog
        manifest = checkpoint.manifest if checkpoint is not None else None
        self._guards = Guards(run.config.train.guards, manifest.guards if manifest else None)
        self._plateau = Plateau(run, manifest.plateau if manifest else None)
        # Bytes of content, or pixels, that all steps have read; None if an earlier start did not count them.
        self._content_seen = manifest.content_seen if manifest else 0
        self._recorder = Recorder(run.folder, engine, run.ranks.is_first, run.config.train.last_step)
        self._stages = run.config.stages()
        self._stage: Stage | None = None
        self._utilization = Utilization(run.config, run.ranks, engine.device)
        self._saver = Saver(engine, run.config, run.ranks, self._recorder.say, self._recorder.flush)
        self._state: StreamState  # position of the next batch
        self._batches: Generator[GlobalBatch[Batch]]

    def train(self, state: StreamState | None) -> None:
        """Train to the last step, or until the validation loss stops falling. All ranks must call.

        The loop evaluates, records and saves on the way. The errors below are raised on all ranks, after an attempt to
        save the last step. Other exceptions propagate without saving. ``state`` is the position of the next batch in
        the data; None for the first.

        Raises:
            AgreedError: data cannot be read.
            StopRequestedError: any rank was asked to stop.
            LostWorkerError: a loader worker of any rank was killed or stopped.
            NotSavedError: the last steps could not be saved.
            GuardStopError: a guard stops the run.
        """
        run, engine = self._run, self._engine
        first, begin = engine.global_steps, time.monotonic()
        evaluation_is_missing = lacks_evaluation(first, run)
        self._open_batches(state)
        config, shared = run.config, run.ranks.sequence_parallel
        numel = sum(getattr(tensor, "ds_numel", tensor.numel()) for tensor in engine.module.parameters())
        numel += sum(part.numel for part in engine.held.parts)
        place = f"{engine.device.type}, {shared} share each context" if shared > 1 else engine.device.type
        self._recorder.say(
            f"{numel:,} parameters, context {config.model.context:,}, {counting.processes(run.ranks.world_size)} "
            f"on {place}, ZeRO {config.zero_stage}, {config.precision}"
        )
        self._response = GuardResponse(run, engine, self._guards, self._plateau, self._recorder, self._state)
        steps_left = config.train.last_step - engine.global_steps
        profiler = StepProfiler(run, steps_left, engine.device, self._recorder.say)
        engine.train()
        try:
            if evaluation_is_missing:
                self._enter(Stage.after(first - 1, self._stages))
                self._evaluate()
            while engine.global_steps < run.config.train.last_step and not self._plateau.reason:
                profiler.before_step()
                self._step()
            profiler.close()
            self._watchdog.at("the end")
            run.ranks.barrier()  # a rank that leaves during a collective of the others can abort them
            self._saver.finish()
            ended_early = engine.global_steps < run.config.train.last_step
            if ended_early:
                self._saver.save_last(self._state, self._memory())
            if self._saver.saved < engine.global_steps:
                raise NotSavedError(f"the run ends unsaved at step {engine.global_steps}")
            if ended_early:
                self._report_early_end()
        except (AgreedError, StopRequestedError, LostWorkerError, GuardStopError) as ending:
            self._watchdog.at(f"saving step {engine.global_steps}")
            if not self._save_step() and isinstance(ending, StopRequestedError):
                raise NotSavedError(f"stopped by {ending}, unsaved at step {engine.global_steps}") from None
            raise
        finally:
            profiler.close()
            self._recorder.close()
        if run.ranks.is_first:  # the progress bar is closed by now
            for line in summary(run, engine.global_steps, first, time.monotonic() - begin, self._content_seen):
                say(line)

    def _step(self) -> None:
        """Take one step and whatever is due after it. If a guard requires it, reload an earlier checkpoint instead.

        Data is not rewound: training continues with the next batch.
        """
        settings, engine = self._run.config.train, self._engine
        self._enter(stage := Stage.after(engine.global_steps, self._stages))
        start = time.perf_counter()
        self._watchdog.at(f"step {engine.global_steps + 1}")
        with StepPart.STEP.marked(engine.device):
            with StepPart.DATA.marked(engine.device):
                batch = next(self._batches)
            ranks, unit, split = self._run.ranks, self._run.data.unit, self._run.config.data.train_split
            line = train_step(engine, batch, stage, ranks, self._guards, None, unit, split)
            line["seconds"] = device_seconds(engine.device) - start
            predicts_all = batch.part.predicted is None and batch.part.labels is None
            count = batch.num_tokens if predicts_all else batch.content  # read ones, not predicted ones
            line["tokens_per_second"] = count / line["seconds"]
            line |= self._utilization.fields(line["seconds"])
            line["peak_memory_bytes"] = peak_memory_bytes(engine.device)
            if len(self._stages) > 1:
                line["context"] = stage.context
            self._report(line, batch)
        rewound_to = None
        if verdict := self._guards.verdict:
            self._saver.finish()  # a rewind needs the newest checkpoint
            rewound_to = self._response.act(verdict, line, batch, self._state)
        self._state = batch.part.state  # after the response: if a guard ends the run, this batch is the next one
        if self._content_seen is not None:
            self._content_seen += batch.content
        if rewound_to:
            self._content_seen = rewound_to.manifest.content_seen
            self._stage = None  # is entered again, as the checkpoint's guards may know the stage before it
            self._saver.go_on()
            self._batches.close()
            self._open_batches(self._state)
            return
        self._saver.poll()
        step = line["step"]
        # Save first: a failing evaluation must not cost the checkpoint.
        if is_due(step, settings.checkpoint_every, settings.last_step):
            self._watchdog.at(f"saving step {step}")
            self._saver.save(self._state, self._memory())
        if is_due(step, settings.evaluate_every, settings.last_step):
            self._evaluate()
        if settings.samples_every and is_due(step, settings.samples_every, settings.last_step):
            self._watchdog.at(f"samples after step {step}")
            write_samples(self._run, engine, self._recorder, step)

    def _enter(self, stage: Stage) -> None:
        """Begin a stage, unless it is in use."""
        if stage is self._stage:
            return
        self._stage, engine = stage, self._engine
        enter_stage(stage, engine, self._guards)
        self._utilization.begin(stage.config, has_backward=stage.trained is None)
        if len(self._stages) > 1:
            number, batch = self._stages.index(stage) + 1, stage.config.train.global_batch
            contexts = f"{batch:,} contexts of {stage.context:,} a step"
            self._recorder.say(f"step {engine.global_steps}: stage {number} of {len(self._stages)}, {contexts}")

    def _open_batches(self, state: StreamState | None) -> None:
        stream = self._stream = self._run.data.stream(state)
        self._state = stream.state
        self._batches = self._run.data.batches(stream, self._engine.global_steps, self._engine.device, self._run.stop)

    def _report(self, line: dict[str, Any], batch: GlobalBatch[Batch]) -> None:
        """Record a step, show the progress, and report replaced contexts and a new epoch."""
        settings, step = self._run.config.train, line["step"]
        # Steps with replaced contexts are always recorded. ``GuardResponse`` records steps that a guard refuses.
        if not self._guards.verdict and (batch.substitutions or is_due(step, settings.log_every, settings.last_step)):
            self._recorder.write(line)
        self._recorder.advance(line)
        for substitution in batch.substitutions:
            self._recorder.say(f"step {step}: {substitution}")
        epoch = batch.part.state.epoch
        if epoch > self._state.epoch and (carried := self._stream.carried(epoch)):
            self._recorder.say(f"step {step}: {carried}")

    def _evaluate(self) -> None:
        """Evaluate after the engine's step, record the result, and save the step if it is one of the best."""
        self._watchdog.at(f"evaluation after step {self._engine.global_steps}")
        assert self._stage is not None
        line = evaluate_split(self._engine, self._run, self._stage.pieces)
        if len(self._stages) > 1:
            line["context"] = self._stage.context
        # Of product keys; the rows of n-grams follow from the data.
        usages = [part.usage() for part in self._engine.held.parts if part.kind == "tables" and part.weighted]
        if usages:
            read, divergence = (sum(numbers) / len(usages) for numbers in zip(*usages, strict=True))
            line |= {"values_read": read, "values_kl": divergence}
        score = Score.of_line(line)
        self._plateau.add(score)
        self._recorder.write(line)
        self._recorder.say(f"step {line['step']}: {metrics_file.bits_text(line)} on {line['split']}")
        self._watchdog.at(f"saving step {line['step']}")
        self._saver.keep_best(score, self._state, self._memory())

    def _report_early_end(self) -> None:
        """Say why the run ends before its last step, and write the file that informs `longstride train`."""
        step = self._engine.global_steps
        way = (
            "--resume auto continues with a larger train.stop_when.evaluations; train.stop_when=null trains to the end"
        )
        self._recorder.say(f"step {step}: the run is over, as {self._plateau.reason}; {way}")
        if self._run.ranks.is_first:
            try:
                write_over(self._run.folder / file_names.OVER, f"{step}\n".encode())
            except OSError as error:
                self._recorder.say(error_line(error, self._run.folder))

    def _memory(self) -> dict[str, Any]:
        """Return what a checkpoint stores of guards, evaluations and data, and the origin of the first weights."""
        return {
            "guards": self._guards.memory(),
            "plateau": self._plateau.memory(),
            "origin": self._run.origin,
            "content_seen": self._content_seen,
        }

    def _save_step(self) -> bool:
        """Save the engine's step at an early end; return whether it is saved."""
        step = self._engine.global_steps
        self._saver.finish()
        if self._saver.saved == step:
            return True
        if not weights_are_finite(self._engine, self._run.ranks):
            where = f"--resume auto continues from step {self._saver.saved}"
            self._recorder.say(f"step {step}: not saved, as its weights are not finite; {where}")
            return False
        saved = self._saver.save_last(self._state, self._memory())
        if saved:
            self._recorder.say(f"step {step}: saved before the run ends; --resume auto continues from there")
        return saved


def train_step(
    engine: DeepSpeedEngine,
    batch: GlobalBatch[Batch],
    stage: Stage,
    ranks: Ranks,
    guards: Guards,
    context_nats: list[float] | None = None,
    unit: str = "byte",
    split: str = "train",
) -> dict[str, Any]:
    """Take one optimiser step over a global batch; return its line for metrics.jsonl. All ranks must call.

    Afterwards ``guards.verdict`` says whether the step was taken. If it is skipped, the optimizer step is dropped but
    counted. On a stop or rewind, the engine has its earlier state again.

    Args:
        stage: of the run, which ``enter_stage`` has prepared.
        context_nats: if not None, gets the loss of each context of this rank.
        unit: what a token stands for.
    """
    step, part = EngineStep(engine), batch.part
    # DeepSpeed takes the mean over micro-batches and ranks, which may have different numbers of bytes. This factor
    # turns it into the mean over all bytes.
    factor = len(part.tokens) // stage.rows * ranks.world_size / batch.num_tokens
    nats = torch.zeros((), dtype=torch.float64, device=engine.device)
    observed: list[Tensor] = []  # statistics of each observing part, summed over micro-batches
    with step.only(stage.trained):
        for first in range(0, len(part.tokens), stage.rows):
            with StepPart.FORWARD.marked(engine.device):
                rows = slice(first, first + stage.rows)
                total, loss, statistics = score(engine, part, rows, stage.pieces, context_nats)
            nats += total.detach().double()
            observed = [a + b for a, b in zip(observed, statistics, strict=True)] if observed else list(statistics)
            if first + stage.rows < len(part.tokens):
                step.accumulate(loss * factor)
        # Judge before the last backward pass, as the step can still be dropped there.
        rank_nats = ranks.gather(nats[None])[:, 0].tolist()
        loss_nats = sum(rank_nats) / batch.num_tokens
        refused = guards.judge_loss(loss_nats)
        grad_norm = step.take(loss * factor, drop=refused is not None)
    number = engine.global_steps
    verdict = refused or guards.judge_gradients(number, loss_nats, step.overflow(), step.loss_scale)
    if verdict and verdict.outcome != "skip":
        step.undo()
    elif verdict and verdict.guard != "loss_scale_floor":  # loss_scale_floor needs the scaler's history of overflows
        step.undo_scale()
    if observed and grad_norm is not None and not verdict and stage.trained is None:
        observe(engine.module, observed, ranks)
    if engine.lanes is not None:
        # The data goes on after a skipped step, and is read again after others that are not taken.
        engine.lanes.drop() if verdict and verdict.outcome != "skip" else engine.lanes.advance(part)
    line = {
        "step": number,
        "split": split,
        **metrics_file.loss_fields(loss_nats, batch.num_tokens, batch.content, unit),
        "learning_rate": step.learning_rate,
        "loss_scale": step.loss_scale,
        "grad_norm": grad_norm,
        "skipped_steps": engine.skipped_steps,
        "sample_ids_crc32": batch.sample_ids_crc32,
        "epoch": part.state.epoch,
        "substitutions": [str(substitution) for substitution in batch.substitutions],
    }
    if verdict:
        line |= {"guard": str(verdict), "rank_nats": [as_number(value) for value in rank_nats]}
    return line


class LossOutput(NamedTuple):
    """The loss of some contexts."""

    nats: Tensor  # () fp32: summed cross-entropy of the predicted bytes that this rank computes, without padding
    loss: Tensor  # () fp32: the same plus auxiliary losses of the model's parts, which count once per predicted byte
    statistics: tuple[Tensor, ...]  # of the observing parts


def score(
    engine: DeepSpeedEngine, batch: Batch, rows: slice, pieces: int = 1, context_nats: list[float] | None = None
) -> LossOutput:
    """Compute the loss of some contexts of a batch, each cut into ``pieces``. ``context_nats`` gets that of each."""

    def cut(values: Tensor) -> Tensor:  # (contexts, positions) to (B, N)
        return values.reshape(pieces * len(values), -1)

    tokens, device = cut(batch.tokens[rows]), engine.device
    names = ("begins", "inputs", "predicted", "labels")
    extra_inputs: dict[str, Any] = {
        name: cut(values[rows]).to(device) for name in names if (values := getattr(batch, name)) is not None
    }
    real = cut(torch.arange(batch.tokens.shape[1]) < batch.lengths[rows, None])
    if not bool(real.all()):
        extra_inputs["real"] = real.to(device)
    if engine.lanes is not None:
        extra_inputs["carried"] = engine.lanes.take(batch, rows)
    output: MixerOutput = engine(tokens.to(device), return_nats=True, return_extras=True, **extra_inputs)
    nats, auxiliary = output.rows, output.auxiliary_loss
    if engine.lanes is not None:
        engine.lanes.put(output.carried)
    if context_nats is not None:  # nats (B, N), or (B, 1) of labels
        context_nats += nats.detach().double().view(len(nats) // pieces, -1).sum(1).tolist()
    total = nats.sum()
    section = engine.module.division.section(tokens.shape[1])  # the positions that this rank computes
    counted = real if batch.predicted is None else cut(batch.predicted[rows] > 0)
    if batch.labels is not None:
        counted = batch.labels[rows] >= 0
    loss = total if auxiliary is None else total + auxiliary * int(counted[:, section].sum())
    return LossOutput(total, loss, tuple(statistic.detach() for statistic in output.statistics))


def observe(model: SparseTransformer, observed: Sequence[Tensor], ranks: Ranks) -> None:
    """Update the model's observing parts by the statistics of all ranks, after a step. All ranks must call."""
    gathered = ranks.gather(torch.cat([tensor.flatten().double() for tensor in observed]))
    # The sum has the order of the ranks, so every rank gets the same bits.
    totals = gathered.sum(0).split([tensor.numel() for tensor in observed])
    for part, tensor, total in zip(model.observers, observed, totals, strict=True):
        part.observe(total.view(tensor.shape))


def enter_stage(stage: Stage, engine: DeepSpeedEngine, guards: Guards) -> None:
    """Prepare the model and the guards for the steps of a stage."""
    engine.module.use_attention(stage.attention)
    if engine.global_steps == stage.first:
        guards.begin_stage()


def lacks_evaluation(step: int, run: RunSetup) -> bool:
    """Whether the evaluation of the step from which a run resumes was due and is not recorded. All ranks must call."""
    settings = run.config.train
    if step == 0 or not is_due(step, settings.evaluate_every, settings.last_step):
        return False
    split = run.config.data.validation_split
    lacks = run.ranks.is_first and step not in metrics_file.find_evaluations(run.folder, split)
    return bool(run.ranks.gather_objects(lacks)[0])


def is_due(step: int, every: int | None, last: int) -> bool:
    """Whether something is due after a step: every so many steps and at the last; 0: only the last; None: never."""
    return every is not None and (step == last or (every > 0 and step % every == 0))


def early_end(error: Exception, run: RunSetup, step: int) -> tuple[int, str]:
    """Return the exit code and the report line of a run that an error has ended after a step.

    A run that is stopped before its first step leaves no folder behind. Unexpected errors are raised again.
    """
    if isinstance(error, StopRequestedError) and step == 0:
        if run.ranks.is_first:
            discard_start(run.folder)
        return exit_codes.REQUEUE, f"stopped by {error} before the first step; nothing is kept"
    if isinstance(error, StopRequestedError):
        return exit_codes.REQUEUE, f"stopped by {error}; --resume auto continues"
    if isinstance(error, LostWorkerError):
        return exit_codes.HUNG, f"lost a process that reads data: {error}; --resume auto continues"
    if isinstance(error, GuardStopError):
        return exit_codes.GUARDED, f"stopped by a guard: {error}"
    if isinstance(error, NotSavedError):
        return exit_codes.UNFORESEEN, f"error: {error}"
    raise error


def summary(run: RunSetup, step: int, first: int, seconds: float, content_seen: int | None) -> list[str]:
    """Return the closing lines of a run whose last ``step`` is saved, after ``seconds`` from step ``first`` on.

    ``content_seen`` counts the bytes of content, or pixels, that all steps have read; None if they were not counted.
    """
    train, context = run.config.train, run.config.model.context
    is_byte = run.data.palette is None
    most = "" if run.data.fills_contexts else "up to "
    if content_seen is None:
        amount = f"{most}{counting.amount(step * train.global_batch * context)}"
    else:
        amount = counting.amount(content_seen)
    amount += "B" if is_byte else "pixels"
    duration = f", {f'the last {step - first:,} ' if first else ''}in {counting.duration(seconds)}"
    parts = [
        f"done: {step:,} steps of {train.global_batch:,} contexts of {most}{context:,} "
        f"{'bytes' if is_byte else 'pixels'}, {amount}{duration if step > first else ''}"
    ]
    scores = [score for score in Score.recorded(run.folder, run.config.data.validation_split) if score.bits_per_byte]
    if scores := [score for score in scores if score.compares_with(scores[-1])]:
        best = min(scores, key=lambda score: score.bits_per_byte or 0.0)
        unit = f"bits per {metrics_file.loss_unit(run.data.unit)}"
        parts.append(f"best {best.bits_per_byte:.4f} {unit} on {best.split}, at step {best.step:,}")
    folder = shlex.quote(str(run.folder))
    names = ("model", f"{run.folder.absolute().name}-model")  # names a new folder
    model = shlex.quote(next((name for name in names if not Path(name).exists()), f"{names[1]}-{step}"))
    split = "" if run.data.has_split(run.config.data.validation_split) else f" --split {run.config.data.train_split}"
    return [
        f"{'; '.join(parts)}; in {run.folder}",
        f"next: longstride evaluate {folder}{split}",
        f"      longstride export {folder} --output {model}",
        f"      longstride report {folder} --output report.html",
    ]
