"""The section `train`: its length, optimiser, outputs, and what happens to a step that goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from longstride.kernels import ConfigError, Problem
from longstride.sparse_model import StrictModel

MOST_STEPS = 10**15
GuardPolicy = Literal["skip", "rewind", "stop"]
_RATES = "learning rates of parts of the network; default: train.learning_rate"


class RatesConfig(StrictModel):
    """The learning rate of each part of the network; null: ``train.learning_rate``. The schedule scales all of them."""

    matrices: float | None = Field(default=None, gt=0, description="linear layers of the residual blocks")
    embeddings: float | None = Field(
        default=None, gt=0, description="token and position embeddings, tables of synthesizers"
    )
    vectors: float | None = Field(
        default=None,
        gt=0,
        description="norms, biases, convolutions, expert routers, sub-keys, spans, the first position",
    )
    output: float | None = Field(default=None, gt=0, description="the projection to logits")
    tables: float | None = Field(default=None, gt=0, description="n-gram tables, values of product keys")


class AdamWConfig(StrictModel):
    """AdamW (Loshchilov and Hutter 2019) with a rate for each part."""

    type: Literal["adamw"] = Field(description="AdamW (Loshchilov and Hutter 2019)")
    rates: RatesConfig = Field(default=RatesConfig(), description=_RATES)


class MuonConfig(StrictModel):
    """Muon on matrices (Jordan et al. 2024), AdamW on all other parts."""

    type: Literal["muon"] = Field(description="Muon (Jordan et al. 2024) for matrices, AdamW for the rest")
    rates: RatesConfig = Field(default=RatesConfig(), description=_RATES)
    momentum: float = Field(default=0.95, ge=0, lt=1, description="decay of a matrix's mean gradient")
    nesterov: bool = Field(default=True, description="whether to use Nesterov momentum")
    steps: int = Field(default=5, gt=0, description="iterations that orthogonalise an update")


class AdafactorConfig(StrictModel):
    """Adafactor (Shazeer and Stern 2018): second moments by row and column, steps relative to a tensor's size."""

    type: Literal["adafactor"] = Field(description="Adafactor (Shazeer and Stern 2018); only with ZeRO 0")
    rates: RatesConfig = Field(default=RatesConfig(), description=_RATES)
    beta2_decay: float = Field(
        default=-0.8, lt=0, description="exponent: at step t, the weight of the past is 1 - t^beta2_decay"
    )
    smallest_scale: float = Field(default=1e-3, gt=0, description="smallest tensor size to which a step is relative")
    clip: float = Field(default=1.0, gt=0, description="largest root mean square of a tensor's update")


class WsdConfig(StrictModel):
    """Warm-up, a constant rate, and a linear decay to the final one."""

    type: Literal["wsd"] = Field(description="warm-up, constant rate, linear decay to the final rate")
    decay_fraction: float = Field(
        default=0.5, gt=0, le=1, description="share of the steps, at the end, in which the rate decays"
    )


OptimizerConfig = Annotated[AdamWConfig | MuonConfig | AdafactorConfig, Field(discriminator="type")]
ScheduleConfig = Annotated[
    Annotated[Literal["cosine", "constant"], Tag("name")] | Annotated[WsdConfig, Tag("object")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "object"),  # or a mistake is reported twice
]


class SpikeConfig(StrictModel):
    """The rule for a spike: a loss too many standard deviations above the mean of the last losses."""

    deviations: float = Field(
        default=6.0, gt=0, description="standard deviations above the mean from which a loss is a spike"
    )
    window: int = Field(default=100, ge=2, description="steps over which mean and deviation are taken")
    policy: GuardPolicy = Field(default="skip", description="what to do at a spike")


