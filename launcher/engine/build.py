"""Build a DeepSpeed engine from a RunConfig: model, optimiser, schedule, precision, activation checkpointing."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from pydantic import BaseModel
from torch import Tensor, nn

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, part_errors
from longstride.launcher.engine import states
from longstride.launcher.engine.device import check_compiler, compile_blocks
from longstride.launcher.engine.experts import ParallelExperts
from longstride.launcher.engine.held import Held, HeldParameters
from longstride.launcher.engine.lanes import LaneStates
from longstride.launcher.engine.muon import Muon, matrices_in
from longstride.launcher.engine.optimizer import (
    MATRICES,
    Settings,
    make_optimizer,
    make_schedule,
    parameter_groups,
)
from longstride.launcher.engine.tables import HeldTable
from longstride.launcher.models import DTYPES
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import BlockContext, MixerOutput, ModelConfig, SparseTransformer, Table

_PART_MODELS: dict[str, type[BaseModel]] = {  # DeepSpeed's classes for the sections that it checks strictly
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
    "compile": CompileConfig,
    "comms_logger": CommsLoggerConfig,
}
_NAMED_BY_RUN = {"tensorboard": "job_name", "csv_monitor": "job_name", "wandb": "group"}
_ONLY_ON_GPUS = {
    "activation_checkpointing": ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"),
    "zero_optimization": ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
}


def build_engine(
    config: RunConfig, ranks: Ranks, fill: Callable[[SparseTransformer], None] | None = None
) -> deepspeed.DeepSpeedEngine:
    """Build the engine around a freshly initialised model. The process group must exist.

    All ranks draw the same weights from the seed; dropout differs between ranks. ``fill`` may overwrite the first
    weights, with the same values on all ranks.
    """
    torch.manual_seed(config.train.seed)
    model = SparseTransformer(config.model)
    if fill is not None:
        fill(model)
    tables = [(f"{path}.rows", module) for path, module in model.named_modules() if isinstance(module, Table)]
    held: list[Held] = [
        HeldTable(name, table, config.train, ranks, sharded=config.zero_stage == 3) for name, table in tables
    ]
    if config.train.expert_parallel is not None:
        held.append(ParallelExperts(model, config.train, ranks, DTYPES[config.precision]))
    parameters, groups = (
        dict(model.named_parameters()),
        parameter_groups(model, split=config.train.optimizer is not None, apart=config.train.trained_parts),
    )
    optimizer = make_optimizer(parameters, groups, config.train, half=config.precision != "fp32")
    if type(optimizer) not in ZERO_SUPPORTED_OPTIMIZERS:  # else DeepSpeed demands a key that allows it, and warns
        ZERO_SUPPORTED_OPTIMIZERS.append(type(optimizer))
    roles = model.parameter_roles()
    matrices = {
        name: matrices_in(parameters[name].shape, role.rows) for name, role in roles.items() if role.part == MATRICES
    }
    section = engine_section(config, ranks.world_size)
    if config.train.compile:  # else ZeRO 3 would gather each layer's parameters inside the compiled code
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.blocks[0])])
    # One of DeepSpeed's optimisers prints its memory use while it is built, at any log level.
    with contextlib.redirect_stdout(sys.stdout if "log_level" in section else io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=functools.partial(make_schedule, train=config.train),
            config=section,
        )
    # DeepSpeed counts samples by these. It assumes that ranks share no contexts, but they may.
    engine._config.train_batch_size = engine.tput_timer.batch_size = config.train.global_batch
    engine.held = HeldParameters(engine, held)
    engine.lanes = None  # None: the model carries nothing
    if model.carried:
        engine.lanes = LaneStates(model, config.train.global_batch // ranks.data_world_size, engine.device)
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        # Its constructor takes a step with zero gradients, which would leave Adam's bias correction one step ahead.
        engine.optimizer.optimizer.state.clear()
    scaler = states.dynamic_scale(engine)
    if scaler is not None and "raise_error_at_min_scale" in scaler:
        # The guards handle an overflow at the lowest loss scale, where DeepSpeed would raise.
        scaler["raise_error_at_min_scale"] = False
    engine.settings = Settings(engine, config.train)
    if isinstance(optimizer, Muon):
        optimizer.lay_out(states.vectors(engine), matrices, engine.device)
    if config.train.compile:
        compile_blocks(model)
    if config.train.activation_checkpointing:
        checkpoint_activations(model, section)
    if config.train.sequence_parallel is not None:
        model.divide(ranks.division(config.train.sequence_exchange))
    torch.manual_seed(config.train.seed + 1 + ranks.data_rank)
    return engine


def checkpoint_activations(model: SparseTransformer, section: dict[str, Any]) -> None:
    """Recompute every residual block in the backward pass, dropout included, as DeepSpeed's ``section`` says."""

    def checkpoint_in_training(block: nn.Module, h: Tensor, context: BlockContext, *shared: Tensor) -> MixerOutput:
        if not torch.is_grad_enabled():  # evaluation has no backward pass
            return block(h, context, *shared)
        tensors = h, *shared
        return MixerOutput(*deepspeed.checkpointing.checkpoint(lambda h, *shared: block(h, context, *shared), *tensors))

    deepspeed.checkpointing.configure(None, deepspeed_config=section)
    model.activation_checkpoint = checkpoint_in_training


