"""Judge training steps and evaluations: go on, drop the batch, rewind or stop; and do that.

Neither guards nor the plateau communicate. Their inputs are the same on every rank, so all ranks decide the same. For
each refused step a run writes an incident, `<run>/guards/step-00000123.json`, with everything that a replay needs. JSON
has no numbers for nan, inf and -inf, so these are written as text.

A full disk must not end a single rank, nor a run against the policy of a guard: failing writes are reported. If a
rewind cannot move the files back, it becomes a stop, which saves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine
from pydantic import Field

from longstride.data_pipelines.durable import flush_folder
from longstride.data_pipelines.order import Batch, StreamState
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import (
    Checkpoint,
    Score,
    error_line,
    first_undamaged,
    list_checkpoints,
    load,
    rewind_to,
    write_json,
)
from longstride.launcher.config import GuardPolicy, GuardsConfig, load_json_object
from longstride.launcher.data import GlobalBatch, RunSetup
from longstride.launcher.engine import Overflow
from longstride.launcher.output import file_names, metrics_file, say
from longstride.launcher.training.recorder import Recorder
from longstride.sparse_model import StrictModel

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?\.json")
Number = float | str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision of a guard on a step that it refuses."""

    guard: str  # non_finite, loss_scale_floor, spike or overflows
    outcome: GuardPolicy
    reason: str  # the figure, its limit, and any other cause

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}"

    def stopping(self, why: str) -> Verdict:
        """Return the verdict with the outcome "stop", for a guard whose own outcome is impossible."""
        return replace(self, outcome="stop", reason=f"{self.reason}; {why}")


class GuardMemory(StrictModel):
    """The state of the guards, as stored in a checkpoint's manifest."""

    losses: list[float] = Field(default_factory=list)  # nats per byte of the last steps that passed, oldest first
    skips_in_a_row: int = Field(default=0, ge=0)
    rewinds: int = Field(default=0, ge=0)  # without passing ``place``
    place: int = Field(default=0, ge=0)  # the furthest step from which the run was rewound


class GuardStopError(Exception):
    """A guard stops the run, on every rank. The engine is as it was before the step."""

    def __init__(self, step: int, verdict: Verdict) -> None:
        self.step, self.verdict = step, verdict
        if verdict.guard == "overflows":
            advice = "lower deepspeed.fp16.loss_scale, or set it to 0 for a dynamic scale, and --resume auto"
        else:
            way = f"--replay {step} shows the batch"
            if verdict.guard == "loss_scale_floor":
                way = "lower train.learning_rate or deepspeed.fp16.min_loss_scale, or train in bf16"
            key = f"train.guards.{'spike.policy' if verdict.guard == 'spike' else verdict.guard}"
            advice = f"{way}; --resume auto {key}=skip continues without it, =rewind from the last checkpoint"
        super().__init__(f"step {step}: {verdict.reason}; {advice}")


