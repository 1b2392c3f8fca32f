"""Which keys the `deepspeed` section may hold. DeepSpeed itself ignores a misspelt key at the top level in silence."""

from __future__ import annotations

from typing import Any

from kernels.errors import ConfigError, Problem
from sparse_model.strict import nearest

# Keys whose meaning is said elsewhere: two places for one number would disagree one day.
OWNED = {
    "train_batch_size": "give train.global_batch instead",
    "train_micro_batch_size_per_gpu": "give train.micro_batch instead",
    "gradient_accumulation_steps": "follows from train.global_batch, train.micro_batch and the number of processes",
    "optimizer": "give train.learning_rate, train.betas, train.eps and train.weight_decay instead",
    "scheduler": "give train.schedule, train.warmup_steps and train.final_learning_rate instead",
    "sparse_attention": "give model.attention instead; DeepSpeed has removed its own",
}

# What the training loop works with. Absent on purpose: pipeline, curriculum, elasticity, autotuning, tensor and expert
# parallelism and inference, which need another loop or model; managed_gradient_accumulation and torch_autocast, which
# would change what a step is.
KNOWN = (
    "activation_checkpointing",
    "aio",
    "bf16",
    "comms_logger",
    "communication_data_type",
    "compile",
    "comet",
    "csv_monitor",
    "data_types",
    "disable_allgather",
    "dump_state",
    "flops_profiler",
    "fp16",
    "gradient_clipping",
    "gradient_predivide_factor",
    "log_level",
    "memory_breakdown",
    "prescale_gradients",
    "steps_per_print",
    "tensorboard",
    "timers",
    "wall_clock_breakdown",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)

_SECTIONS = (
    "activation_checkpointing",
    "bf16",
    "csv_monitor",
    "data_types",
    "flops_profiler",
    "fp16",
    "tensorboard",
    "wandb",
    "zero_optimization",
)


def check_keys(section: dict[str, Any]) -> None:
    """The rules of the `deepspeed` section that need no deepspeed to be told.

    Raises:
        ConfigError: every key that is owned elsewhere, unknown or contradictory; paths relative to the section.
    """
    problems = []
    for key in section:
        if key in OWNED:
            problems.append(Problem(key, OWNED[key]))
        elif key not in KNOWN:
            problems.append(Problem(key, f"unknown key; {nearest(key, KNOWN)}"))
    for key in _SECTIONS:
        if key in section and not isinstance(section[key], dict):
            problems.append(Problem(key, "must be an object", section[key]))
    if not problems:
        problems = _precision_problems(section) + _stage_problems(section)
    if problems:
        raise ConfigError(*problems)


def enabled(section: dict[str, Any], name: str) -> bool:
    """Whether a part such as fp16 is switched on."""
    return bool(section.get(name, {}).get("enabled", False))


def zero_stage(section: dict[str, Any]) -> int:
    """The ZeRO stage, 0 to 3."""
    return int(section.get("zero_optimization", {}).get("stage", 0))


def _precision_problems(section: dict[str, Any]) -> list[Problem]:
    """Two half precisions at once, or gradients gathered in a type that the stage cannot."""
    if enabled(section, "fp16") and enabled(section, "bf16"):
        return [Problem("fp16.enabled", "fp16 and bf16 cannot both be on", True)]
    return []


def _stage_problems(section: dict[str, Any]) -> list[Problem]:
    """A stage that does not exist, or one that cannot do what another key asks."""
    path = "zero_optimization.stage"
    stage = section.get("zero_optimization", {}).get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        return [Problem(path, "must be 0, 1, 2 or 3", stage)]
    gathered_as = section.get("data_types", {}).get("grad_accum_dtype")
    own = "fp16" if enabled(section, "fp16") else "bf16" if enabled(section, "bf16") else "fp32"
    if stage == 0 and gathered_as not in (None, own):
        rule = f"ZeRO 0 gathers gradients in the model's own {own}; take stage 1, 2 or 3"
        return [Problem("data_types.grad_accum_dtype", rule, gathered_as)]
    return []