def engine_section(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the dictionary for deepspeed.initialize: the run's own section and the keys that follow from `train`."""
    train = config.train
    # Otherwise two runs would write to the same monitor folder and hide each other's points.
    name = Path(train.output).absolute().name
    monitors = {
        key: {field: name} | config.deepspeed[key] for key, field in _NAMED_BY_RUN.items() if key in config.deepspeed
    }
    batch = train.global_batch * (train.sequence_parallel or 1)  # as DeepSpeed counts contexts
    return {
        "steps_per_print": None,  # its progress lines would mix with ours
        "zero_force_ds_cpu_optimizer": False,  # else it refuses torch's AdamW with an offloaded optimiser
        **config.deepspeed,
        **monitors,
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": batch // (train.micro_batch * world_size),
    }


def package_versions(model: ModelConfig) -> dict[str, str]:
    """Return the versions of packages that determine results, by name, and those of the model's foreign classes."""
    return {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")} | model.foreign_code()


def weights_are_finite(engine: deepspeed.DeepSpeedEngine, ranks: Ranks) -> bool:
    """Whether every weight of every rank is a finite number. All ranks must call."""
    # Under ZeRO 3 a parameter outside its use is empty, and ds_tensor is this rank's part.
    shards = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()]
    shards += engine.held.local()
    return all(ranks.gather_objects(all(bool(torch.isfinite(shard).all()) for shard in shards)))


def check_engine(config: RunConfig, ranks: Ranks) -> None:
    """Check, before a process group exists, that DeepSpeed accepts its section and the attention can run.

    Raises:
        ConfigError: DeepSpeed rejects or would convert a value, a monitor's package is missing, a setting needs a GPU,
            or the attention backend cannot train on this rank's device.
    """
    check_section(config, ranks.world_size, on_cpu=ranks.device.type == "cpu")
    if config.train.compile:
        check_compiler()
    try:
        config.model.check_backend(ranks.device, DTYPES[config.precision], training=True)
    except ConfigError as error:
        raise error.under("model") from None


def check_section(config: RunConfig, world_size: int, on_cpu: bool) -> None:
    """Check that DeepSpeed accepts its section; see ``check_engine``."""
    errors = part_errors(config.deepspeed, _PART_MODELS)
    for name, keys in _ONLY_ON_GPUS.items():
        part = config.deepspeed.get(name, {})
        rule = "needs a GPU; leave it out on a CPU"
        errors += [
            ConfigError.at(f"deepspeed.{name}.{key}", part[key], rule) for key in keys if on_cpu and part.get(key)
        ]
    if errors:
        raise ConfigError.joined(errors)
    try:
        section = engine_section(config, world_size)
        deepspeed.DeepSpeedConfig(section | {"train_batch_size": section["train_batch_size"] // world_size})
    except (AssertionError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"deepspeed: {' '.join(str(error).split())}") from error
