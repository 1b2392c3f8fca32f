"""RunConfig: one JSON file with model, data, train and deepspeed, checked whole before anything starts."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from longstride.data_pipelines.settings import MOST_SECONDS, SHUFFLE_BYTES, RemoteSettings
from longstride.kernels import ConfigError, Problem, nearest
from longstride.launcher.config.deepspeed_keys import check_keys, precision
from longstride.launcher.config.json_file import load_json_object, parse_override, put
from longstride.launcher.config.optimization import AdafactorConfig, OptimizerConfig, ScheduleConfig
from longstride.sparse_model import ModelConfig, StrictModel

DEEPSPEED_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
EXPERIMENTS = DEEPSPEED_CONFIGS / "experiments"
TRUST_OPTION = "--trust-checkpoint"

_NAME_OR_OBJECT = {
    "anyOf": [{"type": "string", "description": "a file of ds_configs/, without .json"}, {"type": "object"}],
    "description": "a DeepSpeed configuration, or the name of one",
}
_REMOTE = RemoteSettings()
_URL = re.compile(r"(?P<protocol>[^/]+://)(?P<user>[^/?#]*@)?(?P<path>[^?]*)(?P<query>\?.*)?")


class RemoteConfig(StrictModel):
    """How remote shards are fetched. Credentials come from the environment of the store's library, never from here."""

    cache: str | None = Field(default=None, min_length=1, description="folder; null: longstride in the user's cache")
    cache_bytes: int = Field(default=_REMOTE.cache_bytes, gt=0, description="that the cache may hold")
    attempts: int = Field(default=_REMOTE.attempts, gt=0, description="in a row that bring nothing")
    timeout_seconds: float = Field(
        default=_REMOTE.timeout_seconds, gt=0, le=MOST_SECONDS, description="of one that stalls"
    )
    parallel: int = Field(default=_REMOTE.parallel, gt=0, le=1024, description="files fetched ahead at once")
    most_bytes: int = Field(
        default=_REMOTE.most_bytes, gt=0, description="of a manifest, or another file whose size is not known before"
    )
    least_bytes_per_second: float = Field(
        default=_REMOTE.least_bytes_per_second, gt=0, le=MOST_SECONDS, description="of a fetch, its attempts together"
    )
    window_seconds: float = Field(
        default=_REMOTE.window_seconds, gt=0, le=MOST_SECONDS, description="that a fetch may fall behind that rate"
    )


class PackingConfig(StrictModel):
    """How packed documents meet in a context."""

    attend: Literal["context", "document"] = Field(
        description="document: each is computed as in a context of its own; context: they are one text, as with true"
    )


