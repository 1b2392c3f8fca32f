"""From a RunConfig to a DeepSpeed engine: model, AdamW, schedule, precision, activation checkpointing."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from pydantic import BaseModel, ValidationError
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, TrainConfig, check_packages, precision, type_problems, zero_stage
from longstride.launcher.engine.dropped_steps import drop_plain_step, forget_gradients, leave_floor_to_guards
from longstride.launcher.engine.optimizer import make_optimizer, make_schedule, rate_factor
from longstride.launcher.engine.weight_average import forget_average
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import SparseTransformer, config_error

_ONLY_ON_GPUS = {
    "activation_checkpointing": ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"),
    "zero_optimization": ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
}


def build_engine(config: RunConfig, ranks: Ranks) -> deepspeed.DeepSpeedEngine:
    """The engine around a freshly initialised model; the process group must stand.

    The weights are equal on all ranks, being drawn from the seed before the ranks part; dropout is not.
    """
    torch.manual_seed(config.train.seed)
    model = SparseTransformer(config.model)
    optimizer = make_optimizer(dict(model.named_parameters()), config.train)
    section = engine_section(config, ranks.world_size)
    # One of DeepSpeed's optimisers prints its memory at every stage of its making, whatever the level of the log.
    with contextlib.redirect_stdout(sys.stdout if "log_level" in section else io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=functools.partial(make_schedule, train=config.train),
            config=section,
        )
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        # Its constructor takes a step with zero gradients, which would leave Adam's bias correction one step ahead.
        engine.optimizer.optimizer.state.clear()
    if config.train.activation_checkpointing:
        checkpoint_activations(model, section)
    torch.manual_seed(config.train.seed + 1 + ranks.rank)
    return engine


def checkpoint_activations(model: SparseTransformer, section: dict[str, Any]) -> None:
    """Has every residual block computed again in the backward pass, dropout masks included, as the section says."""
    deepspeed.checkpointing.configure(None, deepspeed_config=section)
    model.activation_checkpoint = _checkpoint_in_training


def apply_settings(engine: deepspeed.DeepSpeedEngine, train: TrainConfig) -> None:
    """Brings the optimiser and schedule of a loaded checkpoint to the run's own settings, should they have changed.

    A checkpoint holds the rate, decay and betas that it was trained with, and would put them back in silence.
    """
    schedule, optimizer = engine.lr_scheduler, engine.basic_optimizer
    for group in optimizer.param_groups:
        group["weight_decay"] = train.weight_decay if group["weight_decay"] else 0.0
        group["betas"], group["eps"], group["initial_lr"] = train.betas, train.eps, train.learning_rate
        group["lr"] = train.learning_rate * rate_factor(train, schedule.last_epoch)
    schedule.base_lrs = [train.learning_rate] * len(optimizer.param_groups)
    if train.ema_decay is None:
        forget_average(optimizer)


def engine_section(config: RunConfig, world_size: int) -> dict[str, Any]:
    """The dictionary for deepspeed.initialize: the run's own section and the keys that we own."""
    train = config.train
    accumulation = train.global_batch // (train.micro_batch * world_size)
    return {
        "steps_per_print": None,  # its progress lines would cut through ours
        "zero_force_ds_cpu_optimizer": False,  # it would refuse torch's AdamW where the optimiser is offloaded
        **config.deepspeed,
        "train_batch_size": train.global_batch,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": accumulation,
    }


def backward(engine: deepspeed.DeepSpeedEngine, loss: Tensor) -> None:
    """``engine.backward``, with the loss scale that DeepSpeed leaves out in fp16 under ZeRO 0.

    Its unfused fp16 optimiser divides the gradients by the scale, but nothing multiplies the loss by it.
    """
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        loss = loss * engine.optimizer.loss_scale_config.cur_scale
    engine.backward(loss)


def learning_rate(engine: deepspeed.DeepSpeedEngine) -> float:
    """The rate of the next step."""
    return float(engine.get_lr()[0])


