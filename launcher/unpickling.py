"""Reads DeepSpeed's files, which are pickles, without running anything that they say. Imports deepspeed.

torch's weights-only unpickler takes tensors, numbers, texts and their containers; four plain classes of DeepSpeed's are
all that it writes besides.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from kernels.errors import ConfigError

_PLAIN = [fragment_address, ZeroStageEnum, DynamicLossScaler, LossScaler]


def read_pickle(path: Path | str, *, map_location: Any = "cpu", mapped: bool = False) -> Any:
    """What torch.save wrote to a file; ``mapped`` leaves its tensors on the disk until they are used.

    Raises:
        ConfigError: it holds something else, which only running its code would bring.
    """
    try:
        with torch.serialization.safe_globals(_PLAIN):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        what = str(error).split("\n", 1)[0]
        raise ConfigError(f"{path}: holds more than tensors and numbers, and is not opened: {what}") from None


class _WeightsOnlyEngine(TorchCheckpointEngine):
    """DeepSpeed's own reader and writer of files, but for how it reads."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of a file."""
        return read_pickle(path, map_location=map_location)


def read_weights_only(engine: DeepSpeedEngine) -> None:
    """Has an engine read its checkpoints by ``read_pickle``."""
    engine.checkpoint_engine = _WeightsOnlyEngine(engine._config)