class DataConfig(StrictModel):
    """Where the bytes come from."""

    path: str = Field(
        min_length=1, description="folder of `longstride data build` or `index`, or its http(s):// or s3:// URL"
    )
    train_split: str = Field(default="train", min_length=1)
    validation_split: str = Field(default="validation", min_length=1)
    order: Literal["exact", "streaming"] = Field(
        default="exact", description="streaming: of older runs alone; `longstride data index` takes its place"
    )
    modality: str | None = Field(default=None, description="of older runs alone; a data folder knows its own")
    extension: str | None = Field(default=None, description="of older runs alone; a data folder knows its own")
    seed: int = Field(default=0, ge=0, lt=2**64, description="of the order of the shards")
    shuffle_bytes: int = Field(default=SHUFFLE_BYTES, ge=0, description="each lane is shuffled in blocks of this size")
    packing: bool | PackingConfig | None = Field(
        default=None,
        description="documents laid end to end, and how they meet; null: text yes, pictures and sounds no",
    )
    separator: int | None = Field(default=None, ge=0, le=255, description="a byte behind each packed document")
    hop: int | None = Field(
        default=None, gt=0, description="bytes between the contexts of a document that is not packed; null: the context"
    )
    on_damage: Literal["abort", "substitute"] = Field(
        default="abort", description="what becomes of a context that cannot be read"
    )
    workers: int = Field(default=0, ge=0, le=1024, description="processes a rank that read ahead")
    prefetch: int = Field(default=2, gt=0, le=65_536, description="steps that each worker reads ahead")
    worker_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        description="without anything from a worker that is waited for; null: half of train.timeout_seconds",
    )
    remote: RemoteConfig = RemoteConfig()

    left_out_at_default = ("worker_timeout_seconds",)

    @field_validator("packing", mode="before")
    @classmethod
    def _packing_object(cls, value: Any) -> Any:
        """An object is told by its own rules alone, and not by those of a bool too."""
        return PackingConfig.model_validate(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_together(self) -> DataConfig:
        problems = []
        url = _URL.fullmatch(self.path)
        if url and (url["user"] or url["query"]):
            rule = "has a user or a query, which would be saved with the run: leave them out, and give credentials by "
            rule += "the environment (~/.netrc, AWS_PROFILE)"
            problems.append(Problem("path", rule, f"{url['protocol']}***{url['path']}"))
        if self.train_split == self.validation_split:
            rule = (
                "must be another split than train_split, or the score would be of what was learned; such as validation"
            )
            problems.append(Problem("validation_split", rule, self.validation_split))
        for name, value in (("modality", self.modality), ("extension", self.extension)):
            if self.order == "exact" and value is not None:
                rule = f"a data folder knows its own; leave it out, and give --{name} to `longstride data index`"
                problems.append(Problem(name, rule, value))
        if problems:
            raise ConfigError(*problems)
        return self

    @property
    def packed(self) -> bool | None:
        """Whether documents are laid end to end; None: as the modality has it."""
        return True if isinstance(self.packing, PackingConfig) else self.packing

    @property
    def apart(self) -> bool:
        """Whether packed documents do not see each other."""
        return isinstance(self.packing, PackingConfig) and self.packing.attend == "document"

    def check_order(self) -> None:
        """Whether the data can be read; the order "streaming" is known only so that older runs can be exported.

        Raises:
            ConfigError: it is "streaming", with the command that converts.
        """
        if self.order == "exact":
            return
        options = [f"--{name} {value}" for name in ("modality", "extension") if (value := getattr(self, name))]
        command = " ".join(["longstride data index", self.path, "--output DIR", *options])
        rule = f"is read no longer: run `{command}`, set data.path to DIR, leave out order, modality and extension"
        raise ConfigError.at("data.order", self.order, f"{rule}; such as exact, in a new run")


# The data room's settings by their names there, and their paths in the configuration.
DATA_PATHS = {
    **{name: f"data.{name}" for name in DataConfig.model_fields},
    **{name: f"data.remote.{name}" for name in RemoteConfig.model_fields},
}
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
            problems.append(_batch_problem("global_batch", self.global_batch, self.micro_batch, divisor))
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


class RunConfig(StrictModel):
    """A whole run. ``deepspeed`` is given inline or by name; here it is always the object itself."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    deepspeed: Annotated[dict[str, Any], WithJsonSchema(_NAME_OR_OBJECT)]
    notes: str = Field(default="", description="free text")

    @field_validator("deepspeed")
    @classmethod
    def _check_deepspeed(cls, section: dict[str, Any]) -> dict[str, Any]:
        check_keys(section)
        return section

    @model_validator(mode="after")
    def _check_together(self) -> RunConfig:
        recomputing = self.deepspeed.get("activation_checkpointing", {})
        count = recomputing.get("number_checkpoints")
        if recomputing.get("contiguous_memory_optimization") and count != self.model.layers:
            rule = f"must be model.layers {self.model.layers}: every residual block is a checkpoint"
            raise ConfigError.at("deepspeed.activation_checkpointing.number_checkpoints", count, rule)
        if self.model.reversible:
            rules = {
                "activation_checkpointing": "recomputes from inputs, and model.reversible from outputs; give false",
                "compile": "compiles blocks whole, and model.reversible computes their halves again; give false",
            }
            wrong = [name for name in rules if getattr(self.train, name)]
            if wrong:
                raise ConfigError(*(Problem(f"train.{name}", rules[name], True) for name in wrong))
        limit, given = self.train.timeout_seconds, self.data.worker_timeout_seconds
        if given is not None and given >= limit:
            rule = f"must be less than train.timeout_seconds {limit:g}, after which other processes give this one up"
            raise ConfigError.at("data.worker_timeout_seconds", given, f"{rule}; {limit / 2:g}")
        if self.train.sequence_parallel is not None:
            self._check_division(self.train.sequence_parallel)
        if self.data.apart:
            self._check_documents()
        if isinstance(self.train.optimizer, AdafactorConfig) and self.zero_stage:
            rule = (
                f"takes means over rows and columns of whole matrices, which ZeRO {self.zero_stage} cuts; take muon or "
            )
            raise ConfigError.at(
                "train.optimizer.type", "adafactor", f"{rule}adamw, or deepspeed zero0_{self.precision}"
            )
        return self

    @property
    def worker_timeout_seconds(self) -> float:
        """How long nothing may come from a loader worker that is waited for.

        Where nothing else is asked for, half of what other processes wait for this one; but longer than a store, which
        tries again and again, may take to bring a byte.
        """
        if self.data.worker_timeout_seconds is not None:
            return self.data.worker_timeout_seconds
        remote = self.data.remote
        store = 2 * remote.attempts * remote.timeout_seconds if "://" in self.data.path else 0.0
        return max(self.train.timeout_seconds / 2, store)

    def _check_division(self, processes: int) -> None:
        """Whether so many processes can share each context."""
        if self.train.compile:
            rule = "compiles blocks whole, and train.sequence_parallel exchanges rows within them; give false"
            raise ConfigError.at("train.compile", True, rule)
        try:
            self.model.check_division(processes, self.train.sequence_exchange, documents=self.data.apart)
        except ConfigError as error:
            raise error.under("model") from None

    def _check_documents(self) -> None:
        """Whether the model keeps documents apart."""
        try:
            self.model.check_documents()
        except ConfigError as error:
            raise error.under("model") from None
        if self.model.backend == "flex":
            raise ConfigError.at("model.backend", "flex", "cannot keep documents apart; take auto")

    @property
    def precision(self) -> str:
        """In which the model computes: fp32, fp16 or bf16."""
        return precision(self.deepspeed)

    @property
    def zero_stage(self) -> int:
        """What DeepSpeed shards over the ranks: 0 to 3."""
        return int(self.deepspeed.get("zero_optimization", {}).get("stage", 0))

    def check_world_size(self, world_size: int) -> None:
        """Whether so many processes divide by those that share a context, and the batch over what that makes of them.

        Raises:
            ConfigError: one of them does not, or a run has fewer processes.
        """
        train, shared = self.train, self.train.sequence_parallel or 1
        if world_size > train.MOST_PROCESSES:
            raise ConfigError(f"{world_size} processes: a run has at most {train.MOST_PROCESSES:,}; start fewer")
        if world_size % shared:
            near = min((d for d in range(1, world_size + 1) if world_size % d == 0), key=lambda d: abs(d - shared))
            rule = f"must divide the {world_size} process{'es' if world_size > 1 else ''}; nearest {near}"
            rule += f"; or start {-(-world_size // shared) * shared} processes"
            raise ConfigError.at("train.sequence_parallel", shared, rule)
        unit = train.micro_batch * world_size // shared
        if train.global_batch % unit == 0:
            return
        divisor = f"micro_batch {train.micro_batch} × {world_size} processes"
        if shared > 1:
            divisor += f" / {shared} that share a context"
        problem = _batch_problem("train.global_batch", train.global_batch, unit, divisor)
        # A resumed run cannot take another batch, but other processes can share the one it has.
        shares = train.global_batch // train.micro_batch
        fitting = [count * shared for count in range(1, shares + 1) if shares % count == 0]
        below = max(count for count in fitting if count < world_size)
        good = " or ".join(map(str, [below, *[count for count in fitting if count > world_size][:1]]))
        raise ConfigError(replace(problem, rule=f"{problem.rule}; or start {good} processes"))

    def check_hosts(self, hosts: Sequence[str]) -> None:
        """Whether processes on these hosts, one name a rank, are a run: ``check_world_size``, and no host is cut.

        Neighbours share a context: they are to be on one host, or to be all of several hosts. Where a host is cut, one
        group alone sends what each layer exchanges over the network, and all others wait for it.

        Raises:
            ConfigError: the processes do not divide, or a host is cut.
        """
        self.check_world_size(len(hosts))
        train, shared = self.train, self.train.sequence_parallel or 1
        cut = _cut_host(hosts, shared)
        if cut is None:
            return
        its = [rank for rank, host in enumerate(hosts) if host == cut]
        if its == list(range(its[0], its[-1] + 1)):
            fitting = [
                count
                for count in range(1, shared)
                if shared % count == 0
                and _cut_host(hosts, count) is None
                and train.global_batch % (train.micro_batch * len(hosts) // count) == 0
            ]
            found = f"{its[0]} to {its[-1]}"
            good = f"nearest {fitting[-1]}" if fitting else "give the hosts other numbers of them"
        else:
            found = ", ".join([*map(str, its[:4]), *["…"][: len(its) > 4]])
            good = "start ranks host by host, by srun --distribution=block or mpirun --map-by slot"
        host = cut.partition(" ")[0]
        rule = f"must divide the processes of every host, or be those of whole hosts; {host} has ranks {found}; {good}"
        raise ConfigError.at("train.sequence_parallel", shared, rule)

    def to_json(self) -> dict[str, Any]:
        """The resolved configuration as JSON values; ``RunConfig.model_validate`` takes it back."""
        return self.model_dump(mode="json")


def find_config(text: str | Path) -> Path:
    """The file of a path, or of the bare name of one of ds_configs/experiments.

    Raises:
        ConfigError: a bare name that is neither. A path is checked by whoever reads it.
    """
    path = Path(text)
    if path.is_file() or len(path.parts) != 1 or path.suffix:
        return path
    known = sorted(file.stem for file in EXPERIMENTS.glob("*.json"))
    if path.name not in known:
        rule = f"no such file, and none of that name in ds_configs/experiments; {nearest(str(text), known)}"
        raise ConfigError(f"{text}: {rule}")
    return EXPERIMENTS / f"{path.name}.json"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a file (see ``find_config``), with ``path.to.key=value`` overrides applied in order.

    Raises:
        ConfigError: every wrong field, one line each.
    """
    content = load_json_object(find_config(path))
    content.pop("$schema", None)  # for editors
    parsed = [parse_override(text) for text in overrides]
    # Steps on the command line replace a file's epochs, and epochs its steps. A null replaces nothing.
    train, given = content.get("train"), {".".join(parts): value for parts, value in parsed}
    for length, other in (("steps", "epochs"), ("epochs", "steps")):
        if isinstance(train, dict) and given.get(f"train.{length}") is not None and f"train.{other}" not in given:
            train.pop(other, None)
    for parts, value in parsed:
        # An override below a named DeepSpeed configuration changes a copy of what the name stands for.
        if parts[0] == "deepspeed" and len(parts) > 1:
            _resolve_deepspeed(content)
        put(content, parts, value)
    _resolve_deepspeed(content)
    config = RunConfig.model_validate(content)
    config.data.check_order()
    return config


def _cut_host(hosts: Sequence[str], shared: int) -> str | None:
    """The first host of whose processes some share a context with those of other hosts, and some do not."""
    groups: dict[str, Counter[int]] = {}  # of each host, how many of its processes each has
    for rank, host in enumerate(hosts):
        groups.setdefault(host, Counter())[rank // shared] += 1
    return next((host for host, own in groups.items() if len(own) > 1 and min(own.values()) < shared), None)


def _batch_problem(path: str, value: int, unit: int, divisor: str) -> Problem:
    """The rule that a batch is a multiple, with the nearest that are."""
    below = value // unit * unit
    good = ", ".join(str(multiple) for multiple in (below, below + unit) if multiple)
    return Problem(path, f"must be a multiple of {divisor}; nearest {good}", value)


def _resolve_deepspeed(content: dict[str, Any]) -> None:
    """Replaces the name of a DeepSpeed configuration by what it stands for, in place."""
    name = content.get("deepspeed")
    if not isinstance(name, str):
        return
    known = sorted(path.stem for path in DEEPSPEED_CONFIGS.glob("*.json"))
    if name not in known:
        raise ConfigError.at("deepspeed", name, f"no such file in ds_configs; {nearest(name, known)}")
    content["deepspeed"] = load_json_object(DEEPSPEED_CONFIGS / f"{name}.json")


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """`--trust-checkpoint`, of every verb that reads a checkpoint: the user's word that it may run code."""
    parser.add_argument(
        TRUST_OPTION,
        action="store_true",
        help="open files of the checkpoint that hold more than tensors and numbers, and run the code that they ask for",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`longstride config schema` has no options."""


def run(arguments: argparse.Namespace) -> int:
    """`longstride config schema`: prints the JSON schema of a run's configuration, for editors."""
    print(json.dumps(RunConfig.model_json_schema(), indent=2))
    return 0
