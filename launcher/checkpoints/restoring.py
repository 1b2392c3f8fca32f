"""Brings an engine back to a checkpoint, in the layout that saved it or in another one.

In another one the universal form is loaded, into any ZeRO stage, precision and number of ranks. The engine gets what it
would have saved itself: its own optimiser's state dictionary, with this rank's part of every tensor filled in. So
DeepSpeed loads it like a checkpoint of its own, and saves normally afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.distributed
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from longstride.data_pipelines.order import StreamState
from longstride.launcher.checkpoints.checkpoint import Checkpoint
from longstride.launcher.checkpoints.saved_state import MASTER
from longstride.launcher.checkpoints.universal import Universal, ready_universal
from longstride.launcher.config import RunConfig
from longstride.launcher.engine import apply_settings
from longstride.launcher.output import say
from longstride.launcher.ranks import Ranks

_WHOLE_NUMBERS = ("cur_iter", "last_overflow_iter", "cur_hysteresis")  # of a loss scale's state


class _Slice(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter, which begin at ``at`` in a flat vector of this rank."""

    name: str
    at: int
    start: int
    stop: int


def restore(engine: DeepSpeedEngine, checkpoint: Checkpoint, config: RunConfig, ranks: Ranks) -> StreamState:
    """Brings a fresh engine to a verified checkpoint's state, whatever saved it; returns the next batch.

    The settings of the run's own configuration are kept, and the probe is checked. All ranks must call. Nothing of the
    run is changed; only the universal form may be new beside the checkpoint.

    Raises:
        AgreedError: on every rank, where it cannot be converted, or the loaded model computes something else.
    """
    manifest, conversion = checkpoint.manifest, None
    if checkpoint.needs_conversion(config, ranks.world_size):
        form, seconds = ready_universal(checkpoint, ranks)
        load_universal(engine, form)
        checkpoint.load_tables(engine)  # of any layout as they are
        took = f"{seconds:.0f} s" if seconds else "converted before"
        conversion = f"{checkpoint.conversion(config, ranks.world_size)} ({took})"
        if ranks.world_size == manifest.world_size:
            checkpoint.load_generators(ranks, engine.device)
        else:
            seed_generators(config.train.seed, manifest.step, ranks)
        state = StreamState.from_json(manifest.stream)
    else:
        state = checkpoint.load(engine, ranks)
    apply_settings(engine, config.train)
    if (probe := checkpoint.probe) is not None:
        probe.check(engine, config, ranks)
    if conversion and ranks.is_first:
        say(conversion)
    return state


def load_universal(engine: DeepSpeedEngine, form: Universal) -> None:
    """Brings a fresh engine to the state of a universal form, random generators excepted. All ranks must call."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()  # ZeRO 3: every parameter is partitioned
    with torch.no_grad():
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            _fill_parameter_shards(engine, form)
        elif engine.zero_optimization() or isinstance(optimizer, BF16_Optimizer):
            _fill_group_shards(engine, form)
        else:
            _fill_whole(engine, form)
    if hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()
    manifest = form.manifest
    engine.lr_scheduler.load_state_dict(engine.lr_scheduler.state_dict() | manifest.schedule)
    for name, value in manifest.numbers.items():
        setattr(engine, name, value)
    if manifest.loss_scale is not None and engine.fp16_enabled():
        # A static one is the configuration's. Window and bounds are the new run's too.
        half = isinstance(optimizer, FP16_UnfusedOptimizer)
        scaler = optimizer.loss_scale_config if half else optimizer.loss_scaler
        if scaler.dynamic_loss_scale if half else scaler.dynamic:
            for key, number in manifest.loss_scale.items():
                if hasattr(scaler, key):
                    setattr(scaler, key, int(number) if key in _WHOLE_NUMBERS else number)


def seed_generators(seed: int, step: int, ranks: Ranks) -> None:
    """Seeds this rank's random generators anew: another number of ranks saved no states for all of these."""
    text = f"{seed} {step} {ranks.world_size} {ranks.rank}".encode()
    torch.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)


