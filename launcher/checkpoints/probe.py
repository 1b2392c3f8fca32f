"""The probe: one context saved with every checkpoint, and the model's loss on it.

A loaded model with another loss computes something else. The bytes are random, so that every byte value and position
takes part and no training data goes into a checkpoint.
"""

from __future__ import annotations

import io
import math
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
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import ModelConfig, SparseTransformer, StrictModel

PROBE = "probe.npy"  # (N,) uint8, in a checkpoint's folder
_SEED = 1904
_TOLERANCES = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-3}  # relative, for the same kind of device and attention backend
_OTHER_COMPUTER = 1e-3  # for another kind of device or attention backend
_OTHER_PRECISION = 1e-2


class ProbeRecord(StrictModel):
    """The probe in a checkpoint's manifest."""

    loss_nats: float = Field(ge=0)  # when the checkpoint was saved
    crc32: int = Field(ge=0, lt=2**32)  # of the bytes
    precision: Literal["fp32", "fp16", "bf16"]  # of the computation
    device: str
    backend: str  # of attention


@dataclass(frozen=True, slots=True)
class Probe:
    """The probe of a verified checkpoint."""

    path: Path
    record: ProbeRecord

    def read(self, model: ModelConfig) -> Tensor:
        """Read the context, (N,) uint8; ConfigError if the file is missing or damaged, or does not fit the model."""
        expected = io.BytesIO()
        np.save(expected, np.empty(model.context, np.uint8))
        size = len(expected.getvalue())
        header = expected.getvalue()[: -model.context]  # the same bytes rule out other types and sizes
        try:
            text = read_plain(self.path, size, follow_links=False)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from None
        content = np.frombuffer(text.removeprefix(header), np.uint8)
        if len(text) != size or len(content) != model.context or int(content.max()) >= model.vocabulary:
            raise ConfigError(f"{self.path}: is not a context of {model.context:,} bytes below {model.vocabulary}")
        if zlib.crc32(content.tobytes()) != self.record.crc32:
            raise ConfigError(f"{self.path}: its bytes do not have the manifest's CRC-32")
        return torch.from_numpy(content.copy())

    @staticmethod
    @torch.no_grad()
    def summed_nats(
        network: DeepSpeedEngine | SparseTransformer, config: ModelConfig, content: Tensor, device: torch.device
    ) -> Tensor:
        """Return the summed nats () fp64 of what is predicted in a probe, (N,) uint8; always the same tokens."""
        lengths, number = torch.tensor([len(content)]), torch.tensor([0])
        corrupted = config.objective.corrupt(content[None], lengths, number, _SEED, config.vocabulary)
        extra = {} if corrupted is None else {name: rows.to(device) for name, rows in corrupted._asdict().items()}
        nats: Tensor = network(content[None].to(device), return_nats=True, **extra)
        return nats.double().sum()

    def difference(self, nats: float) -> float:
        """Return the relative difference between a loss and the saved one; nan if either is."""
        saved = self.record.loss_nats
        return abs(nats - saved) / saved if saved else abs(nats)

    def tolerance(self, precision: str, device: str, backend: str) -> float:
        """Return the largest ``difference`` that rounding can cause, for the same weights."""
        record = self.record
        if record.precision != precision:
            return _OTHER_PRECISION
        is_same = (record.device, record.backend) == (device, backend)
        return _TOLERANCES[precision] if is_same else _OTHER_COMPUTER

    def mismatch(self, nats: float, precision: str, device: str, backend: str) -> str | None:
        """Say how a loss differs from the saved one by more than rounding; None if it does not."""
        difference, tolerance = self.difference(nats), self.tolerance(precision, device, backend)
        if difference <= tolerance:  # nan counts as wrong
            return None
        return (
            f"loss on {PROBE} is {nats:.9g} nats, but was {self.record.loss_nats:.9g} when it was saved; "
            f"they differ by {difference:.1e}, and rounding explains {tolerance:.0e}"
        )

    def check(self, engine: DeepSpeedEngine, config: RunConfig, ranks: Ranks) -> None:
        """Compare the loaded model's loss with the saved one, unless ``train.probe`` is false. All ranks must call.

        AgreedError on every rank if the losses differ by more than rounding.
        """
        if not config.train.probe:
            return
        content = ranks.run_on_all(lambda: self.read(config.model))
        nats = _loss_nats(engine, content, ranks)
        mismatch = self.mismatch(nats, config.precision, engine.device.type, config.model.backend)
        advice = "start it as the run that saved it, or check the model and set train.probe=false"
        ranks.agree(mismatch and f"{self.path.parent}: the loaded model's {mismatch}; {advice}")


def take_probe(engine: DeepSpeedEngine, config: RunConfig, folder: Path, ranks: Ranks) -> dict[str, Any] | None:
    """Compute the loss on the probe and write its bytes; return its entry in the manifest. All ranks must call.

    Returns None if ``train.probe`` is false or the loss is not finite.
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
    """Return the mean loss of one context, (N,) uint8, without dropout. All ranks must call and get the same."""
    model = engine.module
    training, attention = model.training, model.attention_from
    engine.eval()
    model.use_attention(None)  # as the model will be used, whatever the stage of the run
    nats = Probe.summed_nats(engine, model.config, content, engine.device)
    model.use_attention(attention)
    engine.train(training)
    count = model.config.objective.num_predicted(len(content))
    if ranks.sequence_parallel == 1:
        return float(nats / count)
    shares = ranks.gather(nats[None]).cpu()  # all groups compute the same context
    return float(shares[: ranks.sequence_parallel].sum() / count)