class Guards:
    """Judges the steps of a run in order."""

    def __init__(self, settings: GuardsConfig, memory: dict[str, Any] | None = None) -> None:
        self._settings = settings
        self._memory = GuardMemory.model_validate(memory or {})
        self.verdict: Verdict | None = None  # on the last step; None if it passed

    def memory(self) -> dict[str, Any]:
        """Return the state of the guards for a checkpoint, as JSON values."""
        return self._memory.model_dump(mode="json")

    def begin_stage(self) -> None:
        """Forget the losses of contexts of another length."""
        self._memory = self._memory.model_copy(update={"losses": []})

    def judge_loss(self, loss: float) -> Verdict | None:
        """Check a step by its loss, in nats per byte over all ranks; return None if it passes."""
        spike = self._settings.spike
        self.verdict = None
        if not math.isfinite(loss):
            self.verdict = self._decide("non_finite", self._settings.non_finite, f"the loss is {loss}")
        elif spike is not None:
            reason = spike_reason(loss, self._memory.losses, spike.deviations, spike.window)
            if reason:
                self.verdict = self._decide("spike", spike.policy, reason)
        return self.verdict

    def judge_gradients(self, step: int, loss: float, overflow: Overflow | None, scale: float) -> Verdict | None:
        """Check a step by its overflow and fp16's loss scale, after its loss; return None if it passes."""
        settings, memory, self.verdict = self._settings, self._memory, None
        if overflow is Overflow.GRADIENT:
            reason = "the loss is finite, but its gradients are not"
            self.verdict = self._decide("non_finite", settings.non_finite, reason)
        elif overflow is Overflow.FLOOR:
            reason = f"gradients overflow at the lowest loss scale, {scale:g}"
            self.verdict = self._decide("loss_scale_floor", settings.loss_scale_floor, reason)
        elif overflow is Overflow.FIXED:  # DeepSpeed skips such a step; only many in a row are refused
            verdict = self._decide("overflows", "skip", f"gradients overflow at the fixed loss scale {scale:g}")
            self.verdict = verdict if verdict.outcome == "stop" else None
        if overflow in (None, Overflow.SCALE):  # the step passes; only one without overflow ends a row of skips
            changes: dict[str, Any] = {"losses": []}
            if settings.spike:
                changes["losses"] = [*memory.losses, loss][-settings.spike.window :]
            if overflow is None:
                changes["skips_in_a_row"] = 0
                if step > memory.place:
                    changes |= {"rewinds": 0, "place": 0}
            self._memory = memory.model_copy(update=changes)
        return self.verdict

    def rewound(self, step: int, memory: dict[str, Any] | None) -> None:
        """Restore the state from a checkpoint, after a rewind to it from ``step``."""
        before = self._memory
        self._memory = GuardMemory.model_validate(memory or {}).model_copy(
            update={"rewinds": before.rewinds + 1, "place": max(before.place, step)}
        )

    def _decide(self, guard: str, policy: GuardPolicy, reason: str) -> Verdict:
        """Apply a policy, which becomes a stop once it has reached its limit."""
        verdict, memory, settings = Verdict(guard, policy, reason), self._memory, self._settings
        if policy == "skip":
            number = memory.skips_in_a_row + 1
            most = settings.max_skips_in_a_row
            if number >= most:
                return verdict.stopping(f"it is step {number} in a row, and train.guards.max_skips_in_a_row={most}")
            self._memory = memory.model_copy(update={"skips_in_a_row": number})
        if policy == "rewind" and memory.rewinds >= settings.max_rewinds:
            most = settings.max_rewinds
            return verdict.stopping(f"train.guards.max_rewinds={most} did not get beyond step {memory.place}")
        return verdict


def spike_reason(loss: float, losses: Sequence[float], deviations: float, window: int) -> str | None:
    """Explain why a loss is a spike: it exceeds mean + deviations × standard deviation of the last ``window`` losses.

    Returns None if it does not, or with fewer losses. Sums are exact, so every machine decides the same.
    """
    last = list(losses)[-window:]
    if len(last) < window:
        return None
    mean = math.fsum(last) / window
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in last) / (window - 1))
    if loss <= mean + deviations * deviation:
        return None
    return f"the loss {loss:.6g} > {mean:.6g} + {deviations:g} × {deviation:.6g} of the last {window} steps"


class Origin(StrictModel):
    """The last start, resume or rewind before an incident."""

    step: int = Field(ge=0)  # of the checkpoint; 0 without one
    stream: dict[str, Any]  # StreamState of the first batch after it


class Incident(StrictModel):
    """The record of a step that a guard refused."""

    step: int = Field(gt=0)
    guard: str
    outcome: GuardPolicy
    reason: str
    loss_nats: Number
    rank_nats: list[Number]  # loss of each rank, summed over its bytes; with sequence parallelism, over its sections
    tokens: int  # bytes of all ranks
    grad_norm: Number | None  # None if not finite or not computed
    loss_scale: float
    learning_rate: float
    world_size: int = Field(gt=0)
    sequence_parallel: int | None = Field(default=None, gt=0)  # train.sequence_parallel
    origin: Origin
    stream: dict[str, Any]  # before the batch
    stream_after: dict[str, Any]
    rewound_to: int | None = None  # the checkpoint's step
    sample_ids: list[int]  # of the global batch, in order
    sample_ids_crc32: int

    left_out_at_default = ("sequence_parallel",)


