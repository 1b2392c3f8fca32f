"""Safetensors files, the fingerprint of a model, and the shapes of its tensors.

A fingerprint does not depend on how tensors are distributed over files. It is the SHA-256 of UTF-8 lines, each with a
line end. The first is the `model` object of config.json as JSON: sorted keys, no spaces, only ASCII. Then follows a
line for every tensor, sorted by name: name, type (F32, F16 or BF16), shape and the SHA-256 of its bytes (little-endian,
the last axis fastest). Fields are separated by spaces, and the sizes of the shape by ×:

    blocks.0.attention.projection.weight F32 512×512 9f86d081…
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longstride.data_pipelines.durable import naming
from longstride.kernels import ConfigError
from longstride.launcher.verbs import PRECISIONS, WEIGHTS
from longstride.sparse_model import ModelConfig, SparseTransformer, Table

DTYPES = dict(zip(PRECISIONS, (torch.bfloat16, torch.float16, torch.float32), strict=True))
TRAINED, AVERAGE = WEIGHTS  # the average's name is also its key in the optimiser's state
STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # as safetensors names them
_NAMES = STORED | {torch.float64: "F64", torch.int32: "I32", torch.int64: "I64"}
ALIGNMENT = 64  # bytes, torch's own alignment; the rounding of matrix products may depend on it
MAPPED_BYTES = 1 << 26  # to read before a file is mapped anew; until then they count as memory of the process
_MOST_NAMES = 3  # of many wrong tensors, in a message
_BLOCKS = "blocks."


class Fingerprint:
    """The fingerprint of a model, computed tensor by tensor in any order.

    ``model`` is the `model` object of its config.json.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        self._model = json.dumps(model, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        self._lines: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor on the CPU. A mapped one is read once and not copied."""
        shape = "×".join(map(str, tensor.shape))
        self._lines[name] = f"{name} {STORED[tensor.dtype]} {shape} {hashlib.sha256(_bytes_of(tensor)).hexdigest()}"

    def hexdigest(self) -> str:
        """Return the fingerprint of the tensors so far."""
        lines = [self._model, *(line for _, line in sorted(self._lines.items()))]
        return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def write_tensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[Tensor],
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> tuple[int, str]:
    """Write a safetensors file tensor by tensor, flushed to the disk; return its size in bytes and its SHA-256.

    Memory holds one tensor at a time. The format begins with all names, shapes and offsets, so ``shapes`` must be known
    first. The tensors follow in its order, of their ``dtypes``, or fp32.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    dtypes = {name: dtypes.get(name, torch.float32) for name in shapes}
    offset = 0
    for name, shape in shapes.items():
        size = dtypes[name].itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [offset, offset + size]}
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
    """Return a view of a CPU tensor's bytes as files store them: little-endian, the last axis fastest."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]  # numpy has no bf16
    flat = tensor.detach().contiguous().flatten().view(words).numpy()
    return flat.astype(f"<i{tensor.element_size()}", copy=False).view(np.uint8).data


@dataclass(frozen=True, slots=True)
class Shapes:
    """Names and shapes of a model's parameters and buffers, in the model's order.

    A configuration is a few hundred bytes from anybody, and can request any number of layers of any size. It is
    therefore checked against the actual files by this class, before modules or memory are allocated.
    """

    of: dict[str, torch.Size]
    buffers: frozenset[str]  # names of buffers
    tables: frozenset[str] = frozenset()  # names of parameters that few positions read, see ``Table``

    @classmethod
    def of_model(cls, config: ModelConfig) -> Shapes:
        """Return the shapes for a configuration; ConfigError if a tensor is too large for any machine."""
        model, kinds = SparseTransformer.of_each_kind(config)
        buffers = dict(model.named_buffers()).keys()
        tables = {f"{path}.rows" for path, module in model.named_modules() if isinstance(module, Table)}
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        numbers = {kind: f"{_BLOCKS}{number}." for number, kind in enumerate(kinds)}
        of_kind = {
            prefix: [(name.removeprefix(prefix), name) for name in shapes if name.startswith(prefix)]
            for prefix in numbers.values()
        }
        names: dict[str, str] = {}  # by the name in the complete model, that in this one
        first = next((place for place, name in enumerate(shapes) if name.startswith(_BLOCKS)), len(shapes))
        names.update((name, name) for name in list(shapes)[:first])
        for number, block in enumerate(config.blocks()):
            names.update((f"{_BLOCKS}{number}.{suffix}", name) for suffix, name in of_kind[numbers[block]])
        names.update((name, name) for name in list(shapes)[first:] if not name.startswith(_BLOCKS))
        return cls(
            {name: shapes[source] for name, source in names.items()},
            frozenset(name for name, source in names.items() if source in buffers),
            frozenset(name for name, source in names.items() if source in tables),
        )

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(shape.numel() for name, shape in self.of.items() if name not in self.buffers)

    def check(self, actual: dict[str, tuple[int, ...]], what: str, where: str) -> None:
        """Raise ConfigError about ``what`` and ``where`` unless ``actual`` has the model's names and shapes."""
        refuse(self.of.keys() - actual.keys(), f"{where}: {what} it lacks")
        refuse(actual.keys() - self.of.keys(), f"{where}: {what} it has unknown")
        pairs = ((name, list(actual[name]), list(shape)) for name, shape in self.of.items())
        wrong = {f"{name} of {shape} instead of {expected}" for name, shape, expected in pairs if shape != expected}
        refuse(wrong, f"{where}: {what} it has")


def refuse(wrong: set[str], what: str) -> None:
    """Raise ConfigError that names the first of these tensors, if there are any."""
    if wrong:
        others = f" and {len(wrong) - _MOST_NAMES} more" if len(wrong) > _MOST_NAMES else ""
        shown = (name if len(name) <= 160 else f"{name[:159]}…" for name in sorted(wrong)[:_MOST_NAMES])
        raise ConfigError(f"{what} {', '.join(shown)}{others}")
