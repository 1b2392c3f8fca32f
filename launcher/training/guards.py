"""What the figures of a training step say: go on, drop the batch, rewind or stop; and the record of each such step.

Guards neither compute nor communicate: the figures are those of all ranks together, so every rank decides the same. A
run writes an incident, `<run>/guards/step-00000123.json`, with everything that a replay needs. Numbers that are not
finite are the texts "nan", "inf" and "-inf", which JSON has no numbers for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from longstride.data_pipelines.durable import flush_folder
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import Score, write_json
from longstride.launcher.config import GuardPolicy, GuardsConfig, load_json_object
from longstride.launcher.data import Run
from longstride.launcher.engine import Overflow
from longstride.launcher.output import file_names, metrics_file
from longstride.sparse_model import StrictModel

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?\.json")
Number = float | str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a step that a guard refuses."""

    guard: str  # non_finite, loss_scale_floor, spike or overflows
    outcome: GuardPolicy
    reason: str  # figure, limit, and what else decided

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}"

    def stopping(self, why: str) -> Verdict:
        """The same guard's stop, where its own outcome is impossible."""
        return replace(self, outcome="stop", reason=f"{self.reason}; {why}")


class GuardMemory(StrictModel):
    """What the guards remember from step to step, as a checkpoint's manifest holds it."""

    losses: list[float] = Field(default_factory=list)  # nats a byte of the last steps that passed, oldest first
    skips_in_a_row: int = Field(default=0, ge=0)
    rewinds: int = Field(default=0, ge=0)  # without getting beyond the place
    place: int = Field(default=0, ge=0)  # the furthest step that was rewound from


class GuardStopError(Exception):
    """A guard ends the run, on every rank. The engine is as it was before the step."""

    def __init__(self, step: int, verdict: Verdict) -> None:
        self.step, self.verdict = step, verdict
        if verdict.guard == "overflows":
            advice = "lower deepspeed.fp16.loss_scale, or set it to 0, which lets it move, and --resume auto"
        else:
            way = f"--replay {step} shows the batch"
            if verdict.guard == "loss_scale_floor":
                way = "lower train.learning_rate or deepspeed.fp16.min_loss_scale, or train in bf16"
            key = f"train.guards.{'spike.policy' if verdict.guard == 'spike' else verdict.guard}"
            advice = f"{way}; --resume auto {key}=skip goes on without it, =rewind from the last checkpoint"
        super().__init__(f"step {step}: {verdict.reason}; {advice}")


class Guards:
    """Judges the steps of a run, one after another."""

    def __init__(self, settings: GuardsConfig, memory: dict[str, Any] | None = None) -> None:
        self._settings = settings
        self._memory = GuardMemory.model_validate(memory or {})
        self.verdict: Verdict | None = None  # on the last step; None: it passed

    def memory(self) -> dict[str, Any]:
        """What a checkpoint keeps of the guards, as JSON values."""
        return self._memory.model_dump(mode="json")

    def judge_loss(self, loss: float) -> Verdict | None:
        """The verdict on a step's loss, in nats a byte of all ranks; None: it passes."""
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
        """The verdict on a step whose loss has passed, by its overflow and fp16's loss scale; None: it passes."""
        settings, memory, self.verdict = self._settings, self._memory, None
        if overflow is Overflow.GRADIENT:
            reason = "the loss is finite, and its gradients are not"
            self.verdict = self._decide("non_finite", settings.non_finite, reason)
        elif overflow is Overflow.FLOOR:
            reason = f"gradients overflow at the lowest loss scale, {scale:g}"
            self.verdict = self._decide("loss_scale_floor", settings.loss_scale_floor, reason)
        elif overflow is Overflow.FIXED:  # DeepSpeed skips such a step; only many in a row are refused
            verdict = self._decide("overflows", "skip", f"gradients overflow at the fixed loss scale {scale:g}")
            self.verdict = verdict if verdict.outcome == "stop" else None
        if overflow in (None, Overflow.SCALE):  # it passes, and only a step that was taken ends a row of skips
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
        """Takes over what a checkpoint remembers, after the run was rewound to it from ``step``."""
        before = self._memory
        self._memory = GuardMemory.model_validate(memory or {}).model_copy(
            update={"rewinds": before.rewinds + 1, "place": max(before.place, step)}
        )

    def _decide(self, guard: str, policy: GuardPolicy, reason: str) -> Verdict:
        """The verdict by a policy, which becomes a stop where the policy has been tried often enough."""
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
    """Why a loss is a spike, in words: it is above mean + deviations × standard deviation of the last ones.

    None where it is not, or while there are fewer than ``window``. Sums are exact: every machine decides the same.
    """
    last = list(losses)[-window:]
    if len(last) < window:
        return None
    mean = math.fsum(last) / window
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in last) / (window - 1))
    if loss <= mean + deviations * deviation:
        return None
    return f"the loss {loss:.6g} > {mean:.6g} + {deviations:g} × {deviation:.6g} of the last {window} steps"


