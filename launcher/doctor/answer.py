"""`python -m longstride.launcher.doctor.answer [CONFIG-AS-JSON]`: what a host says of itself, as one JSON object.

A process of its own, on this host or by ssh on another: an import of torch may crash, and a file server may hang.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable
from typing import Any


def answer(content: dict[str, Any] | None) -> dict[str, Any]:
    """Versions, code, devices and, of a run's configuration, which backend and data it finds here."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in ("torch", "triton", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    for name, question in (("code", _code), ("devices", _devices), ("mpi", _mpi)):
        _ask(found, name, question)
    if content is not None:
        _ask(found, "attention", lambda: _attention(content))
        _ask(found, "data", lambda: _data(content))
    return found


def _ask(found: dict[str, Any], name: str, question: Callable[[], Any]) -> None:
    try:
        found[name] = question()
    except Exception as error:  # of any library: it is what is to be told
        lines = str(error).strip().splitlines() or [""]
        kind = "" if type(error).__name__ in ("ConfigError", "DataError") else f"{type(error).__name__}: "
        found[f"no {name}"] = f"{kind}{lines[0]}"


def _code() -> str:
    from longstride.launcher.ranks import code_digest

    return code_digest()[:12]


def _devices() -> dict[str, Any]:
    import torch

    from longstride.kernels import has_bf16_products

    cards = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(number)
        cards.append(
            {
                "name": card.name,
                "capability": [card.major, card.minor],
                "bytes": card.total_memory,
                "bf16": torch.cuda.is_bf16_supported(),
            }
        )
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if cards and nccl else None
    built = torch.version.cuda or torch.version.hip
    return {"cards": cards, "nccl": version, "built": built, "bf16_products": has_bf16_products()}


def _mpi() -> str:
    import mpi4py

    mpi4py.rc.initialize = False  # MPI ends a process that it cannot start in, as one without a home
    from mpi4py import MPI

    return MPI.Get_library_version().splitlines()[0].strip("\0 ")


def _attention(content: dict[str, Any]) -> dict[str, Any]:
    import torch

    from longstride.launcher.config import RunConfig
    from longstride.launcher.models import DTYPES

    config = RunConfig.model_validate(content)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config.model.check_backend(device, DTYPES[config.precision], training=True)
    named = config.model.backend
    return {
        "backend": named if named != "auto" else "triton" if device.type == "cuda" else "cpu",
        "device": device.type,
        "precision": config.precision,
    }


def _data(content: dict[str, Any]) -> str:
    from longstride.launcher.config import RunConfig
    from longstride.launcher.data import RunData, check_data
    from longstride.launcher.ranks import Ranks

    config = RunConfig.model_validate(content)
    check_data(config)
    return RunData(config, Ranks()).fingerprint


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.argv[1]) if len(sys.argv) > 1 else None)))