def write_incident(run: Path, incident: Incident) -> Path:
    """Write an incident under a new name and return its path. A step may have several."""
    folder = run / file_names.GUARDS
    folder.mkdir(exist_ok=True)
    stem = f"step-{incident.step:08d}"
    path, number = folder / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.json"
    write_json(path, incident.model_dump(mode="json"))
    flush_folder(folder)
    return path


def read_incidents(run: Path) -> dict[Path, Incident]:
    """Read a run's incidents by path, latest step first, newest first within a step; ConfigError if one is damaged."""
    files = [
        (match, path) for path in (run / file_names.GUARDS).glob("*.json") if (match := _NAME.fullmatch(path.name))
    ]
    files.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 1)), reverse=True)
    incidents = {}
    for _, path in files:
        try:
            incidents[path] = Incident.model_validate(load_json_object(path))
        except ConfigError as error:
            raise ConfigError(*(f"{path}: {problem}" for problem in error.problems)) from None
    return incidents


def as_number(value: float) -> Number:
    """Convert a float for JSON; ``float`` converts it back."""
    return value if math.isfinite(value) else str(value)


class PlateauMemory(StrictModel):
    """The state of the plateau, as stored in a checkpoint's manifest."""

    step: int = Field(default=0, ge=0)  # of the last evaluation
    best: Score | None = None  # the next one must improve on it
    since: int = Field(default=0, ge=0)  # evaluations in a row that did not improve on it


