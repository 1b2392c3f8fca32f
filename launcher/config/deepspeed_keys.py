"""The section `deepspeed`: its keys and their types. DeepSpeed itself silently ignores many wrong ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from longstride.kernels import ConfigError, Problem, nearest
from longstride.sparse_model import StrictModel, config_error

# Keys that another section of the configuration sets: two places for one number could disagree.
OWNED = {
    "train_batch_size": "give train.global_batch instead",
    "train_micro_batch_size_per_gpu": "give train.micro_batch instead",
    "gradient_accumulation_steps": "follows from train.global_batch, train.micro_batch and the number of processes",
    "optimizer": "give train.optimizer, train.learning_rate and train.weight_decay instead",
    "scheduler": "give train.schedule, train.warmup_steps and train.final_learning_rate instead",
    "sparse_attention": "give model.attention instead; DeepSpeed has removed its own",
    "zero_force_ds_cpu_optimizer": "is always false: the optimiser is torch's, offloaded or not",
}

Dtype = Literal["fp32", "fp16", "bf16"]


class _ActivationCheckpointing(StrictModel):
    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: int | None = Field(default=None, gt=0)
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False

    @model_validator(mode="after")
    def _check_together(self) -> _ActivationCheckpointing:
        if self.contiguous_memory_optimization and not self.partition_activations:
            rule = "needs partition_activations; set that to true, or leave this out"
            raise ConfigError.at("contiguous_memory_optimization", True, rule)
        return self


class _DataTypes(StrictModel):
    grad_accum_dtype: Dtype | None = None


class _FlopsProfiler(StrictModel):
    enabled: bool = False
    recompute_fwd_factor: float = Field(default=0.0, ge=0)
    profile_step: int = Field(default=1, gt=0)
    module_depth: int = Field(default=-1, ge=-1)
    top_modules: int = Field(default=1, gt=0)
    detailed: bool = True
    output_file: str | None = None


class _ThroughputTimer(StrictModel):
    enabled: bool = True
    synchronized: bool = True


class _Timers(StrictModel):
    throughput: _ThroughputTimer = _ThroughputTimer()


class _ZeroOptimization(StrictModel, extra="allow"):
    """The keys that the launcher uses before DeepSpeed's own class has checked all of them."""

    reduce_bucket_size: float = Field(default=0, ge=0)
    stage3_max_live_parameters: float = Field(default=0, ge=0)


class _Section(StrictModel):
    """The keys that the training loop supports. The defaults are never used; the section goes to DeepSpeed unchanged.

    These are absent on purpose: pipeline, curriculum, elasticity, autotuning, tensor and expert parallelism and
    inference need another loop or model; managed_gradient_accumulation and torch_autocast would change what a step is.
    DeepSpeed's own classes check the plain objects, see the engine's ``check_engine``; without NVMe nothing uses aio.
    """

    activation_checkpointing: _ActivationCheckpointing = _ActivationCheckpointing()
    aio: dict[str, Any] = Field(default_factory=dict)
    bf16: dict[str, Any] = Field(default_factory=dict)
    comet: dict[str, Any] = Field(default_factory=dict)
    comms_logger: dict[str, Any] = Field(default_factory=dict)
    communication_data_type: Dtype | None = None
    compile: dict[str, Any] = Field(default_factory=dict)
    csv_monitor: dict[str, Any] = Field(default_factory=dict)
    data_types: _DataTypes = _DataTypes()
    disable_allgather: bool = False
    dump_state: bool = False
    flops_profiler: _FlopsProfiler = _FlopsProfiler()
    fp16: dict[str, Any] = Field(default_factory=dict)
    gradient_clipping: float = Field(default=0.0, ge=0)
    gradient_predivide_factor: float = Field(default=1.0, gt=0)
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"
    memory_breakdown: bool = False
    prescale_gradients: bool = False
    steps_per_print: int | None = Field(default=None, gt=0)
    tensorboard: dict[str, Any] = Field(default_factory=dict)
    timers: _Timers = _Timers()
    wall_clock_breakdown: bool = False
    wandb: dict[str, Any] = Field(default_factory=dict)
    zero_allow_untested_optimizer: bool = False
    zero_optimization: _ZeroOptimization = _ZeroOptimization()


KNOWN = tuple(_Section.model_fields)
_SWITCHED = ("bf16", "comet", "csv_monitor", "fp16", "tensorboard", "wandb")  # plain objects with a key `enabled`
_OFFLOAD: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("device", ("none", "cpu"), "must be none or cpu"),
    ("ratio", (1.0,), "must be 1: a part alone needs DeepSpeed's own optimiser"),
    ("super_offload", (False,), "must be false: it needs DeepSpeed's own optimiser"),
)
_PACKAGES = {"comet": "comet_ml", "tensorboard": "tensorboard", "wandb": "wandb"}  # imported by the monitors


