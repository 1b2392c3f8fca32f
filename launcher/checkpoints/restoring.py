"""Load a checkpoint into an engine, whatever layout saved it.

Every rank reads its part of every tensor from the files that have it. The engine gets the state dictionary that it
would have saved itself, and saves normally afterwards.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Sequence
from functools import partial

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from longstride.data_pipelines.order import StreamState
from longstride.launcher.checkpoints.checkpoint import Checkpoint
from longstride.launcher.checkpoints.saved_state import MASTER, SavedState, load_lanes
from longstride.launcher.config import RunConfig
from longstride.launcher.engine import rate_change, states
from longstride.launcher.models import AVERAGE
from longstride.launcher.output import say
from longstride.launcher.ranks import Ranks


def restore(engine: DeepSpeedEngine, checkpoint: Checkpoint, config: RunConfig, ranks: Ranks) -> StreamState:
    """Load a checkpoint into a fresh engine, check its probe, and report changes; return the next position.

    All ranks must call. AgreedError on every rank, as for ``load``, or if the model computes another loss.
    """
    began, conversion = time.monotonic(), None
    saved = load(engine, checkpoint, config, ranks)
    if not checkpoint.is_repeated_by(config, ranks.world_size):
        conversion = f"{checkpoint.conversion(config, ranks.world_size)} ({time.monotonic() - began:.0f} s)"
        if not has_moments(saved, states.vectors(engine)):
            conversion += "; the optimiser's moments start from zero"
    if (probe := checkpoint.probe) is not None:
        probe.check(engine, config, ranks)
    change = rate_change(checkpoint.config.train, config.train, engine.lr_scheduler.last_epoch)
    for line in filter(None, [conversion, change] if ranks.is_first else []):
        say(line)
    return checkpoint.stream


def load(engine: DeepSpeedEngine, checkpoint: Checkpoint, config: RunConfig, ranks: Ranks) -> SavedState:
    """Load a verified checkpoint of any layout, with the random generators. All ranks must call.

    The engine keeps the settings of its own configuration.

    Raises:
        AgreedError: on every rank, if a file must be trusted, or holds something that no run writes.
    """
    saved = ranks.run_on_all(lambda: SavedState(checkpoint))
    load_state(engine, saved, ranks)
    saved.tables.load(engine)
    if engine.lanes is not None:
        ranks.run_on_all(lambda: load_lanes(engine, checkpoint, ranks))
    checkpoint.load_generators(config, ranks, engine.device)
    return saved


def load_state(engine: DeepSpeedEngine, saved: SavedState, ranks: Ranks) -> None:
    """Load weights, moments, counters, schedule and loss scale.

    All ranks must call. AgreedError on every rank if a file is too short for what it should hold.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()  # ZeRO 3: every parameter is partitioned
    with torch.no_grad():
        # Give the optimiser a state dictionary in the form in which it would have saved it.
        vectors = states.vectors(engine)

        def read(vectors: Sequence[states.Vector]) -> tuple[list[Tensor], dict[int, dict[str, Tensor]]]:
            return [_fill_vector(saved, MASTER, vector) for vector in vectors], _optimizer_states(saved, vectors)

        masters, moments = ranks.run_on_all(lambda: read(vectors))
        for part in engine.held.parts:
            if part.kind == "experts":
                part.fill(*ranks.run_on_all(partial(read, part.vectors())))
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            state = optimizer.state_dict()
            state["fp32_flat_groups"] = masters
            state["optimizer_state_dict"]["state"] = moments
            optimizer.load_state_dict([{}] * vectors[0].rank + [state])
        elif engine.zero_optimization() or isinstance(optimizer, BF16_Optimizer):
            state = optimizer.state_dict()
            state["single_partition_of_fp32_groups"] = masters
            state["base_optimizer_state"] = optimizer.optimizer.state_dict() | {"state": moments}
            with contextlib.redirect_stdout(io.StringIO()):  # one of the optimisers prints that it loads
                optimizer.load_state_dict([{}] * vectors[0].rank + [state], load_from_fp32_weights=True)
            optimizer.update_lp_params()
        else:  # ZeRO 0
            half = isinstance(optimizer, FP16_UnfusedOptimizer)
            inner = optimizer.optimizer if half else optimizer
            inner.load_state_dict(inner.state_dict() | {"state": moments})
            parameters = {name: parameter for parameter, name in engine.param_names.items()}
            for vector, master in zip(vectors, masters, strict=True):
                vector.master.copy_(master)
                parameters[vector.local[0].name].copy_(master)
        if saved.buffers:
            engine.module.load_state_dict(saved.buffers, strict=False)  # without parameters
    if hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()
    engine.lr_scheduler.load_state_dict(engine.lr_scheduler.state_dict() | saved.schedule)
    for name, value in saved.numbers.items():
        setattr(engine, name, value)
    engine.settings.apply(engine, saved.loss_scale)


def has_moments(saved: SavedState, vectors: Sequence[states.Vector]) -> bool:
    """Whether a checkpoint has the moments that these vectors need, or none yet. The same on every rank."""
    if saved.kinds == (MASTER,):
        return True
    states_of = ((vector.moments, _moments_of(saved, vector)) for vector in vectors)
    return all(len(found) == 1 and kinds in ((), needed) for needed, found in states_of for kinds, _ in found)


def _moments_of(saved: SavedState, vector: states.Vector) -> set[tuple[tuple[str, ...], float | None]]:
    """Return the kinds of moments, and the steps, that the parameters of a vector have: one, if they are alike."""
    return {saved.moments_of(part.name) for share in vector.slices for part in share}


def _optimizer_states(saved: SavedState, vectors: Sequence[states.Vector]) -> dict[int, dict[str, Tensor]]:
    """Return the optimiser's state and the average for each vector; nothing before the first step.

    From another optimiser's checkpoint, only the average is taken, and all moments start at zero. Old and new moments
    cannot share one step count.
    """
    if saved.kinds == (MASTER,):
        return {}
    is_same_optimizer = has_moments(saved, vectors)
    result = {}
    for number, vector in enumerate(vectors):
        ((kinds, step),) = _moments_of(saved, vector) if is_same_optimizer else ((vector.moments, 0.0),)
        if not kinds:  # frozen so far
            continue
        state = {kind: _fill_vector(saved, kind, vector, empty=not is_same_optimizer) for kind in vector.moments}
        if states.MOMENTUM not in state:
            state["step"] = torch.tensor(step, dtype=torch.float32)
        if AVERAGE in saved.kinds:
            state[AVERAGE] = _fill_vector(saved, AVERAGE, vector)
        result[number] = state
    return result


def _fill_vector(saved: SavedState, kind: str, vector: states.Vector, *, empty: bool = False) -> Tensor:
    """Return this rank's vector of a kind. Elements that no parameter fills are padding, and zero."""
    filled = torch.zeros(states.shape_of(kind, vector.master.shape))
    flat = filled.view(-1)
    for part in () if empty else vector.local:
        source = saved.elements(part.name, kind, part.start, part.stop)
        flat[part.at : part.at + len(source)] = source
    return filled
