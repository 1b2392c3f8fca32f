"""Restore an engine from a checkpoint, in the layout that saved it or in another one.

Another layout (ZeRO stage, precision, number of ranks) loads the universal form. The engine gets the state dictionary
that it would have saved itself, with this rank's part of every tensor. DeepSpeed loads it like its own checkpoint, and
saves normally afterwards.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import torch
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
from longstride.launcher.engine import rate_change, states
from longstride.launcher.models import AVERAGE
from longstride.launcher.output import say
from longstride.launcher.ranks import Ranks


def restore(engine: DeepSpeedEngine, checkpoint: Checkpoint, config: RunConfig, ranks: Ranks) -> StreamState:
    """Load a verified checkpoint of any layout into a fresh engine; return the next position. All ranks must call.

    The engine keeps the settings of its own configuration, and the probe is checked. The run stays unchanged, except
    that the universal form may be new.

    Raises:
        AgreedError: on every rank, if the checkpoint cannot be converted or the model computes another loss.
    """
    conversion = None
    if checkpoint.needs_conversion(config, ranks.world_size):
        form, seconds = ready_universal(checkpoint, ranks)
        load_universal(engine, form)
        checkpoint.load_tables(engine)  # need no conversion
        took = f"{seconds:.0f} s" if seconds else "converted before"
        conversion = f"{checkpoint.conversion(config, ranks.world_size)} ({took})"
        if not has_moments(form, states.vectors(engine)):
            conversion += "; the optimiser's moments start from zero"
        checkpoint.load_generators(config, ranks, engine.device)
        state = checkpoint.stream
    else:
        state = checkpoint.load(engine, config, ranks)
        if not checkpoint.is_repeated_by(config, ranks.world_size):
            conversion = checkpoint.conversion(config, ranks.world_size)
    if (probe := checkpoint.probe) is not None:
        probe.check(engine, config, ranks)
    change = rate_change(checkpoint.config.train, config.train, engine.lr_scheduler.last_epoch)
    for line in filter(None, [conversion, change] if ranks.is_first else []):
        say(line)
    return state


def load_universal(engine: DeepSpeedEngine, form: Universal) -> None:
    """Load a universal form into a fresh engine, except random generators. All ranks must call."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()  # ZeRO 3: every parameter is partitioned
    with torch.no_grad():
        # Give the optimiser a state dictionary in the form in which it would have saved it.
        vectors = states.vectors(engine)
        masters, moments = [_fill_vector(form, MASTER, vector) for vector in vectors], _optimizer_states(form, vectors)
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
        if buffers := form.buffers():
            engine.module.load_state_dict(buffers, strict=False)  # without parameters
    if hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()
    manifest = form.manifest
    engine.lr_scheduler.load_state_dict(engine.lr_scheduler.state_dict() | manifest.schedule)
    for name, value in manifest.numbers.items():
        setattr(engine, name, value)
    engine.settings.apply(engine, manifest.loss_scale)


def has_moments(form: Universal, vectors: Sequence[states.Vector]) -> bool:
    """Whether a form has the moments that these vectors need, or has no moments yet. The same on every rank."""
    if form.manifest.adam_step is None:
        return True
    needed = ((part.name, vector.moments) for vector in vectors for share in vector.slices for part in share)
    return all(form.has(name, kind) for name, kinds in needed for kind in kinds)


def _optimizer_states(form: Universal, vectors: Sequence[states.Vector]) -> dict[int, dict[str, Tensor]]:
    """Return the optimiser's state and the average for each vector; nothing before the first step.

    From another optimiser's checkpoint, only the average is taken, and all moments start at zero. Old and new moments
    cannot share one step count.
    """
    step = form.manifest.adam_step
    if step is None:
        return {}
    is_same_optimizer = has_moments(form, vectors)
    result = {}
    for number, vector in enumerate(vectors):
        state = {kind: _fill_vector(form, kind, vector, empty=not is_same_optimizer) for kind in vector.moments}
        if states.MOMENTUM not in state:
            state["step"] = torch.tensor(step if is_same_optimizer else 0.0)
        if AVERAGE in form.kinds:
            state[AVERAGE] = _fill_vector(form, AVERAGE, vector)
        result[number] = state
    return result


def _fill_vector(form: Universal, kind: str, vector: states.Vector, *, empty: bool = False) -> Tensor:
    """Return this rank's vector of a kind. Elements that no parameter fills are padding, and zero."""
    filled = torch.zeros(states.shape_of(kind, vector.master.shape))
    flat = filled.view(-1)
    for part in () if empty else vector.local:
        source = form.flat(part.name, kind)[part.start : part.stop]
        flat[part.at : part.at + len(source)] = source
    return filled
