"""A safetensors file written tensor by tensor: memory holds one of them, however many there are."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from longstride.launcher.checkpoints.manifest import FileRecord
from longstride.launcher.models import STORED, tensor_bytes

ALIGNMENT = 64  # bytes, of the first tensor: mapped ones then lie as torch's own do


def write_tensors(
    path: Path, shapes: Mapping[str, Sequence[int]], tensors: Iterable[Tensor], dtype: torch.dtype = torch.float32
) -> FileRecord:
    """Writes tensors of a type in the order of their shapes, flushed to the disk; returns the file's size and hash.

    The format has all names, shapes and places first, so these are to be known before the tensors.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": STORED[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            digest.update(piece)
            file.write(piece)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            assert list(tensor.shape) == list(shape) and tensor.dtype == dtype, name
            content = tensor_bytes(tensor)
            digest.update(content)
            file.write(content)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    assert size == 8 + len(text) + offset
    return FileRecord(bytes=size, sha256=digest.hexdigest())
