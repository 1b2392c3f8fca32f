"""Tensors in safetensors files, the fingerprint that names a model by them, and what tensors a model has.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longstride.data_pipelines.durable import naming
from longstride.kernels import ConfigError
from longstride.launcher.verbs import PRECISIONS, WEIGHTS
from longstride.sparse_model import ModelConfig, SparseTransformer

DTYPES = dict(zip(PRECISIONS, (torch.bfloat16, torch.float16, torch.float32), strict=True))
TRAINED, AVERAGE = WEIGHTS  # the average's name is its key in the optimiser's state too
STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # as safetensors names them
ALIGNMENT = 64  # bytes: torch aligns its own memory so, and the rounding of matrix products may depend on it
MAPPED_BYTES = 1 << 26  # read of a file before it is mapped anew: until then they count as memory of the process
_MOST_NAMES = 3  # of many wrong tensors, in a message
_BLOCKS = "blocks."


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


@dataclass(frozen=True, slots=True)
class Shapes:
    """Names and shapes of a model's parameters and buffers, in the model's own order.

    A configuration is a few hundred bytes that anybody may have written, and can ask for any number of layers of any
    size. So it is held against what is really there, by this, before a module is made or memory taken for it.
    """

    of: dict[str, torch.Size]
    buffers: frozenset[str]  # those of the names that are no parameters

    @classmethod
    def of_model(cls, config: ModelConfig) -> Shapes:
        """Of a configuration; blocks that are alike are made once.

        Raises:
            ConfigError: no machine can hold such a tensor.
        """
        with _Uninitialized():
            model, kinds = SparseTransformer.of_each_kind(config)
        buffers = dict(model.named_buffers()).keys()
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        numbers = {kind: f"{_BLOCKS}{number}." for number, kind in enumerate(kinds)}
        of_kind = {
            prefix: [(name.removeprefix(prefix), name) for name in shapes if name.startswith(prefix)]
            for prefix in numbers.values()
        }
        found: dict[str, str] = {}  # by the name in the whole model, that in this one
        first = next((place for place, name in enumerate(shapes) if name.startswith(_BLOCKS)), len(shapes))
        found.update((name, name) for name in list(shapes)[:first])
        for number, block in enumerate(config.blocks()):
            found.update((f"{_BLOCKS}{number}.{rest}", name) for rest, name in of_kind[numbers[block]])
        found.update((name, name) for name in list(shapes)[first:] if not name.startswith(_BLOCKS))
        return cls(
            {name: shapes[known] for name, known in found.items()},
            frozenset(name for name, known in found.items() if known in buffers),
        )

    @property
    def parameters(self) -> int:
        """Numbers in all parameters together."""
        return sum(shape.numel() for name, shape in self.of.items() if name not in self.buffers)

    def check(self, found: dict[str, tuple[int, ...]], what: str, where: str) -> None:
        """Raise ConfigError unless these are the model's tensors, by name and shape.

        ``what`` they are, and ``where`` they are: both stand in the message.
        """
        refuse(self.of.keys() - found.keys(), f"{where}: {what} it lacks")
        refuse(found.keys() - self.of.keys(), f"{where}: {what} it has unknown")
        pairs = ((name, list(found[name]), list(shape)) for name, shape in self.of.items())
        wrong = {f"{name} of {shape} instead of {expected}" for name, shape, expected in pairs if shape != expected}
        refuse(wrong, f"{where}: {what} it has")


def refuse(wrong: set[str], what: str) -> None:
    """Raise ConfigError that names the first of these tensors; nothing where there are none."""
    if wrong:
        more = f" and {len(wrong) - _MOST_NAMES} more" if len(wrong) > _MOST_NAMES else ""
        shown = (name if len(name) <= 160 else f"{name[:159]}…" for name in sorted(wrong)[:_MOST_NAMES])
        raise ConfigError(f"{what} {', '.join(shown)}{more}")


def empty_model(config: ModelConfig) -> SparseTransformer:
    """The network with names and shapes of its parameters, and neither memory nor values: on torch's meta device."""
    with torch.device("meta"), _Uninitialized():
        return SparseTransformer(config)


class _Uninitialized(TorchFunctionMode):
    """Leaves out initial values: on the meta device they would only load torch's compiler, 75 MB of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)
