"""An export's weights: one safetensors file, or several below a size with an index, written tensor by tensor.

Memory holds one tensor, whatever the size of the model and of its files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import torch
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import write_json
from longstride.launcher.models import ALIGNMENT, Fingerprint, write_tensors
from longstride.launcher.output import file_names

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B?)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB, 500MB or 2GiB; a number alone is bytes.

    Raises:
        ConfigError: it is no size, or 0.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    unit = match[2].removesuffix("B") + "B" if match and match[2] not in ("", "B") else ""
    size = int(float(match[1]) * _UNITS[unit]) if match and unit in _UNITS else 0
    if size < 1:
        raise ConfigError(f"--shard-size={text}: must be a size above 0 such as 5GB, 500MB or 2GiB")
    return size


def write_weights(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    tensor: Callable[[str], Tensor],
    dtype: torch.dtype,
    limit: int,
    fingerprint: Fingerprint,
    buffers: Set[str],
) -> None:
    """Writes the tensors of these names into a folder, and adds each to the model's fingerprint.

    Args:
        folder: that exists.
        shapes: by name, in the model's order: neighbours come to lie in one file.
        tensor: the fp32 tensor of a name.
        dtype: what they are stored in.
        limit: bytes of tensors a file; one tensor that is larger has a file of its own.
        fingerprint: of the model, still without tensors.
        buffers: names of tensors that are stored in fp32, as parts compute with them.

    Raises:
        ConfigError: a value is too large for the type.
    """

    def stored(names: Iterable[str]) -> Iterator[Tensor]:
        for name in names:
            exact = tensor(name)
            converted = exact if name in buffers else exact.to(dtype)
            lost = exact.isfinite() & ~converted.isfinite() if dtype != torch.float32 else None
            if lost is not None and bool(lost.any()):
                value, most = float(exact[lost].flatten()[0]), torch.finfo(dtype).max
                rule = f"is beyond {str(dtype).removeprefix('torch.')}, which ends at {most:.5g}; take --dtype fp32"
                raise ConfigError(f"{name}={value:.6g}: {rule}")
            fingerprint.add(name, converted)
            yield converted

    sizes = {name: (4 if name in buffers else dtype.itemsize) * math.prod(shape) for name, shape in shapes.items()}
    parts: list[list[str]] = [[]]
    for name, size in sizes.items():
        if parts[-1] and sum(sizes[each] for each in parts[-1]) + size > limit:
            parts.append([])
        parts[-1].append(name)
    file_of: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        file = file_names.WEIGHTS if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        # Tensors that leave the next one aligned come first: the format has no gaps between tensors.
        names.sort(key=lambda name: sizes[name] % ALIGNMENT != 0)
        write_tensors(folder / file, {name: shapes[name] for name in names}, stored(names), dtype, buffers=buffers)
        file_of |= dict.fromkeys(names, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(file_of.items()))}
        write_json(folder / file_names.WEIGHTS_INDEX, index)
