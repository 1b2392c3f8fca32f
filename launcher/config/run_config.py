"""RunConfig: one JSON file with model, data, train and deepspeed, checked whole before anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from longstride.kernels import ConfigError, Problem
from longstride.launcher.config.data_keys import DataConfig, found_path, lasting_path
from longstride.launcher.config.deepspeed_keys import check_keys, precision
from longstride.launcher.config.extending import EXTENDS, SCHEMA
from longstride.launcher.config.optimization import AdafactorConfig
from longstride.launcher.config.train_keys import TrainConfig, batch_problem
from longstride.sparse_model import ModelConfig, StrictModel

_NAME_OR_OBJECT = {
    "anyOf": [{"type": "string", "description": "a file of ds_configs/, without .json"}, {"type": "object"}],
    "description": "a DeepSpeed configuration, or the name of one",
}
_MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")  # keys of the DeepSpeed section
# Keys that a file may have beside a run's; see ``extending``.
_OF_FILES = {
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


class RunConfig(StrictModel):
    """A whole run. ``deepspeed`` is given inline or by name; here it is always the object itself."""

    model: ModelConfig = Field(description="the network: its sizes, its attention, and what came after the paper")
    data: DataConfig = Field(description="where the bytes come from, and in what order they are read")
    train: TrainConfig = Field(description="how long, how fast, and what is written when")
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

    @classmethod
    def model_json_schema(cls, *arguments: Any, **options: Any) -> dict[str, Any]:
        """The JSON schema of a configuration file, whose keys are a run's and two that only a file has.

        What a run must have is asked for only of a file that extends none.
        """
        made = super().model_json_schema(*arguments, **options)
        needed = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}
        parts = {name: {"required": made["$defs"][part.__name__].pop("required")} for name, part in needed.items()}
        whole = {"required": made.pop("required"), "properties": parts}
        return {
            SCHEMA: "https://json-schema.org/draft/2020-12/schema",
            **made,
            "properties": {**_OF_FILES, **made["properties"]},
            "if": {"not": {"required": [EXTENDS]}},
            "then": whole,
        }

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
            self.model.require("documents")
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
        problem = batch_problem("train.global_batch", train.global_batch, unit, divisor)
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

    def with_lasting_data(self) -> RunConfig:
        """As a run saves it, so that its data is found from any folder; see ``places``."""
        return self._with_data(lasting_path(self.data.path, self.train.output))

    def with_data_of(self, run: Path) -> RunConfig:
        """As a ``run``'s folder has it, with the data's path as it is found from here."""
        return self._with_data(found_path(self.data.path, self.train.output, run))

    def _with_data(self, path: str) -> RunConfig:
        return self.model_copy(update={"data": self.data.model_copy(update={"path": path})})

    def without_monitors(self) -> RunConfig:
        """A run whose DeepSpeed writes nothing, where no more than a try is wanted."""
        section = {key: value for key, value in self.deepspeed.items() if key not in _MONITORS}
        return self.model_copy(update={"deepspeed": section})

    def to_json(self) -> dict[str, Any]:
        """The resolved configuration as JSON values; ``RunConfig.model_validate`` takes it back."""
        return self.model_dump(mode="json")


def _cut_host(hosts: Sequence[str], shared: int) -> str | None:
    """The first host of whose processes some share a context with those of other hosts, and some do not."""
    groups: dict[str, Counter[int]] = {}  # of each host, how many of its processes each has
    for rank, host in enumerate(hosts):
        groups.setdefault(host, Counter())[rank // shared] += 1
    return next((host for host, own in groups.items() if len(own) > 1 and min(own.values()) < shared), None)
