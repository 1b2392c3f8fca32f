"""RunConfig: one JSON file with model, data, train and deepspeed, checked in full before anything starts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, WithJsonSchema, field_validator, model_validator

from longstride.kernels import ConfigError, Problem
from longstride.kernels.patterns import divisors
from longstride.launcher.config.data_keys import DataConfig, resolve_saved_path, saved_path
from longstride.launcher.config.deepspeed_keys import check_keys, precision
from longstride.launcher.config.train_keys import AdafactorConfig, StageConfig, TrainConfig, batch_problem
from longstride.sparse_model import ModelConfig, SparseTransformer, StrictModel

EXTENDS, SCHEMA = "extends", "$schema"  # keys of a file; a run saves neither
_NAME_OR_OBJECT = {
    "anyOf": [{"type": "string", "description": "a file of ds_configs/, without .json"}, {"type": "object"}],
    "description": "a DeepSpeed configuration, or the name of one",
}
_MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")  # keys of the DeepSpeed section
_FILE_KEYS = {  # what only a file may have
    SCHEMA: {
        "type": "string",
        "description": "the JSON schema by which an editor completes and checks; read by none else",
    },
    EXTENDS: {
        "type": "string",
        "minLength": 1,
        "description": "the configuration that this one changes: a path from this file's folder, or a preset's name",
    },
}


class Stage(NamedTuple):
    """A stage of ``train.context_schedule``. A run without one has a single stage.

    Each context of the data is cut into ``pieces`` contexts of the stage, so the schedule does not change which bytes
    a step reads.
    """

    first: int  # steps before it
    config: RunConfig  # of a run that has only this stage: context, attention, batch and micro-batch are the stage's
    pieces: int = 1  # contexts of the stage in one of ``model.context``
    batches: int = 1  # global batches of the data in a step
    attention: ModelConfig | None = None  # whose mixers the stage uses; None: those of ``model.attention``
    trained: str | None = None  # the only part of the network that learns; None: all do

    @staticmethod
    def after(step: int, stages: Sequence[Stage]) -> Stage:
        """Return the stage of the step that follows ``step`` steps."""
        return next(stage for stage in reversed(stages) if stage.first <= step)

    @property
    def context(self) -> int:
        """Positions of a context."""
        return self.config.model.context

    @property
    def rows(self) -> int:
        """Contexts of ``model.context`` in a micro-batch."""
        return self.config.train.micro_batch // self.pieces


class RunConfig(StrictModel):
    """The configuration of a run. A file may name its ``deepspeed`` section; here it is always the object itself."""

    model: ModelConfig = Field(description="the network")
    data: DataConfig = Field(description="the data and the order in which it is read")
    train: TrainConfig = Field(description="length, optimiser, evaluations, checkpoints and guards")
    deepspeed: Annotated[dict[str, Any], WithJsonSchema(_NAME_OR_OBJECT)] = Field(
        description="a DeepSpeed configuration, or the name of one in ds_configs, such as zero1_bf16"
    )
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
                "activation_checkpointing": "recomputes from inputs, but model.reversible from outputs; give false",
                "compile": "compiles complete blocks, but model.reversible recomputes their halves; give false",
            }
            wrong = [name for name in rules if getattr(self.train, name)]
            if wrong:
                raise ConfigError(*(Problem(f"train.{name}", rules[name], True) for name in wrong))
        limit, seconds = self.train.timeout_seconds, self.data.worker_timeout_seconds
        if seconds is not None and seconds >= limit:
            rule = f"must be less than train.timeout_seconds {limit:g}, when other processes stop waiting for this one"
            raise ConfigError.at("data.worker_timeout_seconds", seconds, f"{rule}; {limit / 2:g}")
        objective = self.model.objective
        if self.train.samples_every and not objective.next_token:
            rule = f"objective {objective.type} predicts no next token to sample; give 0"
            raise ConfigError.at("train.samples_every", self.train.samples_every, rule)
        if self.train.context_schedule and (objective.num_classes or not objective.in_order):
            verb = "labels" if objective.num_classes else "permutes"
            rule = f"cuts contexts, but objective {objective.type} {verb} them; set it to null"
            raise ConfigError(Problem("train.context_schedule", rule))
        if self.data.packed and objective.num_classes:
            rule = f"joins documents, but objective {objective.type} predicts the class of one; leave it out"
            raise ConfigError(Problem("data.packing", rule))
        if self.model.carries:
            self._check_lanes()
        shared = self.train.sequence_parallel
        if shared is not None and self.train.compile:
            rule = "compiles complete blocks, but train.sequence_parallel exchanges rows within them; give false"
            raise ConfigError.at("train.compile", True, rule)
        try:
            if shared is not None:
                self.model.check_division(shared, self.train.sequence_exchange, documents=self.data.apart)
            if self.data.apart:
                self.model.require("documents")
        except ConfigError as error:
            raise error.under("model") from None
        if self.data.apart and self.model.backend == "flex":
            raise ConfigError.at("model.backend", "flex", "cannot keep documents apart; take auto")
        if isinstance(self.train.optimizer, AdafactorConfig) and self.zero_stage:
            rule = f"needs complete matrices, but ZeRO {self.zero_stage} divides them; take muon or "
            raise ConfigError.at(
                "train.optimizer.type", "adafactor", f"{rule}adamw, or deepspeed zero0_{self.precision}"
            )
        if self.train.compile and self.train.trained_parts and self.zero_stage == 3:
            rule = "computes gradients of complete blocks under ZeRO 3, but a stage trains one part alone; give false"
            raise ConfigError.at("train.compile", True, rule)
        if self.train.expert_parallel is not None:
            self._check_experts(self.train.expert_parallel)
        self.stages()  # raises
        return self

    def _check_experts(self, size: int) -> None:
        """Check that ``size`` processes can divide the experts of each layer.

        Raises:
            ConfigError: a layer's experts do not divide, no layer has any, or a setting needs them in one process.
        """
        parts = [part.model_dump() for part in self.model.feed_forwards]
        counts = [part["count"] for part in parts if part.get("type") == "experts"]
        if not counts:
            rule = "divides experts, and no layer of model.feed_forward has any; leave it out"
            raise ConfigError.at("train.expert_parallel", size, rule)
        if (common := math.gcd(*counts)) % size:
            near = min(divisors(common), key=lambda divisor: abs(divisor - size))
            rule = (
                f"must divide the experts of each layer, {', '.join(map(str, dict.fromkeys(counts)))}; nearest {near}"
            )
            raise ConfigError.at("train.expert_parallel", size, rule)
        if self.train.compile:
            rule = "compiles complete blocks, but train.expert_parallel exchanges rows within them; give false"
            raise ConfigError.at("train.compile", True, rule)
        if isinstance(self.train.optimizer, AdafactorConfig):
            rule = "clips the update of all experts, but train.expert_parallel divides them; take muon or adamw"
            raise ConfigError.at("train.optimizer.type", "adafactor", rule)

    def _check_lanes(self) -> None:
        """Check that each context of a lane follows the one before it, as the model carries state.

        Raises:
            ConfigError: lanes are shuffled, overlap, are cut or are shared.
        """
        data, train, rule = self.data, self.train, "but model.attention carries state to the next context of a lane"
        hop = self.model.context if data.hop is None else data.hop
        problems = {
            "data.shuffle_bytes": (data.shuffle_bytes, f"shuffles contexts, {rule}; set it to 0"),
            "data.hop": (None if hop == self.model.context else hop, f"repeats bytes, {rule}; set it to null"),
            "train.context_schedule": (train.context_schedule, f"cuts contexts, {rule}; set it to null"),
            "train.sequence_parallel": (train.sequence_parallel, f"divides contexts, {rule}; set it to null"),
        }
        if wrong := [Problem(path, rule, value) for path, (value, rule) in problems.items() if value]:
            raise ConfigError(*wrong)

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of the run in their order.

        Raises:
            ConfigError: a stage does not fit the run, or its attention has other parameters.
        """
        stages: list[Stage] = []
        first = 0
        for number, described in enumerate(self.train.context_schedule or ()):
            path = f"train.context_schedule[{number}]"
            try:
                stages.append(self._stage(described, first))
            except ConfigError as error:
                raise ConfigError(*(_under_stage(problem, path, described) for problem in error.problems)) from None
            if number and stages[-2].context > stages[-1].context:
                rule = f"must be at least that of the stage before it, {stages[-2].context}"
                raise ConfigError.at(f"{path}.context", described.context, rule)
            first += described.steps or 0
        if stages and stages[-1].context != self.model.context:
            rule = f"must be model.context {self.model.context}: it is the last stage"
            raise ConfigError.at(f"{path}.context", stages[-1].context, rule)
        return tuple(stages) or (Stage(0, self),)

    def batches_in(self, steps: int) -> int:
        """Return how many global batches of the data the first ``steps`` steps read."""
        stages = self.stages()
        ends = [*(stage.first for stage in stages[1:]), steps]
        lengths = (min(end, steps) - stage.first for stage, end in zip(stages, ends, strict=True))
        return sum(stage.batches * max(0, length) for stage, length in zip(stages, lengths, strict=True))

    def _stage(self, described: StageConfig, first: int) -> Stage:
        """Return a stage; its problems have the paths of the run that has only this stage."""
        model, train = self.model, self.train
        pieces = model.context // described.context
        if pieces * described.context != model.context:
            near = min(divisors(model.context), key=lambda divisor: abs(divisor - described.context))
            rule = f"must divide model.context {model.context}; nearest {near}"
            raise ConfigError.at("context", described.context, rule)
        unit = train.global_batch * pieces
        global_batch = described.global_batch or unit
        if global_batch % unit:
            divisor = f"{unit}, which read as many bytes as train.global_batch"
            raise ConfigError(batch_problem("global_batch", global_batch, unit, divisor))
        content = self.to_json()
        content["model"]["context"] = described.context
        content["train"] |= {
            "context_schedule": None,
            "global_batch": global_batch,
            "micro_batch": train.micro_batch * pieces * (global_batch // unit),
        }
        if described.attention is not None:
            content["model"]["attention"] = described.attention
        if described.learning_rate is not None:
            content["train"]["learning_rate"] = described.learning_rate
        config = RunConfig.model_validate(content)
        attention = None if described.attention is None else config.model
        if attention is not None or described.trained is not None:
            with torch.device("meta"):
                network = SparseTransformer(model, initialize=False)
            network.use_attention(attention)  # raises
            parts, roles = network.parameter_parts(), network.parameter_roles()
            names = dict.fromkeys(part for name, part in parts.items() if roles[name].part != "tables")
            if described.trained is not None and described.trained not in names:
                rule = f"must be a part with parameters that a stage can train alone: {', '.join(names)}"
                raise ConfigError.at("trained", described.trained, rule)
        return Stage(first, config, pieces, global_batch // unit, attention, described.trained)

    @classmethod
    def model_json_schema(cls, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return the JSON schema of a configuration file: a run's keys, and two that only a file has.

        The keys that a run must have are only required of a file that extends no other.
        """
        schema = super().model_json_schema(*arguments, **options)
        sections = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}
        parts = {name: {"required": schema["$defs"][part.__name__].pop("required")} for name, part in sections.items()}
        required = {"required": schema.pop("required"), "properties": parts}
        return {
            SCHEMA: "https://json-schema.org/draft/2020-12/schema",
            **schema,
            "properties": {**_FILE_KEYS, **schema["properties"]},
            "if": {"not": {"required": [EXTENDS]}},
            "then": required,
        }

    @property
    def worker_timeout_seconds(self) -> float:
        """Seconds without anything from a loader worker that is waited for, until the run gives it up.

        The default is half of ``train.timeout_seconds``, but longer than a remote store may take with all its retries.
        """
        if self.data.worker_timeout_seconds is not None:
            return self.data.worker_timeout_seconds
        remote = self.data.remote
        store = 2 * remote.attempts * remote.timeout_seconds if "://" in self.data.path else 0.0
        return max(self.train.timeout_seconds / 2, store)

    @property
    def precision(self) -> str:
        """The model's precision: fp32, fp16 or bf16."""
        return precision(self.deepspeed)

    @property
    def zero_stage(self) -> int:
        """The stage of DeepSpeed's ZeRO, 0 to 3."""
        return int(self.deepspeed.get("zero_optimization", {}).get("stage", 0))

    def check_world_size(self, world_size: int) -> None:
        """Check that the processes form groups that share contexts or divide experts, and that they divide the batch.

        Raises:
            ConfigError: they do not, or they are more than a run may have.
        """
        train, shared = self.train, self.train.sequence_parallel or 1
        if world_size > train.MOST_PROCESSES:
            raise ConfigError(f"{world_size} processes: a run has at most {train.MOST_PROCESSES:,}; start fewer")
        if world_size % shared:
            near = min(divisors(world_size), key=lambda number: abs(number - shared))
            rule = f"must divide the {world_size} process{'es' if world_size > 1 else ''}; nearest {near}"
            rule += f"; or start {-(-world_size // shared) * shared} processes"
            raise ConfigError.at("train.sequence_parallel", shared, rule)
        if world_size % (dividing := train.expert_parallel or 1):
            near = min(divisors(world_size), key=lambda number: abs(number - dividing))
            rule = f"must divide the {world_size} process{'es' if world_size > 1 else ''}; nearest {near}"
            raise ConfigError.at("train.expert_parallel", dividing, rule)
        unit = train.micro_batch * world_size // shared
        if train.global_batch % unit == 0:
            return
        divisor = f"micro_batch {train.micro_batch} × {world_size} processes"
        if shared > 1:
            divisor += f" / {shared} that share a context"
        problem = batch_problem("train.global_batch", train.global_batch, unit, divisor)
        # A resumed run keeps its batch, but another number of processes can share it.
        shares = train.global_batch // train.micro_batch
        fitting = [count * shared for count in range(1, shares + 1) if shares % count == 0]
        below = max(count for count in fitting if count < world_size)
        suggestion = " or ".join(map(str, [below, *[count for count in fitting if count > world_size][:1]]))
        raise ConfigError(replace(problem, rule=f"{problem.rule}; or start {suggestion} processes"))

    def check_hosts(self, hosts: Sequence[str]) -> None:
        """Check the world size, and that no host is split; ``hosts`` has one name per rank.

        Neighbouring ranks share a context. A group must stay on one host or consist of complete hosts: if a host is
        split, one group sends the exchange of every layer over the network, and all others wait for it.

        Raises:
            ConfigError: as ``check_world_size``, or a host is split.
        """
        self.check_world_size(len(hosts))
        train, shared = self.train, self.train.sequence_parallel or 1
        split_host = _find_split_host(hosts, shared)
        if split_host is None:
            return
        ranks = [rank for rank, host in enumerate(hosts) if host == split_host]
        if ranks == list(range(ranks[0], ranks[-1] + 1)):
            fitting = [
                count
                for count in range(1, shared)
                if shared % count == 0
                and _find_split_host(hosts, count) is None
                and train.global_batch % (train.micro_batch * len(hosts) // count) == 0
            ]
            names = f"{ranks[0]} to {ranks[-1]}"
            suggestion = f"nearest {fitting[-1]}" if fitting else "give the hosts other numbers of them"
        else:
            names = ", ".join([*map(str, ranks[:4]), *["…"][: len(ranks) > 4]])
            suggestion = "start ranks host by host, by srun --distribution=block or mpirun --map-by slot"
        host = split_host.partition(" ")[0]
        rule = f"must divide the processes of every host, or equal those of several hosts; {host} has ranks {names}"
        rule += f"; {suggestion}"
        raise ConfigError.at("train.sequence_parallel", shared, rule)

    def with_lasting_data(self) -> RunConfig:
        """Return the configuration as a run saves it, so that its data is found from any working directory."""
        return self._with_data(saved_path(self.data.path, self.train.output))

    def with_data_of(self, run: Path) -> RunConfig:
        """Return the configuration of a run's folder with the data's path as seen from the working directory."""
        return self._with_data(resolve_saved_path(self.data.path, self.train.output, run))

    def _with_data(self, path: str) -> RunConfig:
        return self.model_copy(update={"data": self.data.model_copy(update={"path": path})})

    def without_monitors(self) -> RunConfig:
        """Return the configuration without DeepSpeed's monitors, so that a trial run writes nothing."""
        section = {key: value for key, value in self.deepspeed.items() if key not in _MONITORS}
        return self.model_copy(update={"deepspeed": section})

    def to_json(self) -> dict[str, Any]:
        """Return the resolved configuration as JSON values, which ``RunConfig.model_validate`` accepts."""
        return self.model_dump(mode="json")


def schema_entries(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted path and the entry of every key in a JSON schema.

    A key of several alternatives occurs once for each. Objects in a list have the path of the list.
    """

    def walk(part: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if "$ref" in part:
            part = {**schema["$defs"][part["$ref"].rpartition("/")[2]], **part}
        for name, entry in part.get("properties", {}).items():
            path = f"{prefix}.{name}" if prefix else name
            yield path, entry
            yield from walk(entry, path)
        for alternative in (*part.get("anyOf", ()), *part.get("oneOf", ()), *filter(None, [part.get("items")])):
            yield from walk(alternative, prefix)

    return walk(schema, prefix)


def _under_stage(problem: Problem, path: str, described: StageConfig) -> Problem:
    """Return a problem of a stage's run as one of the schedule's key, or of the stage if no key of it is wrong."""
    key = problem.path.removeprefix("model.").removeprefix("train.")
    name = re.split(r"[.\[]", key)[0]
    if name in StageConfig.model_fields and getattr(described, name) is not None:
        return replace(problem, path=f"{path}.{key}")
    return replace(problem, path=": ".join(filter(None, [path, problem.path])))


def _find_split_host(hosts: Sequence[str], shared: int) -> str | None:
    """Find a host with several groups of ``shared`` ranks, of which one also has ranks on other hosts."""
    groups: dict[str, Counter[int]] = {}  # for each host, the number of its ranks in each group
    for rank, host in enumerate(hosts):
        groups.setdefault(host, Counter())[rank // shared] += 1
    return next((host for host, sizes in groups.items() if len(sizes) > 1 and min(sizes.values()) < shared), None)
