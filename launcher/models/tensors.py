"""Tensors in safetensors files, and the fingerprint that names a model by them.

A fingerprint does not depend on how tensors are cut into files. It is the SHA-256 of lines in UTF-8, each with its
line end. The first is the `model` object of config.json as JSON: sorted keys, no spaces, ASCII alone. Then comes a line
for every tensor, in the order of the names: name, type (F32, F16 or BF16), shape and the SHA-256 of its bytes
(little-endian, the last axis fastest). Spaces separate these, and a × the sizes of the shape:

    blocks.0.attention.projection.weight F32 512×512 9f86d081…
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longstride.data_pipelines.durable import naming
from longstride.launcher.verbs import PRECISIONS, WEIGHTS

DTYPES = dict(zip(PRECISIONS, (torch.bfloat16, torch.float16, torch.float32), strict=True))
TRAINED, AVERAGE = WEIGHTS  # the average's name is its key in the optimiser's state too
STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # as safetensors names them
ALIGNMENT = 64  # bytes: torch aligns its own memory so, and the rounding of matrix products may depend on it
MAPPED_BYTES = 1 << 26  # read of a file before it is mapped anew: until then they count as memory of the process


class Fingerprint:
    """The fingerprint of a model, made tensor by tensor in any order.

    ``model`` is the `model` object of its config.json.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        self._model = json.dumps(model, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        self._lines: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor on the CPU; a mapped one is read once, and not copied."""
        shape = "×".join(map(str, tensor.shape))
        self._lines[name] = f"{name} {STORED[tensor.dtype]} {shape} {hashlib.sha256(_bytes_of(tensor)).hexdigest()}"

    def hexdigest(self) -> str:
        """Of the tensors added so far."""
        lines = [self._model, *(line for _, line in sorted(self._lines.items()))]
        return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def write_tensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[Tensor],
    dtype: torch.dtype = torch.float32,
    *,
    buffers: Container[str] = (),
) -> tuple[int, str]:
    """Writes a safetensors file tensor by tensor, flushed to the disk; returns its size in bytes and its SHA-256.

    Memory holds one tensor at a time. The format has all names, shapes and places first, so ``shapes`` must be known
    before the tensors, which follow in its order and are of type ``dtype``; those named in ``buffers`` are of fp32.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    dtypes = {name: torch.float32 if name in buffers else dtype for name in shapes}
    offset = 0
    for name, shape in shapes.items():
        size = dtypes[name].itemsize * math.prod(shape)
        header[name] = {"dtype": STORED[dtypes[name]], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    digest = hashlib.sha256()
    with naming(path), path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            digest.update(piece)
            file.write(piece)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            assert list(tensor.shape) == list(shape) and tensor.dtype == dtypes[name], name
            content = _bytes_of(tensor)
            digest.update(content)
            file.write(content)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    assert size == 8 + len(text) + offset
    return size, digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU as files hold them, little-endian, the last axis fastest: a view, no copy."""
    words = {2: torch.int16, 4: torch.int32}[tensor.element_size()]  # numpy has no bf16
    flat = tensor.detach().contiguous().flatten().view(words).numpy()
    return flat.astype(f"<i{tensor.element_size()}", copy=False).view(np.uint8).data