class GuardsConfig(StrictModel):
    """Policies for steps that would corrupt the weights."""

    non_finite: GuardPolicy = Field(
        default="stop", description="policy for a loss, or in bf16 and fp32 a gradient, that is not finite"
    )
    loss_scale_floor: GuardPolicy = Field(
        default="stop", description="policy for an fp16 overflow at the lowest loss scale"
    )
    spike: SpikeConfig | None = Field(default=None, description="policy for a loss far above the last ones; null: off")
    max_skips_in_a_row: int = Field(default=10, gt=0, description="skipped steps in a row after which the run stops")
    max_rewinds: int = Field(default=3, gt=0, description="rewinds without progress; the next one stops the run")


class StopWhenConfig(StrictModel):
    """The rule that ends a run before its last step: the validation loss no longer improves."""

    evaluations: int = Field(gt=0, description="evaluations in a row without improvement")
    by: float = Field(
        default=0.0, ge=0, description="smallest improvement, in bits per byte (per pixel with a palette)"
    )


class SamplesConfig(StrictModel):
    """The samples that are taken from the model in training."""

    prompt: str = Field(default="", description="text that samples continue")
    bytes: int | None = Field(
        default=None, gt=0, description="length of a sample; null: 256 of text, a picture, a context of sound"
    )
    count: int | None = Field(default=None, gt=0, le=64, description="number of samples; null: 4 pictures, else 1")
    temperature: float = Field(default=1.0, ge=0, description="divides the logits; 0 takes the most likely byte")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="sample among the fewest bytes with this probability; null: among all"
    )
    seed: int = Field(default=0, ge=0, lt=2**62, description="seed, combined with the step")


class StageConfig(StrictModel):
    """A stage of a run, in which contexts have one length."""

    context: int = Field(gt=0, description="positions; divides model.context, which is the last stage's")
    steps: int | None = Field(
        default=None, gt=0, le=MOST_STEPS, description="optimiser steps; null: the rest of the run, in the last stage"
    )
    global_batch: int | None = Field(
        default=None, gt=0, description="contexts of this length per step; null: as many bytes as train.global_batch"
    )
    attention: Any = Field(
        default=None, description="mixers with the same parameters, in place of model.attention; null: model.attention"
    )
    trained: str | None = Field(
        default=None, description="the part of the network that the stage trains, such as indexer; null: all"
    )
    learning_rate: float | None = Field(
        default=None, gt=0, description="train.learning_rate in this stage; all rates scale with it; null: unchanged"
    )

    left_out_at_default = ("steps", "global_batch", "attention", "trained", "learning_rate")


