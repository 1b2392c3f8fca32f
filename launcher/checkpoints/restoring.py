"""Brings an engine back to a checkpoint, in the layout that saved it or in another one.

In another one the universal form is loaded, into any ZeRO stage, precision and number of ranks. The engine gets what it
would have saved itself: its own optimiser's state dictionary, with this rank's part of every tensor filled in. So
DeepSpeed loads it like a checkpoint of its own, and saves normally afterwards.
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
    """Brings a fresh engine to a verified checkpoint's state, whatever saved it; returns the next batch.

    The settings of the run's own configuration are kept, and the probe is checked. All ranks must call. Nothing of the
    run is changed; only the universal form may be new beside the checkpoint.

    Raises:
        AgreedError: on every rank, where it cannot be converted, or the loaded model computes something else.
    """
    conversion = None
    if checkpoint.needs_conversion(config, ranks.world_size):
        form, seconds = ready_universal(checkpoint, ranks)
        load_universal(engine, form)
        checkpoint.load_tables(engine)  # of any layout as they are
        took = f"{seconds:.0f} s" if seconds else "converted before"
        conversion = f"{checkpoint.conversion(config, ranks.world_size)} ({took})"
        if not goes_on(form, states.vectors(engine)):
            conversion += "; the optimiser's moments begin anew"
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
    """Brings a fresh engine to the state of a universal form, random generators excepted. All ranks must call."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()  # ZeRO 3: every parameter is partitioned
    with torch.no_grad():
        _fill(engine, form)
        if buffers := form.buffers():
            engine.module.load_state_dict(buffers, strict=False)  # without parameters
    if hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()
    manifest = form.manifest
    engine.lr_scheduler.load_state_dict(engine.lr_scheduler.state_dict() | manifest.schedule)
    for name, value in manifest.numbers.items():
        setattr(engine, name, value)
    engine.settings.apply(engine, manifest.loss_scale)


def _fill(engine: DeepSpeedEngine, form: Universal) -> None:
    """Gives the optimiser a state dictionary as it would have saved it."""
    optimizer, vectors = engine.optimizer, states.vectors(engine)
    masters, moments = [_filled(form, MASTER, vector) for vector in vectors], _states(form, vectors)
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
            parameters[vector.own[0].name].copy_(master)


def goes_on(form: Universal, vectors: Sequence[states.Vector]) -> bool:
    """Whether a form has what the optimiser of these vectors keeps, or nothing yet. The same on every rank."""
    each = (
        (one.name, kind) for vector in vectors for share in vector.slices for one in share for kind in vector.moments
    )
    return form.manifest.adam_step is None or all(form.has(name, kind) for name, kind in each)


def _states(form: Universal, vectors: Sequence[states.Vector]) -> dict[int, dict[str, Tensor]]:
    """The optimiser's state and the average for each vector; none before its first step.

    Of another optimiser's checkpoint the average is taken, and all moments begin anew: moments of some weights alone,
    beside others that are new, would count steps that these have not seen.
    """
    step = form.manifest.adam_step
    if step is None:
        return {}
    known = goes_on(form, vectors)
    filled = {}
    for number, vector in enumerate(vectors):
        filled[number] = {kind: _filled(form, kind, vector, empty=not known) for kind in vector.moments}
        if states.MOMENTUM not in filled[number]:
            filled[number]["step"] = torch.tensor(step if known else 0.0)
        if AVERAGE in form.kinds:
            filled[number][AVERAGE] = _filled(form, AVERAGE, vector)
    return filled


def _filled(form: Universal, kind: str, vector: states.Vector, *, empty: bool = False) -> Tensor:
    """This rank's vector of a kind; what no parameter fills is padding, and zero."""
    whole = torch.zeros(states.shape_of(kind, vector.master.shape))
    flat = whole.view(-1)
    for part in () if empty else vector.own:
        source = form.flat(part.name, kind)[part.start : part.stop]
        flat[part.at : part.at + len(source)] = source
    return whole
