"""Loads a checkpoint's universal form into an engine of any ZeRO stage, precision and number of ranks.

An engine is given what it would have saved itself: its own optimiser's state dictionary, with every tensor filled in
for this rank's part. So DeepSpeed loads it as any checkpoint of its own, and saves normally afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from longstride.launcher.checkpoints.saved_state import MASTER
from longstride.launcher.checkpoints.universal import Universal
from longstride.launcher.ranks import Ranks

# How the loss scale's state is called where DeepSpeed keeps it otherwise; a whole number stays one.
_WHOLE = ("cur_iter", "last_overflow_iter", "cur_hysteresis")


class _Part(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter lie from ``at`` on in a flat vector of this rank's."""

    name: str
    at: int
    start: int
    stop: int


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
        _carry_loss_scale(engine, manifest.loss_scale)


def seed_generators(seed: int, step: int, ranks: Ranks) -> None:
    """Begins this rank's random generators anew: a number of ranks that saved none has no others to go on with."""
    text = f"{seed} {step} {ranks.world_size} {ranks.rank}".encode()
    torch.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)


def _fill_group_shards(engine: DeepSpeedEngine, form: Universal) -> None:
    """ZeRO 1 and 2: each group is one vector, parameters end to end, cut evenly over the ranks."""
    optimizer = engine.optimizer
    vectors, masters = [], []
    if isinstance(optimizer, BF16_Optimizer):
        own = optimizer.fp32_groups_flat_partition
        groups = [(group, _ends(group)) for group in optimizer.bf16_groups]
    else:
        own = optimizer.single_partition_of_fp32_groups
        pairs = zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
        groups = [(group, list(offsets)) for group, offsets in pairs]
    for number, (partition, (group, offsets)) in enumerate(zip(own, groups, strict=True)):
        size = partition.numel()
        low = size * torch.distributed.get_rank(group=optimizer.real_dp_process_group[number])
        parts = []
        for parameter, offset in zip(group, offsets, strict=True):
            begin, end = max(offset, low), min(offset + parameter.numel(), low + size)
            if begin < end:
                parts.append(_Part(engine.param_names[parameter], begin - low, begin - offset, end - offset))
        vectors.append((parts, size))
        masters.append(_filled(form, MASTER, parts, size))
    state = optimizer.state_dict()
    state["single_partition_of_fp32_groups"] = masters
    state["base_optimizer_state"] = _optimizer_state(optimizer.optimizer, form, vectors)
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
                parts.append(_Part(engine.param_names[parameter], at, begin, end))
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
    own = optimizer.fp16_groups if half else [group["params"] for group in optimizer.param_groups]
    parameters = [parameter for group in own for parameter in group]
    vectors = []
    for parameter in parameters:
        vectors.append(([_Part(engine.param_names[parameter], 0, 0, parameter.numel())], parameter.numel()))
    masters = [_filled(form, MASTER, *vector).view_as(each) for vector, each in zip(vectors, parameters, strict=True)]
    for parameter, master in zip(parameters, masters, strict=True):
        parameter.copy_(master)
    inner = optimizer.optimizer if half else optimizer
    inner_state = _optimizer_state(inner, form, vectors)
    for number, state in inner_state["state"].items():  # none before Adam's first step
        parameter = parameters[number]
        state.update({key: value.view_as(parameter) for key, value in state.items() if value.dim()})
    inner.load_state_dict(inner_state)
    if half:
        kept = [master for group in optimizer.fp32_groups for master in group]
        for place, master in zip(kept, masters, strict=True):
            place.copy_(master)


def _ends(group: Sequence[Tensor]) -> list[int]:
    """Where each parameter begins in a vector of all of them."""
    offsets = [0]
    for parameter in group[:-1]:
        offsets.append(offsets[-1] + parameter.numel())
    return offsets


def _optimizer_state(
    optimizer: torch.optim.Optimizer, form: Universal, vectors: Sequence[tuple[list[_Part], int]]
) -> dict[str, Any]:
    """A state dictionary of torch's optimiser for these vectors, with its own settings."""
    return optimizer.state_dict() | {"state": _states(form, vectors)}


def _states(form: Universal, vectors: Sequence[tuple[list[_Part], int]]) -> dict[int, dict[str, Tensor]]:
    """Adam's state and the average for each flat vector; none before Adam's first step."""
    step = form.manifest.adam_step
    if step is None:
        return {}
    kinds = [kind for kind in form.kinds if kind != MASTER]
    return {
        number: {"step": torch.tensor(step)} | {kind: _filled(form, kind, *vector) for kind in kinds}
        for number, vector in enumerate(vectors)
    }


def _filled(form: Universal, kind: str, parts: Sequence[_Part], size: int) -> Tensor:
    """This rank's flat vector of a kind; what no parameter fills is padding, and zero."""
    flat = torch.zeros(size)
    for part in parts:
        flat[part.at : part.at + part.stop - part.start] = form.flat(part.name, kind)[part.start : part.stop]
    return flat


def _carry_loss_scale(engine: DeepSpeedEngine, saved: dict[str, float]) -> None:
    """Goes on with the loss scale; a static one is the configuration's. Window and bounds are the new run's own."""
    half = isinstance(engine.optimizer, FP16_UnfusedOptimizer)
    scaler = engine.optimizer.loss_scale_config if half else engine.optimizer.loss_scaler
    if not (scaler.dynamic_loss_scale if half else scaler.dynamic):
        return
    for key, value in _held(saved, scaler):
        setattr(scaler, key, value)


def _held(saved: dict[str, float], scaler: object) -> Iterator[tuple[str, float]]:
    """The numbers that this kind of loss scale has as well."""
    for key, value in saved.items():
        if hasattr(scaler, key):
            yield key, int(value) if key in _WHOLE else value
