"""Reads DeepSpeed's files, which are pickles, without running anything that they say. Imports deepspeed.

torch's weights-only unpickler takes tensors, numbers, texts and their containers; four plain classes of DeepSpeed's are
all that it writes besides.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from longstride.kernels import ConfigError
from longstride.launcher.config import TRUST_OPTION
from longstride.launcher.output import say

_PLAIN = [fragment_address, ZeroStageEnum, DynamicLossScaler, LossScaler]
_NO_ARCHIVE = "no zip archive of torch's, which would tell what it holds"


def read_pickle(path: Path | str, *, map_location: Any = "cpu", mapped: bool = False, trusted: bool = False) -> Any:
    """What torch.save wrote to a file; ``mapped`` leaves its tensors on the disk until they are used.

    Raises:
        ConfigError: it holds something else, which only running its code would bring, and is not ``trusted``.
    """
    try:
        with torch.serialization.safe_globals(_PLAIN):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        what = asked_code(path)
        if what in (None, _NO_ARCHIVE):
            what = " ".join(str(error).partition("\n")[2].split())[:200]
    if not trusted:
        raise ConfigError(f"{path}: {refusal(what)}")
    say(f"{path}: opened by {TRUST_OPTION}, and what it asks for is run: {what}")
    return torch.load(path, map_location=map_location, weights_only=False, mmap=mapped)


def asked_code(path: Path | str) -> str | None:
    """What a file would have Python call besides tensors and plain classes, in words, told without opening it.

    None where there is nothing. A file that is no zip archive counts as one that would: Longstride writes none.
    """
    try:
        with torch.serialization.safe_globals(_PLAIN):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (ValueError, RuntimeError, pickle.UnpicklingError):
        return _NO_ARCHIVE
    return ", ".join(sorted(names)) or None


def refusal(what: str) -> str:
    """The line about a file that asks for more than it may."""
    return (
        f"holds more than tensors and numbers ({what}), which only running its code would bring; where you trust "
        f"whoever wrote it, {TRUST_OPTION} opens it"
    )