class TrainConfig(StrictModel):
    """The length and the optimisation of a run, and its outputs."""

    MOST_CONTEXTS: ClassVar[int] = 65_536  # in a micro-batch
    MOST_PROCESSES: ClassVar[int] = 16_384  # the manifest of more would be longer than the limit for reading one

    output: str = Field(min_length=1, description="run folder; one that holds a run needs --resume")
    steps: int | None = Field(
        default=None, gt=0, le=MOST_STEPS, description="optimiser steps of the run, skipped ones included"
    )
    epochs: float | None = Field(
        default=None, gt=0, description="passes over the train split: floor(epochs × contexts / global_batch) steps"
    )
    global_batch: int = Field(gt=0, le=10**9, description="contexts per step over all processes")
    micro_batch: int = Field(
        gt=0, le=MOST_CONTEXTS, description="contexts that a process runs at once; gradients are accumulated"
    )
    context_schedule: tuple[StageConfig, ...] | None = Field(
        default=None,
        strict=False,
        description="stages of growing contexts, the last of model.context; null: all steps have model.context",
    )
    learning_rate: float = Field(gt=0, description="highest rate, reached at the end of the warm-up")
    optimizer: OptimizerConfig | None = Field(default=None, description="object with a type; null: AdamW with one rate")
    warmup_steps: int = Field(default=0, ge=0, description="steps in which the learning rate rises linearly from 0")
    schedule: ScheduleConfig = Field(
        default="cosine", description="decay between the two rates; type wsd: constant, then linear"
    )
    final_learning_rate: float = Field(default=0.0, ge=0, description="rate at the last step of a decaying schedule")
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled decay of tensors of two or more dimensions")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), strict=False, description="AdamW: decay of the mean gradient and of its square"
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW: added to the root of the mean square")
    ema_decay: float | None = Field(
        default=None, gt=0, lt=1, description="decay of a moving average of the weights, such as 0.999; null: none"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of initial weights and dropout")
    activation_checkpointing: bool = Field(
        default=False, description="recompute each residual block in the backward pass; not with model.reversible"
    )
    compile: bool = Field(
        default=False, description="compile residual blocks with torch.compile, for training steps only"
    )
    sequence_parallel: int | None = Field(
        default=None, gt=0, description="processes that share each context; null: none share"
    )
    sequence_exchange: Literal["heads", "keys", "auto"] = Field(
        default="auto", description="what these processes exchange for attention; auto: per layer, what sends least"
    )
    expert_parallel: int | None = Field(
        default=None, gt=0, description="neighbouring processes that divide the experts; null: ZeRO shards all weights"
    )
    log_every: int = Field(default=1, gt=0, description="steps between lines of metrics.jsonl")
    evaluate_every: int | None = Field(
        default=0, ge=0, description="steps between evaluations; 0: at the end only; null: none"
    )
    evaluate_contexts: int | None = Field(
        default=None, gt=0, description="evenly spread contexts of an evaluation; null: the whole split"
    )
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: at the end only")
    checkpoint_in_background: bool = Field(
        default=False, description="write checkpoints from a copy in host memory while training continues"
    )
    keep_last: int | None = Field(default=None, gt=0, description="newest checkpoints to keep; null: all")
    keep_every: int | None = Field(default=None, gt=0, description="also keep checkpoints of steps that this divides")
    keep_best: int = Field(
        default=0, ge=0, description="checkpoints with the lowest validation losses to save and keep"
    )
    probe: bool = Field(
        default=True, description="save the loss on a random context with each checkpoint and check it after loading"
    )
    timeout_seconds: float = Field(default=1800.0, gt=0, description="time-out of every collective and of the start")
    max_seconds: float | None = Field(
        default=None, gt=0, description="time after which the run saves and ends with exit code 75; null: no limit"
    )
    stop_when: StopWhenConfig | None = Field(
        default=None, description="end the run when the validation loss plateaus; null: at the last step"
    )
    guards: GuardsConfig = Field(
        default=GuardsConfig(), description="what to do with steps that would corrupt the weights"
    )
    samples_every: int = Field(default=0, ge=0, description="steps between samples; 0: never")
    samples: SamplesConfig = Field(default=SamplesConfig(), description="what is sampled")

    left_out_at_default = (
        "context_schedule",
        "optimizer",
        "compile",
        "sequence_parallel",
        "sequence_exchange",
        "expert_parallel",
        "keep_best",
        "stop_when",
        "samples_every",
        "samples",
    )

    @model_validator(mode="before")
    @classmethod
    def _derive_steps(cls, content: Any) -> Any:
        """Move the length of the last stage to ``steps``, so that only that changes if a run is prolonged."""
        stages = content.get("context_schedule") if isinstance(content, dict) else None
        if not (isinstance(stages, list | tuple) and stages and all(isinstance(stage, dict) for stage in stages)):
            return content
        lengths = [stage.get("steps") for stage in stages]
        if not all(isinstance(length, int) for length in lengths) or content.get("epochs") is not None:
            return content
        if content.get("steps") not in (None, sum(lengths)):
            rule = f"the stages have {sum(lengths)} steps, and train.steps is {content['steps']}; leave out one of both"
            raise ConfigError.at(f"context_schedule[{len(stages) - 1}].steps", lengths[-1], rule)
        last = {name: value for name, value in stages[-1].items() if name != "steps"}
        return content | {"steps": sum(lengths), "context_schedule": [*stages[:-1], last]}

    @model_validator(mode="after")
    def _check_together(self) -> TrainConfig:
        problems = [*self._schedule_problems()]
        if self.steps is None and self.epochs is None:
            problems.append(Problem("steps", "required, and missing; or give epochs"))
        elif self.steps is not None and self.epochs is not None:
            problems.append(Problem("epochs", f"conflicts with steps {self.steps}; give only one of them", self.epochs))
        elif self.steps is not None and self.warmup_steps > self.steps:
            problems.append(Problem("warmup_steps", f"must be at most steps {self.steps}", self.warmup_steps))
        if self.final_learning_rate > self.learning_rate:
            rule = f"must be at most learning_rate {self.learning_rate}"
            problems.append(Problem("final_learning_rate", rule, self.final_learning_rate))
        for name in ("keep_every", "keep_best"):
            if getattr(self, name) and self.keep_last is None:
                rule = "only applies with keep_last, because otherwise all checkpoints stay; give that too, such as 2"
                problems.append(Problem(name, rule, getattr(self, name)))
        every = "null" if self.evaluate_every is None else self.evaluate_every
        rule = (
            f"needs evaluations during training, but evaluate_every is {every}; set it, such as 1000, or leave this out"
        )
        if self.keep_best and not self.evaluate_every:
            problems.append(Problem("keep_best", rule, self.keep_best))
        if self.stop_when and not self.evaluate_every:
            problems.append(Problem("stop_when.evaluations", rule, self.stop_when.evaluations))
        if self.sequence_parallel is None and self.sequence_exchange != "auto":
            rule = "only applies with sequence_parallel; give that too, such as 2, or leave this out"
            problems.append(Problem("sequence_exchange", rule, self.sequence_exchange))
        if self.global_batch % self.micro_batch:
            divisor = f"micro_batch {self.micro_batch}"
            problems.append(batch_problem("global_batch", self.global_batch, self.micro_batch, divisor))
        if problems:
            raise ConfigError(*problems)
        return self

    def _schedule_problems(self) -> Iterator[Problem]:
        if self.context_schedule == ():
            yield Problem("context_schedule", "must have a stage; leave it out, or give null", [])
        *early, last = self.context_schedule or (None,)
        for number, stage in enumerate(early):
            if stage.steps is None:
                yield Problem(f"context_schedule[{number}].steps", "required, and missing: only the last may lack it")
        if last is not None and last.steps is not None:  # else it became ``steps``
            rule = "is the rest of the run; leave it out"
            yield Problem(f"context_schedule[{len(early)}].steps", rule, last.steps)
        first = sum(stage.steps or 0 for stage in early)
        if self.steps is not None and first >= self.steps:
            rule = f"the stages before the last have {first} steps; must be more than that"
            yield Problem("steps", rule, self.steps)

    def rate_of(self, part: str | None) -> float:
        """Return the learning rate of a part of the network, a field of ``RatesConfig``; None: the general one."""
        rate: float | None = getattr(self.optimizer.rates, part) if self.optimizer and part else None
        return self.learning_rate if rate is None else rate

    def highest_rate(self, step: int) -> float:
        """Return ``learning_rate`` at a step counted from 0, which its stage may replace."""
        first, rate = 0, None
        for stage in self.context_schedule or ():
            if first > step:
                break
            first, rate = first + (stage.steps or 0), stage.learning_rate
        return self.learning_rate if rate is None else rate

    @property
    def trained_parts(self) -> frozenset[str]:
        """The parts of the network that some stage trains alone."""
        return frozenset(stage.trained for stage in self.context_schedule or () if stage.trained is not None)

    @property
    def last_step(self) -> int:
        """The number of optimiser steps; a run by epochs needs ``resolve_steps`` of the data room first."""
        assert self.steps is not None, "epochs become steps once the data is known"
        return self.steps


def batch_problem(path: str, value: int, unit: int, divisor: str) -> Problem:
    """Return the problem of a batch that is no multiple of ``unit``, with the nearest multiples."""
    below = value // unit * unit
    suggestion = ", ".join(str(multiple) for multiple in (below, below + unit) if multiple)
    return Problem(path, f"must be a multiple of {divisor}; nearest {suggestion}", value)
