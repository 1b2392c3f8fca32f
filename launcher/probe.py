"""One context that every checkpoint is saved with, and the model's loss on it: does the loaded model compute the same?

The bytes are drawn, not read: every value of a byte and every position takes part, and no data goes into a checkpoint.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from launcher.checkpoint import Checkpoint
from launcher.config import RunConfig
from launcher.deepspeed_keys import precision
from launcher.processes import Ranks, gather_objects
from launcher.reporting import AgreedError

PROBE = "probe.npy"  # (N,) uint8, in a checkpoint's folder
_SEED = 1904
_TOLERANCES = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-3}  # relative, where the same computes
_OTHER_COMPUTER = 1e-3  # another kind of device, or another backend of attention
_OTHER_PRECISION = 1e-2


def take_probe(engine: DeepSpeedEngine, config: RunConfig, folder: Path, ranks: Ranks) -> dict[str, Any] | None:
    """Computes the loss on the probe, and writes its bytes; returns what the manifest says. All ranks must call.

    None where the run has none, or where the loss is no finite number.
    """
    if not config.train.probe:
        return None
    model = config.model
    content = np.random.default_rng(_SEED).integers(0, min(256, model.vocabulary), model.context, dtype=np.uint8)
    nats = probe_nats(engine, torch.from_numpy(content))
    if not math.isfinite(nats):
        return None
    if ranks.is_first:
        np.save(folder / PROBE, content, allow_pickle=False)
    return {
        "loss_nats": nats,
        "crc32": zlib.crc32(content.tobytes()),
        "precision": precision(config.deepspeed),
        "device": engine.device.type,
        "backend": config.model.backend,
    }


def probe_nats(engine: DeepSpeedEngine, content: Tensor) -> float:
    """The mean loss of one context, without dropout: (N,) uint8. All ranks must call, and get the same number."""
    training = engine.module.training
    engine.eval()
    with torch.no_grad():
        nats = engine(content[None].to(engine.device), return_nats=True)
    engine.train(training)
    return float(nats.double().mean())


def check_probe(engine: DeepSpeedEngine, checkpoint: Checkpoint, config: RunConfig, ranks: Ranks) -> float | None:
    """Holds the loss of the loaded model against the one saved; returns their relative difference.

    None where the checkpoint has no probe, or the run asks for none. All ranks must call.

    Raises:
        AgreedError: on every rank, where they differ by more than rounding.
    """
    saved = checkpoint.manifest.probe
    if saved is None or not config.train.probe:
        return None
    try:
        content = np.load(checkpoint.folder / PROBE, allow_pickle=False)
    except ValueError:
        raise AgreedError(f"{checkpoint.folder / PROBE}: holds no array") from None
    if zlib.crc32(content.tobytes()) != saved["crc32"]:
        raise AgreedError(f"{checkpoint.folder / PROBE}: its bytes are not those that the manifest tells of")
    nats, before = probe_nats(engine, torch.from_numpy(content)), float(saved["loss_nats"])
    difference = abs(nats - before) / abs(before) if before else abs(nats)
    tolerance = _tolerance(saved, engine, config)
    # A nan is in no order with anything.
    wrong = [rank for rank, fine in enumerate(gather_objects(difference <= tolerance, ranks)) if not fine]
    if wrong:
        raise AgreedError(
            f"{checkpoint.folder}: the loaded model's loss on {PROBE} is {nats:.9g} nats, and was {before:.9g} when it "
            f"was saved, {difference:.1e} apart where {tolerance:.0e} is rounding: something computes otherwise here; "
            f"start as it was saved, or look whether it is right, and set train.probe=false"
        )
    return difference


def _tolerance(saved: dict[str, Any], engine: DeepSpeedEngine, config: RunConfig) -> float:
    """How far two losses of the same weights may be apart, relative to them."""
    own = precision(config.deepspeed)
    if saved["precision"] != own:
        return _OTHER_PRECISION
    same = saved["device"] == engine.device.type and saved["backend"] == config.model.backend
    return _TOLERANCES[own] if same else max(_TOLERANCES[own], _OTHER_COMPUTER)
