"""Where DeepSpeed holds the master weights, the optimiser's state of each parameter and the loss scale.

Offsets and padding are read from the engine, not computed from its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch.distributed
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

MASTER = "fp32"  # the kind of a saved tensor that holds weights; the others are keys of the optimiser's state
MOMENTUM = "momentum_buffer"
SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # of a dynamic loss scale
HYSTERESIS = "delayed_shift"  # DeepSpeed's setting that ``cur_hysteresis`` counts down from
TABLES = "embedding.ngrams.rows"  # the n-gram tables, a parameter unknown to DeepSpeed, see ``tables.py``
# Keys of the optimiser's state: of Adam, Muon, Adafactor's matrices and Adafactor's vectors.
MOMENTS = (("exp_avg", "exp_avg_sq"), (MOMENTUM,), ("row_var", "col_var"), ("variance",))


def shape_of(kind: str, shape: torch.Size) -> torch.Size:
    """Return the shape of a parameter's state of a kind. Adafactor's means over rows and columns are smaller."""
    return torch.Size({"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, *shape[-1:])}.get(kind, shape))


def table_prefix(name: str) -> str:
    """Return how the names of a table's tensors begin in a checkpoint. The first tables were those of n-grams."""
    return "" if name == TABLES else f"{name}."


def advance_average(average: Tensor, weights: Tensor, decay: float, lag: Tensor) -> Tensor:
    """Return the moving average (n, C) of rows (n, C) that have not changed for ``lag`` steps (n,)."""
    return torch.lerp(weights, average, (decay**lag)[:, None])


class Slice(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter, beginning at ``at`` in a rank's vector."""

    name: str
    at: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Vector:
    """Master weights that are stepped together: one complete parameter, or this rank's flat share of several."""

    master: Tensor  # one parameter to the optimiser; elements outside slices are padding, and zero
    moments: tuple[str, ...]  # one of ``MOMENTS``
    slices: tuple[tuple[Slice, ...], ...]  # of each rank's share; one entry if every rank has all
    rank: int = 0  # that has this share
    group: Any = None  # the process group of the ranks that share it

    @property
    def local(self) -> tuple[Slice, ...]:
        """The slices of this rank's share."""
        return self.slices[self.rank]


def vectors(engine: DeepSpeedEngine) -> list[Vector]:
    """Return all vectors in the order of the optimiser's state. Ranks only differ in the share."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _parameter_shards(engine)
    if engine.zero_optimization() or isinstance(optimizer, BF16_Optimizer):
        return _group_shards(engine)
    # ZeRO 0: every rank has everything. In half precision DeepSpeed's optimiser has the master weights.
    masters = [group["params"] for group in optimizer.param_groups]
    parameters = optimizer.fp16_groups if isinstance(optimizer, FP16_UnfusedOptimizer) else masters
    unsharded = []
    for settings, *group in zip(optimizer.param_groups, parameters, masters, strict=True):
        for parameter, master in zip(*group, strict=True):
            slices = ((Slice(engine.param_names[parameter], 0, 0, parameter.numel()),),)
            unsharded.append(Vector(master, moments_of(settings, master.dim()), slices))
    return unsharded


def moments_of(settings: dict[str, Any], dimensions: int) -> tuple[str, ...]:
    """Return the optimiser's state keys for a group, which its settings imply."""
    if "momentum" in settings:
        return MOMENTS[1]
    return MOMENTS[2 if dimensions > 1 else 3] if "beta2_decay" in settings else MOMENTS[0]


def _group_shards(engine: DeepSpeedEngine) -> list[Vector]:
    """Find the vectors of ZeRO 1 and 2: each group is one vector, parameters end to end, cut evenly over the ranks."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        masters, groups = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
        sizes = ([parameter.numel() for parameter in group] for group in groups)
        offsets = [list(accumulate(counts, initial=0))[:-1] for counts in sizes]
    else:
        masters, groups = optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups
        offsets = optimizer.round_robin_bit16_offsets
    shards = []
    for number, (master, group, begins) in enumerate(zip(masters, groups, offsets, strict=True)):
        size, sharing = master.numel(), optimizer.real_dp_process_group[number]
        shares = []
        for low in range(0, size * torch.distributed.get_world_size(sharing), size):
            slices = []
            for parameter, offset in zip(group, begins, strict=True):
                begin, end = max(offset, low), min(offset + parameter.numel(), low + size)
                if begin < end:
                    slices.append(Slice(engine.param_names[parameter], begin - low, begin - offset, end - offset))
            shares.append(tuple(slices))
        moments = moments_of(optimizer.param_groups[number], 1)
        shards.append(Vector(master, moments, tuple(shares), torch.distributed.get_rank(sharing), sharing))
    return shards


def _parameter_shards(engine: DeepSpeedEngine) -> list[Vector]:
    """Find the vectors of ZeRO 3: parameters are cut evenly over the ranks, and a sub-group's pieces are end to end."""
    optimizer = engine.optimizer
    sharing = optimizer.dp_process_group
    shards = []
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    for number, (group, master) in enumerate(pairs):
        shares = []
        for rank in range(torch.distributed.get_world_size(sharing)):
            slices, at = [], 0
            for parameter in group:
                size = parameter.ds_tensor.ds_numel
                begin, end = rank * size, min((rank + 1) * size, parameter.ds_numel)
                if begin < end:  # the last rank may only have padding
                    slices.append(Slice(engine.param_names[parameter], at, begin, end))
                at += size
            shares.append(tuple(slices))
        moments = moments_of(optimizer.param_groups[optimizer.sub_group_to_group_id[number]], 1)
        shards.append(Vector(master, moments, tuple(shares), torch.distributed.get_rank(sharing), sharing))
    return shards


def loss_scaler(engine: DeepSpeedEngine) -> Any:
    """Return DeepSpeed's object that holds the loss scale; None where nothing does."""
    return getattr(engine.optimizer, scaler_name(engine), None)


def dynamic_scale(engine: DeepSpeedEngine) -> dict[str, Any] | None:
    """Return the fields of the engine's loss scaler if its scale is dynamic, else None."""
    scaler = loss_scaler(engine)
    return vars(scaler) if scaler is not None and is_dynamic(vars(scaler)) else None


def is_dynamic(scaler: Mapping[str, Any]) -> bool:
    """Whether the loss scaler with these fields moves its scale."""
    return bool(scaler.get("dynamic", scaler.get("dynamic_loss_scale")))


def lowest_scale(scaler: Mapping[str, Any]) -> float:
    """Return how far the scale of the dynamic loss scaler with these fields may fall."""
    return float(scaler["min_scale"] if "min_scale" in scaler else scaler["min_loss_scale"])


def scaler_name(engine: DeepSpeedEngine) -> str:
    """Return the attribute of the engine's optimiser that is its loss scaler, where it has one."""
    return "loss_scaler" if hasattr(engine.optimizer, "loss_scaler") else "loss_scale_config"
