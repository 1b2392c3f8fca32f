"""What both public calls, ``sparse_attention`` and ``attend_one``, ask of their tensors and backends."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from longstride.kernels.errors import ConfigError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(named: dict[str, tuple[Tensor, str]]) -> None:
    """Whether tensors have their axes, none of them empty but the batch, and share the first one's dtype and device.

    Args:
        named: of each name the tensor and its axes, a letter each.

    Raises:
        ValueError: in one line, the first that does not fit.
    """
    first, (reference, _) = next(iter(named.items()))
    for name, (tensor, axes) in named.items():
        if tensor.dim() != len(axes):
            raise ValueError(f"{name} must be ({', '.join(axes)}), not {tuple(tensor.shape)}")
        if 0 in tensor.shape[1:]:
            raise ValueError(f"{name} {tuple(tensor.shape)} must have at least one head, position and channel")
        if tensor.dtype not in DTYPES or tensor.dtype != reference.dtype:
            raise ValueError(f"{name} is {tensor.dtype}: q, k and v must share one of fp16, bf16, fp32, fp64")
        if tensor.device != reference.device:
            raise ValueError(f"{name} is on {tensor.device}, {first} on {reference.device}: they must share a device")


def choose_backend(
    name: str,
    known: tuple[str, ...],
    load: Callable[[str], ModuleType],
    tensors: tuple[Tensor, Tensor, Tensor],
    advice: str,
) -> str:
    """The backend to run: the named one, or the fast one of the device; never a slower one in its place.

    Args:
        name: auto, or one of ``known``.
        known: the backends of this call.
        load: a backend's module, whose ``why_not`` says why it cannot run on tensors.
        tensors: q, k and v.
        advice: what else to do where auto's choice cannot run.

    Raises:
        ConfigError: the backend is unknown or cannot run here; the path is ``backend``.
    """
    if name != "auto" and name not in known:
        raise ConfigError.at("backend", name, f"must be one of auto, {', '.join(known)}")
    chosen = name if name != "auto" else "triton" if tensors[0].is_cuda else "cpu"
    reason = load(chosen).why_not(*tensors)
    if reason is None:
        return chosen
    if name != "auto":
        raise ConfigError.at("backend", name, f"cannot run here: {reason}")
    raise ConfigError.at("backend", name, f"{chosen} cannot run here: {reason}; {advice}")