def _fill_group_shards(engine: DeepSpeedEngine, form: Universal) -> None:
    """ZeRO 1 and 2: each group is one vector, parameters end to end, cut evenly over the ranks."""
    optimizer = engine.optimizer
    vectors, masters = [], []
    if isinstance(optimizer, BF16_Optimizer):
        partitions = optimizer.fp32_groups_flat_partition
        sizes = ([parameter.numel() for parameter in group] for group in optimizer.bf16_groups)
        starts = [list(accumulate(each, initial=0))[:-1] for each in sizes]
        groups = zip(optimizer.bf16_groups, starts, strict=True)
    else:
        partitions = optimizer.single_partition_of_fp32_groups
        groups = zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
    for number, (partition, (group, offsets)) in enumerate(zip(partitions, groups, strict=True)):
        size = partition.numel()
        low = size * torch.distributed.get_rank(group=optimizer.real_dp_process_group[number])
        parts = []
        for parameter, offset in zip(group, offsets, strict=True):
            begin, end = max(offset, low), min(offset + parameter.numel(), low + size)
            if begin < end:
                parts.append(_Slice(engine.param_names[parameter], begin - low, begin - offset, end - offset))
        vectors.append((parts, size))
        masters.append(_filled(form, MASTER, parts, size))
    state = optimizer.state_dict()
    state["single_partition_of_fp32_groups"] = masters
    state["base_optimizer_state"] = optimizer.optimizer.state_dict() | {"state": _states(form, vectors)}
    rank = torch.distributed.get_rank(group=optimizer.dp_process_group)
    with contextlib.redirect_stdout(io.StringIO()):  # one of the optimisers prints that it loads
        optimizer.load_state_dict([{}] * rank + [state], load_from_fp32_weights=True)
    optimizer.update_lp_params()


def _fill_parameter_shards(engine: DeepSpeedEngine, form: Universal) -> None:
    """ZeRO 3: each parameter is cut evenly over the ranks, and a sub-group's pieces are laid end to end."""
    optimizer = engine.optimizer
    rank = torch.distributed.get_rank(group=optimizer.dp_process_group)
    vectors, masters = [], []
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        parts, at = [], 0
        for parameter in group:
            size = parameter.ds_tensor.ds_numel
            begin, end = rank * size, min((rank + 1) * size, parameter.ds_numel)
            if begin < end:  # the last rank may have padding alone
                parts.append(_Slice(engine.param_names[parameter], at, begin, end))
            at += size
        vectors.append((parts, flat.numel()))
        masters.append(_filled(form, MASTER, parts, flat.numel()))
    state = optimizer.state_dict()
    state["fp32_flat_groups"] = masters
    state["optimizer_state_dict"]["state"] = _states(form, vectors)
    optimizer.load_state_dict([{}] * rank + [state])


def _fill_whole(engine: DeepSpeedEngine, form: Universal) -> None:
    """ZeRO 0: every rank has everything; in half precision DeepSpeed's optimiser keeps the master weights."""
    optimizer = engine.optimizer
    half = isinstance(optimizer, FP16_UnfusedOptimizer)
    groups = optimizer.fp16_groups if half else [group["params"] for group in optimizer.param_groups]
    parameters = list(chain.from_iterable(groups))
    vectors = [([_Slice(engine.param_names[each], 0, 0, each.numel())], each.numel()) for each in parameters]
    masters = [_filled(form, MASTER, *vector).view_as(each) for vector, each in zip(vectors, parameters, strict=True)]
    for parameter, master in zip(parameters, masters, strict=True):
        parameter.copy_(master)
    inner = optimizer.optimizer if half else optimizer
    states = _states(form, vectors)
    for number, state in states.items():  # none before Adam's first step
        state.update({key: value.view_as(parameters[number]) for key, value in state.items() if value.dim()})
    inner.load_state_dict(inner.state_dict() | {"state": states})
    if half:
        for kept, master in zip(chain.from_iterable(optimizer.fp32_groups), masters, strict=True):
            kept.copy_(master)


def _states(form: Universal, vectors: Sequence[tuple[list[_Slice], int]]) -> dict[int, dict[str, Tensor]]:
    """Adam's state and the average for each flat vector; none before Adam's first step."""
    step = form.manifest.adam_step
    if step is None:
        return {}
    kinds = [kind for kind in form.kinds if kind != MASTER]
    return {
        number: {"step": torch.tensor(step)} | {kind: _filled(form, kind, *vector) for kind in kinds}
        for number, vector in enumerate(vectors)
    }


def _filled(form: Universal, kind: str, parts: Sequence[_Slice], size: int) -> Tensor:
    """This rank's flat vector of a kind; what no parameter fills is padding, and zero."""
    flat = torch.zeros(size)
    for part in parts:
        flat[part.at : part.at + part.stop - part.start] = form.flat(part.name, kind)[part.start : part.stop]
    return flat
