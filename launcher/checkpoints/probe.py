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

from longstride.kernels.errors import ConfigError
from longstride.launcher.checkpoints.checkpoint import Checkpoint
from longstride.launcher.config import RunConfig
from longstride.launcher.output import AgreedError
from longstride.launcher.ranks import Ranks

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
        "precision": config.precision,
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
        content = read_probe(checkpoint)
    except ConfigError as error:
        raise AgreedError(str(error)) from None
    nats, before = probe_nats(engine, content), float(saved["loss_nats"])
    difference = relative_difference(nats, before)
    own = config.precision
    tolerance = probe_tolerance(saved, own, engine.device.type, config.model.backend)
    # A nan is in no order with anything.
    wrong = [rank for rank, fine in enumerate(ranks.gather_objects(difference <= tolerance)) if not fine]
    if wrong:
        raise AgreedError(
            f"{checkpoint.folder}: the loaded model's loss on {PROBE} is {nats:.9g} nats, and was {before:.9g} when it "
            f"was saved, {difference:.1e} apart where {tolerance:.0e} is rounding: something computes otherwise here; "
            f"start as it was saved, or look whether it is right, and set train.probe=false"
        )
    return difference


def read_probe(checkpoint: Checkpoint) -> Tensor:
    """The context of a verified checkpoint that has a probe: (N,) uint8.

    Raises:
        ConfigError: it is not the one that the manifest tells of.
    """
    path = checkpoint.folder / PROBE
    try:
        content = np.load(path, allow_pickle=False)
    except ValueError:
        raise ConfigError(f"{path}: holds no array") from None
    assert checkpoint.manifest.probe is not None
    if zlib.crc32(content.tobytes()) != checkpoint.manifest.probe["crc32"]:
        raise ConfigError(f"{path}: its bytes are not those that the manifest tells of")
    return torch.from_numpy(content)


def relative_difference(nats: float, before: float) -> float:
    """How far a loss is from an earlier one, relative to it; nan where either is."""
    return abs(nats - before) / abs(before) if before else abs(nats)


def probe_tolerance(saved: dict[str, Any], own: str, device: str, backend: str) -> float:
    """How far two losses of the same weights may be apart, relative to them.

    Args:
        saved: what the manifest says of the probe.
        own: the precision that computes it now.
        device, backend: the type of device, and the backend of attention that the configuration names there.
    """
    if saved["precision"] != own:
        return _OTHER_PRECISION
    same = saved["device"] == device and saved["backend"] == backend
    return _TOLERANCES[own] if same else max(_TOLERANCES[own], _OTHER_COMPUTER)
