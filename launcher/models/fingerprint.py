"""What names an exported model: a hash of its configuration and its weights, however they are cut into files.

The SHA-256 of UTF-8 lines, each with its line end: first the `model` object of config.json as JSON with sorted keys, no
spaces and ASCII alone; then, for every tensor in the order of the names, name, type (F32, F16 or BF16), shape and the
SHA-256 of its bytes (little-endian, the last axis fastest), a space between each, and a × between the shape's sizes:

    blocks.0.attention.projection.weight F32 512×512 9f86d081…
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # as a command line names them
MAPPED_BYTES = 1 << 26  # read of mapped files before they are mapped anew, where tensors are read one after the other
STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # as safetensors names them


class TensorHash(NamedTuple):
    """One tensor of a fingerprint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str  # of its bytes

    @classmethod
    def of(cls, tensor: Tensor) -> TensorHash:
        """A tensor on the CPU; one that is mapped from a file is read once, and not copied."""
        return cls(tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor_bytes(tensor)).hexdigest())


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU as files hold them, little-endian, the last axis fastest: a view, no copy."""
    words = {2: torch.int16, 4: torch.int32}[tensor.element_size()]  # numpy has no bf16
    flat = tensor.detach().contiguous().flatten().view(words).numpy()
    return flat.astype(f"<i{tensor.element_size()}", copy=False).view(np.uint8).data


def combined(model: Mapping[str, Any], tensors: Mapping[str, TensorHash]) -> str:
    """The fingerprint of a model, from the `model` object of its config.json and its tensors by name."""
    canonical = json.dumps(model, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    lines = [canonical]
    for name, each in sorted(tensors.items()):
        lines.append(f"{name} {STORED[each.dtype]} {'×'.join(map(str, each.shape))} {each.sha256}")
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
