"""The probe: one context that every checkpoint is saved with, and the model's loss on it.

A loaded model whose loss is another one computes something else. The bytes are drawn, not read: every value of a byte
and every position takes part, and no data goes into a checkpoint.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from pydantic import Field
from torch import Tensor

from longstride.data_pipelines.plain_files import read_plain
from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig
from longstride.launcher.output import AgreedError
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import ModelConfig, StrictModel

PROBE = "probe.npy"  # (N,) uint8, in a checkpoint's folder
# What numpy writes before such an array: read by nothing that would take another type or size from it.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '\|u1', 'fortran_order': False, 'shape': \((\d+),\), \} *\n", re.S
)
_MOST_HEADER_BYTES = 256  # numpy writes 128
_SEED = 1904
_TOLERANCES = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-3}  # relative, where the same device and backend compute
_OTHER_COMPUTER = 1e-3  # another kind of device, or another backend of attention
_OTHER_PRECISION = 1e-2


class ProbeRecord(StrictModel):
    """What a checkpoint's manifest has of its probe."""

    loss_nats: float = Field(ge=0)  # when the checkpoint was saved
    crc32: int = Field(ge=0, lt=2**32)  # of the bytes
    precision: Literal["fp32", "fp16", "bf16"]  # that it was computed in
    device: str
    backend: str  # of attention


@dataclass(frozen=True, slots=True)
class Probe:
    """The probe of a verified checkpoint; all but the path is as in ``ProbeRecord``."""

    path: Path
    loss_nats: float
    crc32: int
    precision: str
    device: str
    backend: str

    def read(self, model: ModelConfig) -> Tensor:
        """The context: (N,) uint8.

        Raises:
            ConfigError: the file holds another one than the manifest has, none, or none of this model.
        """
        try:
            text = read_plain(self.path, _MOST_HEADER_BYTES + model.context, follow_links=False)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from None
        header = _HEADER.match(text)
        if header is None or header[1] != b"%d" % (len(text) - header.end()):
            raise ConfigError(f"{self.path}: holds no array of bytes")
        content = np.frombuffer(text, np.uint8, offset=header.end())
        if zlib.crc32(content.tobytes()) != self.crc32:
            raise ConfigError(f"{self.path}: its bytes are not those that the manifest tells of")
        if len(content) != model.context or int(content.max()) >= model.vocabulary:
            raise ConfigError(f"{self.path}: is no context of {model.context:,} bytes below {model.vocabulary}")
        return torch.from_numpy(content.copy())

    def difference(self, nats: float) -> float:
        """How far a loss is from the saved one, relative to it; nan where either is."""
        return abs(nats - self.loss_nats) / abs(self.loss_nats) if self.loss_nats else abs(nats)

    def tolerance(self, precision: str, device: str, backend: str) -> float:
        """How large ``difference`` may be, for the same weights, where these compute the loss."""
        if self.precision != precision:
            return _OTHER_PRECISION
        same = self.device == device and self.backend == backend
        return _TOLERANCES[precision] if same else max(_TOLERANCES[precision], _OTHER_COMPUTER)

    def check(self, engine: DeepSpeedEngine, config: RunConfig, ranks: Ranks) -> float | None:
        """Compares the loss of the loaded model with the saved one; returns ``difference``. All ranks must call.

        None where the run asks for no probe (`train.probe`).

        Raises:
            AgreedError: on every rank, where they differ by more than rounding.
        """
        if not config.train.probe:
            return None
        try:
            content = self.read(config.model)
        except ConfigError as error:
            raise AgreedError(str(error)) from None
        nats = _loss_nats(engine, content, ranks)
        difference = self.difference(nats)
        tolerance = self.tolerance(config.precision, engine.device.type, config.model.backend)
        # `<=`, so that a nan is wrong.
        wrong = [rank for rank, fine in enumerate(ranks.gather_objects(difference <= tolerance)) if not fine]
        if wrong:
            raise AgreedError(
                f"{self.path.parent}: the loaded model's loss on {PROBE} is {nats:.9g} nats, and was "
                f"{self.loss_nats:.9g} when it was saved, {difference:.1e} apart where {tolerance:.0e} is rounding: "
                f"something computes otherwise here; start as it was saved, or look whether it is right, and set "
                f"train.probe=false"
            )
        return difference


def take_probe(engine: DeepSpeedEngine, config: RunConfig, folder: Path, ranks: Ranks) -> dict[str, Any] | None:
    """Computes the loss on the probe, and writes its bytes; returns what the manifest has of it. All ranks must call.

    None where the run has none (`train.probe`), or where the loss is no finite number.
    """
    if not config.train.probe:
        return None
    model = config.model
    content = np.random.default_rng(_SEED).integers(0, min(256, model.vocabulary), model.context, dtype=np.uint8)
    nats = _loss_nats(engine, torch.from_numpy(content), ranks)
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


def _loss_nats(engine: DeepSpeedEngine, content: Tensor, ranks: Ranks) -> float:
    """The mean loss of one context, without dropout: (N,) uint8. All ranks must call, and get the same number."""
    training = engine.module.training
    engine.eval()
    with torch.no_grad():
        nats = engine(content[None].to(engine.device), return_nats=True)
    engine.train(training)
    if ranks.sequence_parallel == 1:
        return float(nats.double().mean())
    shares = ranks.gather_float64(nats.double().sum(), engine.device)  # all groups have the same
    return float(shares[: ranks.sequence_parallel].sum() / len(content))
