"""The section `train`: its length, optimiser, outputs, and what happens to a step that goes wrong."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from longstride.kernels import ConfigError, Problem
from longstride.sparse_model import StrictModel

GuardPolicy = Literal["skip", "rewind", "stop"]
_RATES = "a learning rate for each part of the network; one that is left out has train.learning_rate"


class RatesConfig(StrictModel):
    """The learning rate of each part of the network; null: ``train.learning_rate``. The schedule scales all of them."""

    matrices: float | None = Field(default=None, gt=0, description="linear layers of the residual blocks")
    embeddings: float | None = Field(
        default=None, gt=0, description="of tokens and positions, and the tables of synthesizers"
    )
    vectors: float | None = Field(
        default=None,
        gt=0,
        description="norms, biases, convolutions, routers of experts, spans, the first position",
    )
    output: float | None = Field(default=None, gt=0, description="the projection to logits")
    tables: float | None = Field(default=None, gt=0, description="n-gram tables")


class AdamWConfig(StrictModel):
    """AdamW (Loshchilov and Hutter 2019) with a rate for each part."""

    type: Literal["adamw"] = Field(description="AdamW (Loshchilov and Hutter 2019)")
    rates: RatesConfig = Field(default=RatesConfig(), description=_RATES)


class MuonConfig(StrictModel):
    """Muon on matrices (Jordan et al. 2024), AdamW on all other parts."""

    type: Literal["muon"] = Field(description="Muon (Jordan et al. 2024) on matrices, AdamW on the rest")
    rates: RatesConfig = Field(default=RatesConfig(), description=_RATES)
    momentum: float = Field(default=0.95, ge=0, lt=1, description="decay of the mean gradient of a matrix")
    nesterov: bool = Field(default=True, description="look one step of the momentum ahead")
    steps: int = Field(default=5, gt=0, description="steps of the iteration that makes an update orthogonal")


class AdafactorConfig(StrictModel):
    """Adafactor (Shazeer and Stern 2018): second moments by row and column, steps relative to a tensor's size."""

    type: Literal["adafactor"] = Field(description="Adafactor (Shazeer and Stern 2018); ZeRO 0 alone")
    rates: RatesConfig = Field(default=RatesConfig(), description=_RATES)
    beta2_decay: float = Field(default=-0.8, lt=0, description="at step t, 1 - t^this is the weight of the past")
    smallest_scale: float = Field(
        default=1e-3, gt=0, description="smallest size of a tensor that its step is relative to"
    )
    clip: float = Field(default=1.0, gt=0, description="the root mean square at which a tensor's update is cut")


class WsdConfig(StrictModel):
    """Warm-up, a constant rate, and a linear decay to the final one."""

    type: Literal["wsd"] = Field(description="warm-up, a constant rate, and a linear decay to the final one")
    decay_fraction: float = Field(
        default=0.5, gt=0, le=1, description="share of all steps in which the rate decays, at the end"
    )


OptimizerConfig = Annotated[AdamWConfig | MuonConfig | AdafactorConfig, Field(discriminator="type")]
ScheduleConfig = Annotated[
    Annotated[Literal["cosine", "constant"], Tag("name")] | Annotated[WsdConfig, Tag("object")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "object"),  # or a mistake is reported twice
]


class SpikeConfig(StrictModel):
    """The rule for a spike: a loss too many standard deviations above the mean of the last losses."""

    deviations: float = Field(
        default=6.0, gt=0, description="standard deviations above the mean, from which a loss is a spike"
    )
    window: int = Field(
        default=100, ge=2, description="steps that mean and deviation are taken of; none is judged before"
    )
    policy: GuardPolicy = Field(default="skip", description="skip the batch, rewind past it, or stop")


class GuardsConfig(StrictModel):
    """The policies for steps that would spoil the weights."""

    non_finite: GuardPolicy = Field(
        default="stop", description="policy where the loss, or in bf16 and fp32 a gradient, is no finite number"
    )
    loss_scale_floor: GuardPolicy = Field(
        default="stop", description="policy where fp16 overflows and its loss scale is at its lowest"
    )
    spike: SpikeConfig | None = Field(
        default=None, description="policy where a loss is far above the last ones; null: no loss is too high"
    )
    max_skips_in_a_row: int = Field(
        default=10, gt=0, description="skipped steps in a row; the run stops at the last of them"
    )
    max_rewinds: int = Field(
        default=3, gt=0, description="rewinds that do not get the run beyond the place; the next one stops it"
    )


class StopWhenConfig(StrictModel):
    """The rule that ends a run before its last step: the validation loss no longer improves."""

    evaluations: int = Field(gt=0, description="evaluations in a row that did not improve")
    by: float = Field(
        default=0.0, ge=0, description="bits per byte, or per pixel of a palette; an evaluation improves by more"
    )


class SamplesConfig(StrictModel):
    """The samples that are taken from the model in training."""

    prompt: str = Field(default="", description="that the samples of text continue")
    bytes: int | None = Field(
        default=None, gt=0, description="to sample behind it; null: 256 of text, a whole picture, a context of sound"
    )
    count: int | None = Field(default=None, gt=0, le=64, description="samples at once; null: 4 of pictures, else 1")
    temperature: float = Field(default=1.0, ge=0, description="of the model's choice; 0 takes the most likely byte")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="sample among the fewest bytes that hold this share; null: among all"
    )
    seed: int = Field(default=0, ge=0, lt=2**62, description="with the step it decides what is drawn")


