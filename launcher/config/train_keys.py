"""What `train` may hold: how long, how fast, what is written when, and what becomes of a step that goes wrong."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from longstride.kernels import ConfigError, Problem
from longstride.launcher.config.optimization import OptimizerConfig, ScheduleConfig
from longstride.sparse_model import StrictModel

GuardPolicy = Literal["skip", "rewind", "stop"]


class SpikeConfig(StrictModel):
    """What counts as a spike: a loss above the mean of the last ones by so many standard deviations."""

    deviations: float = Field(default=6.0, gt=0, description="above the mean, in standard deviations")
    window: int = Field(
        default=100, ge=2, description="steps that mean and deviation are taken of; none is judged before"
    )
    policy: GuardPolicy = "skip"


class GuardsConfig(StrictModel):
    """What becomes of a step that would spoil the weights."""

    non_finite: GuardPolicy = Field(
        default="stop", description="where the loss, or in bf16 and fp32 a gradient, is no finite number"
    )
    loss_scale_floor: GuardPolicy = Field(default="stop", description="where fp16 overflows at its lowest loss scale")
    spike: SpikeConfig | None = Field(default=None, description="null: no loss is too high")
    max_skips_in_a_row: int = Field(default=10, gt=0, description="that end the run: it would skip for ever")
    max_rewinds: int = Field(default=3, gt=0, description="that do not get beyond the place; the next stops")


class StopWhenConfig(StrictModel):
    """When a run is over before its last step: its validation loss has come to a standstill."""

    evaluations: int = Field(gt=0, description="in a row that did not improve")
    by: float = Field(
        default=0.0, ge=0, description="bits per byte, or per pixel of a palette; an evaluation improves by more"
    )


class TrainConfig(StrictModel):
    """How long, how fast, and what is written when."""

    MOST_CONTEXTS: ClassVar[int] = 65_536  # that are computed at once
    MOST_PROCESSES: ClassVar[int] = 16_384  # of a run: the manifest of more would be longer than what is read of one

    output: str = Field(min_length=1, description="run folder")
    steps: int | None = Field(
        default=None, gt=0, le=10**15, description="optimiser steps, skipped ones included; or give epochs"
    )
    epochs: float | None = Field(default=None, gt=0, description="passes over the train split, in place of steps")
    global_batch: int = Field(gt=0, le=10**9, description="contexts a step, over all processes")
    micro_batch: int = Field(gt=0, le=MOST_CONTEXTS, description="contexts a process runs at once")
    learning_rate: float = Field(gt=0, description="at the end of the warm-up")
    optimizer: OptimizerConfig | None = Field(default=None, description="null: AdamW, with one rate for all parts")
    warmup_steps: int = Field(default=0, ge=0, description="linear, from 0")
    schedule: ScheduleConfig = "cosine"
    final_learning_rate: float = Field(default=0.0, ge=0, description="at the last step, where the schedule decays")
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled, on tensors of two or more dimensions")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), strict=False
    )
    eps: float = Field(default=1e-8, gt=0)
    ema_decay: float | None = Field(
        default=None, gt=0, lt=1, description="of a moving average of the weights, such as 0.999; null: none is kept"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="of the initial weights and of dropout")
    activation_checkpointing: bool = Field(default=False, description="recompute each residual block in backward")
    compile: bool = Field(default=False, description="the residual blocks by torch.compile, for training steps alone")
    sequence_parallel: int | None = Field(
        default=None, gt=0, description="processes that share each context; null: every process has its own"
    )
    sequence_exchange: Literal["heads", "keys", "auto"] = Field(
        default="auto", description="what attention exchanges between them; auto: in each layer what sends fewer bytes"
    )
    log_every: int = Field(default=1, gt=0, description="steps between lines of metrics.jsonl")
    evaluate_every: int = Field(default=0, ge=0, description="steps; 0: at the end only")
    evaluate_contexts: int | None = Field(default=None, gt=0, description="contexts of an evaluation; null: all")
    checkpoint_every: int = Field(default=0, ge=0, description="steps; 0: at the end only")
    checkpoint_in_background: bool = Field(
        default=False, description="copy to the host's memory, and write from there while training goes on"
    )
    keep_last: int | None = Field(default=None, gt=0, description="checkpoints that stay; null: all")
    keep_every: int | None = Field(default=None, gt=0, description="steps whose checkpoints stay for ever")
    keep_best: int = Field(
        default=0, ge=0, description="checkpoints with the lowest validation losses that are saved and stay"
    )
    probe: bool = Field(
        default=True, description="save the loss on one context with every checkpoint, and hold a loaded model to it"
    )
    timeout_seconds: float = Field(
        default=1800.0, gt=0, description="of a collective: a process that waits longer ends"
    )
    max_seconds: float | None = Field(default=None, gt=0, description="until the run saves and stops; null: no limit")
    stop_when: StopWhenConfig | None = Field(
        default=None, description="the validation loss no longer falls; null: at the last step"
    )
    guards: GuardsConfig = GuardsConfig()

    left_out_at_default = (
        "optimizer",
        "compile",
        "sequence_parallel",
        "sequence_exchange",
        "keep_best",
        "stop_when",
    )

    @model_validator(mode="after")
    def _check_together(self) -> TrainConfig:
        problems = []
        if self.steps is None and self.epochs is None:
            problems.append(Problem("steps", "required, and missing; or give epochs"))
        elif self.steps is not None and self.epochs is not None:
            problems.append(Problem("epochs", f"must be left out where steps {self.steps} says the same", self.epochs))
        elif self.steps is not None and self.warmup_steps > self.steps:
            problems.append(Problem("warmup_steps", f"must be at most steps {self.steps}", self.warmup_steps))
        if self.final_learning_rate > self.learning_rate:
            rule = f"must be at most learning_rate {self.learning_rate}"
            problems.append(Problem("final_learning_rate", rule, self.final_learning_rate))
        for name in ("keep_every", "keep_best"):
            if getattr(self, name) and self.keep_last is None:
                rule = "says what stays beside the last ones: give keep_last too, such as 2; without it all stay"
                problems.append(Problem(name, rule, getattr(self, name)))
        rule = "goes by evaluations on the way, and evaluate_every is 0: give it, such as 1000"
        if self.keep_best and not self.evaluate_every:
            problems.append(Problem("keep_best", rule, self.keep_best))
        if self.stop_when and not self.evaluate_every:
            problems.append(Problem("stop_when.evaluations", rule, self.stop_when.evaluations))
        if self.sequence_parallel is None and self.sequence_exchange != "auto":
            rule = (
                "says what processes exchange that share a context: give sequence_parallel too, such as 2, or leave out"
            )
            problems.append(Problem("sequence_exchange", rule, self.sequence_exchange))
        if self.global_batch % self.micro_batch:
            divisor = f"micro_batch {self.micro_batch}"
            problems.append(batch_problem("global_batch", self.global_batch, self.micro_batch, divisor))
        if problems:
            raise ConfigError(*problems)
        return self

    def rate_of(self, part: str | None) -> float:
        """The learning rate of a part of the network, one of the fields of ``RatesConfig``; None: of all of it."""
        rate: float | None = getattr(self.optimizer.rates, part) if self.optimizer and part else None
        return self.learning_rate if rate is None else rate

    @property
    def last_step(self) -> int:
        """Optimiser steps of the run, which must be known: see the data room's ``resolve_steps``."""
        assert self.steps is not None, "epochs are steps only once the data is known"
        return self.steps


def batch_problem(path: str, value: int, unit: int, divisor: str) -> Problem:
    """The rule that a batch is a multiple, with the nearest that are."""
    below = value // unit * unit
    good = ", ".join(str(multiple) for multiple in (below, below + unit) if multiple)
    return Problem(path, f"must be a multiple of {divisor}; nearest {good}", value)