class Plateau:
    """Compares each evaluation of a run with the best before it. Without `train.stop_when` it does nothing.

    All ranks must construct it together. ``memory`` is the state in the checkpoint from which the run resumes.
    """

    def __init__(self, run: RunSetup, memory: dict[str, Any] | None = None) -> None:
        self._run, self._settings = run, run.config.train.stop_when
        self.recall(memory)

    def memory(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint, as JSON values."""
        return self._memory.model_dump(mode="json") if self._settings else None

    def recall(self, memory: dict[str, Any] | None) -> None:
        """Restore the state from a checkpoint, once metrics.jsonl ends with its step. All ranks must call.

        Evaluations that the checkpoint lacks come from metrics.jsonl. A checkpoint may be saved before its own step is
        evaluated, and a run without `train.stop_when` stores none.
        """
        self._memory = PlateauMemory.model_validate(memory or {})
        if self._settings is not None:
            run = self._run
            scores = Score.recorded(run.folder, run.config.data.validation_split) if run.ranks.is_first else []
            for score in run.ranks.gather_objects(scores)[0]:
                self.add(score)

    def add(self, score: Score) -> None:
        """Add the evaluation of a step, in the order of steps. A repeated step changes nothing."""
        settings, memory = self._settings, self._memory
        if settings is None or score.step <= memory.step:
            return
        if score.context not in (None, self._run.config.model.context):  # only the last stage ends a run
            return
        if score.improves_on(memory.best, settings.by):
            self._memory = PlateauMemory(step=score.step, best=score)
        else:
            self._memory = PlateauMemory(step=score.step, best=memory.best, since=memory.since + 1)

    @property
    def reason(self) -> str | None:
        """Why the run is over; None if it is not."""
        settings, memory = self._settings, self._memory
        if settings is None or memory.since < settings.evaluations:
            return None
        unit = metrics_file.loss_unit(self._run.data.unit)
        by = f" by more than {settings.by:g} bits per {unit}" if settings.by else ""
        since = ": none was a number"
        if memory.best is not None:
            since = f", since {memory.best.bits_per_byte:.4f} at step {memory.best.step}"
        return f"the validation loss has not improved{by} for {memory.since} evaluations in a row{since}"


class GuardResponse:
    """Responds to a guard's verdict: records an incident, and rewinds or stops the run, which starts at ``state``."""

    def __init__(
        self,
        run: RunSetup,
        engine: DeepSpeedEngine,
        guards: Guards,
        plateau: Plateau,
        recorder: Recorder,
        state: StreamState,
    ) -> None:
        self._run, self._engine, self._recorder = run, engine, recorder
        self._guards, self._plateau = guards, plateau
        self._origin = Origin(step=engine.global_steps, stream=state.to_json())

    def act(
        self, verdict: Verdict, line: dict[str, Any], batch: GlobalBatch[Batch], before: StreamState
    ) -> Checkpoint | None:
        """Record a refused step and act on it; return the checkpoint of a rewind. All ranks must call.

        ``line`` is the step's, for metrics.jsonl, and ``before`` the stream before its batch.

        Raises:
            GuardStopError: the run must stop.
        """
        run, step, checkpoint = self._run, line["step"], None
        moved: list[Path] = []
        if verdict.outcome == "rewind":
            checkpoint = last_undamaged_checkpoint(run, step)
            if checkpoint is None:
                verdict = verdict.stopping("there is no complete checkpoint to rewind to")
            else:
                moved, failure = self._move_files(checkpoint.manifest.step, line)
                if failure is not None:
                    checkpoint, verdict = None, verdict.stopping(f"the run folder could not be rewound: {failure}")
        line["guard"] = str(verdict)  # may have become a stop
        if checkpoint is None:
            self._recorder.write(line)
        after = batch.part.state
        if run.ranks.is_first:
            names = ("step", "rank_nats", "tokens", "grad_norm", "loss_scale", "learning_rate", "sample_ids_crc32")
            incident = Incident(
                guard=verdict.guard,
                outcome=verdict.outcome,
                reason=verdict.reason,
                loss_nats=as_number(sum(map(float, line["rank_nats"])) / line["tokens"]),
                world_size=run.ranks.world_size,
                sequence_parallel=run.config.train.sequence_parallel,
                origin=self._origin,
                stream=before.to_json(),
                stream_after=after.to_json(),
                rewound_to=checkpoint.manifest.step if checkpoint else None,
                sample_ids=list(batch.sample_ids),
                **{name: line[name] for name in names},
            )
            try:
                where = f"written to {write_incident(run.folder, incident)}"
            except OSError as error:
                where = f"not written down: {error_line(error, run.folder / file_names.GUARDS)}"
            self._recorder.say(f"step {step}: {verdict}; {where}")
            for path in moved:
                self._recorder.say(f"kept later data as {path}")
        if verdict.outcome == "stop":
            raise GuardStopError(step, verdict)
        if checkpoint is None:
            return None
        load(self._engine, checkpoint, run.config, run.ranks)
        back = checkpoint.manifest.step
        self._guards.rewound(step, checkpoint.manifest.guards)
        self._plateau.recall(checkpoint.manifest.plateau)
        self._origin = Origin(step=back, stream=after.to_json())
        self._recorder.go_back(back, f"rewound from step {step}")
        self._recorder.say(f"step {back}: continuing from {checkpoint.folder} with the batch after that of step {step}")
        return checkpoint

    def _move_files(self, step: int, line: dict[str, Any]) -> tuple[list[Path], str | None]:
        """Move aside what is beyond a step; return the new paths and a failure. All ranks must call.

        Lines are cut last, in one rename. If that fails, the newest checkpoint still has all of its lines.
        """
        moved: list[Path] = []
        failure, folder = None, self._run.folder
        if self._run.ranks.is_first:
            try:
                moved += rewind_to(folder, step)
                moved += filter(None, [self._recorder.rewind(step, line)])
            except OSError as error:
                failure = error_line(error, folder)
        return moved, self._run.ranks.gather_objects(failure)[0]


def last_undamaged_checkpoint(run: RunSetup, before: int) -> Checkpoint | None:
    """Return the newest intact checkpoint before a step, the same on every rank; None if there is none.

    AgreedError on every rank means that one does not see the first one's files, or that the checkpoint must be trusted.
    """
    checkpoints = list_checkpoints(run.folder, trusted=run.trusted)[0] if run.ranks.is_first else []
    earlier = [checkpoint for checkpoint in checkpoints if checkpoint.manifest.step < before]
    checkpoint, damaged = first_undamaged(run.folder, earlier, run.ranks)
    if run.ranks.is_first:
        for line in damaged:
            say(f"passed over: {line}")
    return checkpoint