class TrainConfig(StrictModel):
    """The length and the optimisation of a run, and its outputs."""

    MOST_CONTEXTS: ClassVar[int] = 65_536  # in a micro-batch
    MOST_PROCESSES: ClassVar[int] = 16_384  # the manifest of more would be longer than the limit for reading one

    output: str = Field(min_length=1, description="run folder; one that holds a run is only taken with --resume")
    steps: int | None = Field(
        default=None,
        gt=0,
        le=10**15,
        description="optimiser steps of the whole run, skipped ones included; or give epochs",
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        description="in place of steps: passes over the train split; floor(epochs × contexts / global_batch) steps",
    )
    global_batch: int = Field(gt=0, le=10**9, description="contexts a step, over all processes")
    micro_batch: int = Field(
        gt=0, le=MOST_CONTEXTS, description="contexts a process runs at once; the rest of its share is accumulated"
    )
    learning_rate: float = Field(gt=0, description="the highest, at the end of the warm-up")
    optimizer: OptimizerConfig | None = Field(
        default=None, description="an object with a type; null: AdamW, with one rate for all parts"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps in which the learning rate rises from 0, linearly")
    schedule: ScheduleConfig = Field(
        default="cosine",
        description="between the two rates; constant: none; an object with type wsd: constant, then linear",
    )
    final_learning_rate: float = Field(default=0.0, ge=0, description="at the last step, where the schedule decays")
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled, on tensors of two or more dimensions")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), strict=False, description="of AdamW: decay of the mean gradient, and of its square"
    )
    eps: float = Field(default=1e-8, gt=0, description="of AdamW: added to the root of the mean square")
    ema_decay: float | None = Field(
        default=None, gt=0, lt=1, description="of a moving average of the weights, such as 0.999; null: none is kept"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="of the initial weights and of dropout")
    activation_checkpointing: bool = Field(
        default=False,
        description="recompute each residual block in the backward pass; not beside model.reversible",
    )
    compile: bool = Field(
        default=False, description="compile the residual blocks by torch.compile, for training steps alone"
    )
    sequence_parallel: int | None = Field(
        default=None, gt=0, description="processes that share each context; null: every process has its own"
    )
    sequence_exchange: Literal["heads", "keys", "auto"] = Field(
        default="auto", description="what attention exchanges between them; auto: in each layer what sends fewer bytes"
    )
    log_every: int = Field(default=1, gt=0, description="steps between lines of metrics.jsonl")
    evaluate_every: int | None = Field(
        default=0,
        ge=0,
        description="steps between evaluations; 0: at the end only; null: none, as of data without a validation split",
    )
    evaluate_contexts: int | None = Field(
        default=None, gt=0, description="contexts of an evaluation, evenly spread; null: the whole split"
    )
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: at the end only")
    checkpoint_in_background: bool = Field(
        default=False, description="copy to the host's memory, and write from there while training goes on"
    )
    keep_last: int | None = Field(default=None, gt=0, description="newest checkpoints that stay; null: all")
    keep_every: int | None = Field(
        default=None, gt=0, description="checkpoints of every step that this divides stay too"
    )
    keep_best: int = Field(
        default=0, ge=0, description="checkpoints with the lowest validation losses that are saved and stay"
    )
    probe: bool = Field(
        default=True, description="save the loss on one context with every checkpoint, and hold a loaded model to it"
    )
    timeout_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="of every collective, and of the meeting at the start: a process that waits longer ends",
    )
    max_seconds: float | None = Field(
        default=None,
        gt=0,
        description="since the start, until the run saves and ends, to be gone on with (exit code 75); null: no limit",
    )
    stop_when: StopWhenConfig | None = Field(
        default=None,
        description="end the run once the validation loss has come to a standstill; null: at the last step",
    )
    guards: GuardsConfig = Field(
        default=GuardsConfig(), description="what becomes of a step that would spoil the weights"
    )
    samples_every: int = Field(default=0, ge=0, description="steps between samples into the run folder; 0: never")
    samples: SamplesConfig = Field(default=SamplesConfig(), description="what is sampled then")

    left_out_at_default = (
        "optimizer",
        "compile",
        "sequence_parallel",
        "sequence_exchange",
        "keep_best",
        "stop_when",
        "samples_every",
        "samples",
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
        every = "null" if self.evaluate_every is None else self.evaluate_every
        rule = (
            f"goes by evaluations on the way, and evaluate_every is {every}: give it, such as 1000, or leave this out"
        )
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
        """Return the learning rate of a part of the network, a field of ``RatesConfig``; None: the general one."""
        rate: float | None = getattr(self.optimizer.rates, part) if self.optimizer and part else None
        return self.learning_rate if rate is None else rate

    @property
    def last_step(self) -> int:
        """The number of optimiser steps; a run by epochs needs ``resolve_steps`` of the data room first."""
        assert self.steps is not None, "epochs become steps once the data is known"
        return self.steps


def batch_problem(path: str, value: int, unit: int, divisor: str) -> Problem:
    """Return the problem of a batch that is no multiple of ``unit``, with the nearest multiples."""
    below = value // unit * unit
    good = ", ".join(str(multiple) for multiple in (below, below + unit) if multiple)
    return Problem(path, f"must be a multiple of {divisor}; nearest {good}", value)