class Origin(StrictModel):
    """Where the steps before an incident started: at the beginning, a resume or a rewind."""

    step: int = Field(ge=0)  # of the checkpoint; 0: none
    stream: dict[str, Any]  # StreamState: the first batch after it


class Incident(StrictModel):
    """One step that a guard refused."""

    step: int = Field(gt=0)
    guard: str
    outcome: GuardPolicy
    reason: str
    loss_nats: Number
    rank_nats: list[Number]  # sums over the bytes of each rank; of its sections, where several share each context
    tokens: int  # bytes of all ranks
    grad_norm: Number | None  # None: no finite number, or not computed
    loss_scale: float
    learning_rate: float
    world_size: int = Field(gt=0)
    sequence_parallel: int | None = Field(default=None, gt=0)  # train.sequence_parallel
    origin: Origin
    stream: dict[str, Any]  # before the batch
    stream_after: dict[str, Any]
    rewound_to: int | None = None  # the checkpoint's step
    sample_ids: list[int]  # of the whole global batch, in order
    sample_ids_crc32: int

    left_out_at_default = ("sequence_parallel",)


def write_incident(run: Path, incident: Incident) -> Path:
    """Writes an incident beside earlier ones of the same step; returns the path."""
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
    """The incidents of a run; of each step the newest first.

    Raises:
        ConfigError: a file is damaged.
    """
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
    """A float as JSON can say it; ``float`` takes it back."""
    return value if math.isfinite(value) else str(value)


class PlateauMemory(StrictModel):
    """What is remembered from evaluation to evaluation, as a checkpoint's manifest holds it."""

    step: int = Field(default=0, ge=0)  # of the last evaluation
    best: Score | None = None  # what the next one is held against
    since: int = Field(default=0, ge=0)  # evaluations in a row that did not improve on it


class Plateau:
    """Holds each evaluation of a run against the best one before it. Without `train.stop_when` it does nothing.

    ``memory``: what the checkpoint that the run goes on from remembers. All ranks must make one together.
    """

    def __init__(self, run: Run, memory: dict[str, Any] | None = None) -> None:
        self._run, self._settings = run, run.config.train.stop_when
        self.recall(memory)

    def memory(self) -> dict[str, Any] | None:
        """What a checkpoint keeps, as JSON values."""
        return self._memory.model_dump(mode="json") if self._settings else None

    def recall(self, memory: dict[str, Any] | None) -> None:
        """Goes on from a checkpoint's memory, once metrics.jsonl ends with its step. All ranks must call.

        What the memory lacks is taken from there: a checkpoint may be saved before its own step is evaluated, and that
        of a run without `train.stop_when` remembers nothing.
        """
        self._memory = PlateauMemory.model_validate(memory or {})
        if self._settings is not None:
            run = self._run
            scores = Score.recorded(run.folder, run.config.data.validation_split) if run.ranks.is_first else []
            for score in run.ranks.gather_objects(scores)[0]:
                self.add(score)

    def add(self, score: Score) -> None:
        """Takes in the evaluation of a step, in the order of the steps; of a step that is known already, nothing."""
        settings, memory = self._settings, self._memory
        if settings is None or score.step <= memory.step:
            return
        if score.improves_on(memory.best, settings.by):
            self._memory = PlateauMemory(step=score.step, best=score)
        else:
            self._memory = PlateauMemory(step=score.step, best=memory.best, since=memory.since + 1)

    @property
    def reason(self) -> str | None:
        """Why the run is over; None: it is not."""
        settings, memory = self._settings, self._memory
        if settings is None or memory.since < settings.evaluations:
            return None
        unit = metrics_file.NO_BYTE if self._run.data.unit == metrics_file.NO_BYTE else "byte"
        by = f" by more than {settings.by:g} bits per {unit}" if settings.by else ""
        since = ": none was a number"
        if memory.best is not None:
            since = f", since {memory.best.bits_per_byte:.4f} at step {memory.best.step}"
        return f"the validation loss has not improved{by} for {memory.since} evaluations in a row{since}"