def check_keys(section: dict[str, Any]) -> None:
    """Check the rules of the `deepspeed` section that need no import of DeepSpeed.

    Raises:
        ConfigError: every key that is set elsewhere, unknown, of a wrong type or contradictory; paths are relative to
            the section.
    """
    problems = [
        Problem(key, OWNED.get(key) or f"unknown key; {nearest(key, KNOWN)}") for key in section if key not in KNOWN
    ]
    try:
        _Section.model_validate({key: value for key, value in section.items() if key in KNOWN})
    except ConfigError as error:
        problems += error.problems
    for name in _SWITCHED:
        part = section.get(name)
        if isinstance(part, dict) and not isinstance(part.get("enabled", False), bool):
            problems.append(Problem(f"{name}.enabled", "must be true or false", part["enabled"]))
    if not problems:
        problems = _contradictions(section)
    if problems:
        raise ConfigError(*problems)


def part_errors(section: dict[str, Any], models: Mapping[str, type[BaseModel]]) -> list[ConfigError]:
    """Check the parts of the section that DeepSpeed's own classes (``models``, by name) describe; return all errors.

    A value of a wrong type, which those classes would silently convert, is an error too. So is an enabled monitor if
    its package is not installed. Paths begin with `deepspeed`.
    """
    errors = []
    for name, model in models.items():
        content, path = section.get(name, {}), f"deepspeed.{name}"
        try:
            value = model.model_validate(content)
        except ValidationError as error:
            errors.append(config_error(model, content, error).under(path))
        else:
            if converted := [*_conversions(content, value, path)]:
                errors.append(ConfigError(*converted))
    for name, package in _PACKAGES.items():
        if enabled(section, name) and importlib.util.find_spec(package) is None:
            rule = f"needs the package {package}, which is not installed: pip install {package}"
            errors.append(ConfigError.at(f"deepspeed.{name}.enabled", True, rule))
    return errors


def _conversions(content: dict[str, Any], model: BaseModel, path: str) -> Iterator[Problem]:
    """Yield the values that a class has read as another value or type. Whole numbers may be written as 5e8."""
    names = {field.alias or name: name for name, field in type(model).model_fields.items()}
    for key, value in content.items():
        read = getattr(model, names.get(key, key), None)
        if isinstance(value, dict) and isinstance(read, BaseModel):
            yield from _conversions(value, read, f"{path}.{key}")
            continue
        is_equal = value is None or (value == read and isinstance(value, bool) == isinstance(read, bool))
        if isinstance(read, bool | int | float) and not is_equal:
            rule = "must be true or false" if isinstance(read, bool) else "must be a number"
            yield Problem(f"{path}.{key}", rule, value)


def enabled(section: dict[str, Any], name: str) -> bool:
    """Whether a part such as fp16 is enabled."""
    return bool(section.get(name, {}).get("enabled", False))


def precision(section: dict[str, Any]) -> str:
    """Return fp32, fp16 or bf16."""
    return next((name for name in ("fp16", "bf16") if enabled(section, name)), "fp32")


def _contradictions(section: dict[str, Any]) -> list[Problem]:
    """Find settings that a run does not support, in a section of known keys."""
    problems = []
    if enabled(section, "fp16") and enabled(section, "bf16"):
        problems.append(Problem("fp16.enabled", "fp16 and bf16 cannot both be on", True))
    for name in ("fp16", "bf16"):  # resume and export rely on fp32 masters
        key = f"{name}_master_weights_and_grads"
        if section.get(name, {}).get(key, False) is not False:
            problems.append(Problem(f"{name}.{key}", "must be false: master weights are fp32", section[name][key]))
    # Gradients that are not finite would silently spoil the weights.
    for part, key in (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")):
        if section.get(part, {}).get(key) is False:
            rule = "must be true: otherwise gradients that are not finite go unnoticed"
            problems.append(Problem(f"{part}.{key}", rule, False))
    zero = section.get("zero_optimization", {})
    stage, gathered_as = zero.get("stage", 0), section.get("data_types", {}).get("grad_accum_dtype")
    if type(stage) is not int or stage not in range(4):
        problems.append(Problem("zero_optimization.stage", "must be 0, 1, 2 or 3", stage))
    elif stage == 0 and gathered_as not in (None, precision(section)):
        rule = f"ZeRO 0 gathers gradients in the model's own {precision(section)}; take stage 1, 2 or 3"
        problems.append(Problem("data_types.grad_accum_dtype", rule, gathered_as))
    elif zero.get("pipeline_loading_checkpoint") and stage != 3:
        rule = f"only ZeRO 3 loads checkpoints in this way, and this is stage {stage}; leave it out"
        problems.append(Problem("zero_optimization.pipeline_loading_checkpoint", rule, True))
    elif zero.get("elastic_checkpoint") and stage == 3:
        problems.append(
            Problem("zero_optimization.elastic_checkpoint", "ZeRO 3 cannot save in this way; leave it out", True)
        )
    if zero.get("legacy_stage1"):
        problems.append(Problem("zero_optimization.legacy_stage1", "DeepSpeed has removed it; leave it out", True))
    # A checkpoint would not find states that these keys move, or they need DeepSpeed's own Adam.
    if zero.get("zenflow") is not None:
        problems.append(Problem("zero_optimization.zenflow", "needs DeepSpeed's own optimiser; leave it out"))
    for name in ("offload_optimizer", "offload_param"):
        part = zero.get(name)
        for key, accepted, rule in _OFFLOAD:
            # DeepSpeed's class refuses any other type.
            if isinstance(part, dict) and key in part and part[key] not in accepted:
                problems.append(Problem(f"zero_optimization.{name}.{key}", rule, part[key]))
    return problems