def loss_scale(engine: deepspeed.DeepSpeedEngine) -> float:
    """The scale of the next loss; 1 outside fp16."""
    if not engine.fp16_enabled():
        return 1.0
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        return float(engine.optimizer.loss_scale_config.cur_scale)
    return float(engine.optimizer.cur_scale)


def take_step(engine: deepspeed.DeepSpeedEngine) -> float | None:
    """The optimiser's step; returns the norm of the unclipped, unscaled gradients.

    None where they are no finite numbers: then the step is dropped, and counted in ``engine.skipped_steps``.
    """
    leave_floor_to_guards(engine)
    scale, skipped, norm = loss_scale(engine), engine.skipped_steps, None
    if isinstance(engine.optimizer, torch.optim.AdamW):  # ZeRO 0 in fp32, where DeepSpeed clips but keeps no norm
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            drop_plain_step(engine)
            return None
    engine.step()
    if engine.skipped_steps > skipped:
        forget_gradients(engine)
    if norm is None:
        norm = float(engine.get_global_grad_norm())
        if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
            norm /= scale
    return norm if math.isfinite(norm) else None


def check_section(config: RunConfig, world_size: int, on_cpu: bool) -> None:
    """Whether DeepSpeed takes its section, asked before a process group is made.

    Raises:
        ConfigError: every wrong field that DeepSpeed's own classes find or would convert, a monitor whose package is
            missing, or what cannot run on a CPU.
    """
    errors = []
    for name, model in _section_models().items():
        content = config.deepspeed.get(name, {})
        wrong_types = type_problems(model, content, f"deepspeed.{name}")
        if wrong_types:
            errors.append(ConfigError(*wrong_types))
            continue
        try:
            model.model_validate(content)
        except ValidationError as error:
            errors.append(config_error(model, content, error).under(f"deepspeed.{name}"))
    missing = check_packages(config.deepspeed)
    if missing:
        errors.append(ConfigError(*missing).under("deepspeed"))
    for name, keys in _ONLY_ON_GPUS.items():
        part = config.deepspeed.get(name, {})
        for key in keys:
            if on_cpu and part.get(key):
                rule = "needs a GPU; leave it out on a CPU"
                errors.append(ConfigError.at(f"deepspeed.{name}.{key}", part[key], rule))
    if errors:
        raise ConfigError.joined(errors)
    try:
        alone = engine_section(config, world_size) | {
            "train_batch_size": config.train.global_batch // world_size,
        }
        deepspeed.DeepSpeedConfig(alone)
    except (AssertionError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"deepspeed: {' '.join(str(error).split())}") from error


def quieten(config: RunConfig) -> None:
    """Leaves DeepSpeed's own log to warnings, unless the run asks for more by deepspeed.log_level."""
    if "log_level" not in config.deepspeed:
        deepspeed.utils.logger.setLevel(logging.WARNING)
    # DeepSpeed calls two collectives by names that torch is about to retire.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def describe(config: RunConfig, engine: deepspeed.DeepSpeedEngine, ranks: Ranks) -> str:
    """One line about what is about to train."""
    numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())
    processes = f"{ranks.world_size} process{'es' if ranks.world_size > 1 else ''}"
    return (
        f"{numel:,} parameters, context {config.model.context:,}, {processes} on {engine.device.type}, "
        f"ZeRO {zero_stage(config.deepspeed)}, {precision(config.deepspeed)}"
    )


def _checkpoint_in_training(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Recomputes a block in backward; there is none to come in evaluation."""
    return deepspeed.checkpointing.checkpoint(function, *args) if torch.is_grad_enabled() else function(*args)


def _section_models() -> dict[str, type[BaseModel]]:
    """DeepSpeed's own classes of the sections that it checks strictly."""
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
        "comet": CometConfig,
        "compile": CompileConfig,
    }
