"""What the figures of a training step say: go on, drop the batch, rewind or stop.

Nothing here computes or communicates: the figures are those of all ranks together, so every rank comes to the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from longstride.launcher.config import GuardPolicy, GuardsConfig
from longstride.launcher.engine import Overflow
from longstride.sparse_model import StrictModel

_KEYS = {
    "non_finite": "train.guards.non_finite",
    "loss_scale_floor": "train.guards.loss_scale_floor",
    "spike": "train.guards.spike.policy",
    "overflows": "train.guards.max_skips_in_a_row",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a step that a guard does not let pass."""

    guard: str  # a key of _KEYS
    outcome: GuardPolicy
    reason: str  # figure, limit, and what else decided

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}"

    def stopping(self, why: str) -> Verdict:
        """The same, where its outcome cannot be had."""
        return replace(self, outcome="stop", reason=f"{self.reason}; {why}")


class GuardMemory(StrictModel):
    """What the guards remember from step to step, as a checkpoint's manifest holds it."""

    losses: list[float] = Field(default_factory=list)  # nats a byte of the last steps that passed, oldest first
    skips_in_a_row: int = Field(default=0, ge=0)
    rewinds: int = Field(default=0, ge=0)  # without getting beyond the place
    place: int = Field(default=0, ge=0)  # the furthest step that was rewound from


class GuardStopError(Exception):
    """A guard ends the run, on every rank; the engine is as it was before the step."""

    def __init__(self, step: int, verdict: Verdict) -> None:
        self.step, self.verdict = step, verdict
        super().__init__(f"step {step}: {verdict.reason}; {_advice(step, verdict)}")


class Guards:
    """Judges the steps of a run, one after another."""

    def __init__(self, settings: GuardsConfig, memory: dict[str, Any] | None = None) -> None:
        self._settings = settings
        self._memory = GuardMemory.model_validate(memory or {})
        self.verdict: Verdict | None = None  # on the last step that was judged; None: it passed

    def memory(self) -> dict[str, Any]:
        """What a checkpoint has to keep, as JSON values."""
        return self._memory.model_dump(mode="json")

    def judge_loss(self, loss: float) -> Verdict | None:
        """Whether the step of this loss (nats a byte, of all ranks) is to be taken; None: as far as the loss tells."""
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
        """Whether what became of the step may stand; its loss had passed. ``scale``: of the loss, fp16 alone."""
        settings, self.verdict = self._settings, None
        if overflow is Overflow.GRADIENT:
            reason = "the loss is finite, and its gradients are not"
            self.verdict = self._decide("non_finite", settings.non_finite, reason)
        elif overflow is Overflow.FLOOR:
            reason = f"gradients overflow at the lowest loss scale, {scale:g}"
            self.verdict = self._decide("loss_scale_floor", settings.loss_scale_floor, reason)
        elif overflow is Overflow.FIXED:  # DeepSpeed skips such a step, which is told only once it goes on and on
            verdict = self._decide("overflows", "skip", f"gradients overflow at the fixed loss scale {scale:g}")
            self.verdict = verdict if verdict.outcome == "stop" else None
        if overflow in (None, Overflow.SCALE):
            self._accept(step, loss, taken=overflow is None)
        return self.verdict

    def rewound(self, step: int, memory: dict[str, Any] | None) -> None:
        """Takes over what a checkpoint remembers, after a step has been rewound from to it."""
        before = self._memory
        self._memory = GuardMemory.model_validate(memory or {}).model_copy(
            update={"rewinds": before.rewinds + 1, "place": max(before.place, step)}
        )

    def _accept(self, step: int, loss: float, *, taken: bool) -> None:
        """Remembers a step that passed; one whose loss scale was too high says nothing of skipping for ever."""
        spike, memory = self._settings.spike, self._memory
        changes: dict[str, Any] = {"losses": [*memory.losses, loss][-spike.window :] if spike else []}
        if taken:
            changes["skips_in_a_row"] = 0
            if step > memory.place:
                changes |= {"rewinds": 0, "place": 0}
        self._memory = memory.model_copy(update=changes)

    def _decide(self, guard: str, policy: GuardPolicy, reason: str) -> Verdict:
        """The outcome of a policy, which is to stop where it has been tried often enough."""
        verdict, memory, settings = Verdict(guard, policy, reason), self._memory, self._settings
        if policy == "skip":
            number = memory.skips_in_a_row + 1
            if number >= settings.max_skips_in_a_row:
                return verdict.stopping(
                    f"it is step {number} in a row, and train.guards.max_skips_in_a_row={settings.max_skips_in_a_row}"
                )
            self._memory = memory.model_copy(update={"skips_in_a_row": number})
        if policy == "rewind" and memory.rewinds >= settings.max_rewinds:
            return verdict.stopping(
                f"train.guards.max_rewinds={settings.max_rewinds} did not get beyond step {memory.place}"
            )
        return verdict


def spike_reason(loss: float, losses: Sequence[float], deviations: float, window: int) -> str | None:
    """What is wrong with a loss after the last ones, in words: above mean + deviations × standard deviation.

    None while there are fewer than ``window`` of them. Sums are exact, so that every machine decides the same.
    """
    last = list(losses)[-window:]
    if len(last) < window:
        return None
    mean = math.fsum(last) / window
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in last) / (window - 1))
    if loss <= mean + deviations * deviation:
        return None
    return f"the loss {loss:.6g} > {mean:.6g} + {deviations:g} × {deviation:.6g} of the last {window} steps"


def _advice(step: int, verdict: Verdict) -> str:
    """What a person can do after a stop."""
    if verdict.guard == "overflows":
        return "lower deepspeed.fp16.loss_scale, or set it to 0, which lets it move, and --resume auto"
    if verdict.guard == "loss_scale_floor":
        way = "lower train.learning_rate or deepspeed.fp16.min_loss_scale, or train in bf16"
    else:
        way = f"--replay {step} shows the batch"
    return f"{way}; --resume auto {_KEYS[verdict.guard]}=skip goes on without it, =rewind from the last checkpoint"
