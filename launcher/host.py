"""`python -m longstride.launcher.host [CONFIG-AS-JSON]`: describe this host as a JSON object, for `longstride doctor`.

It is a separate process, on this host or on another one by ssh: an import of torch may crash, a file server may hang.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import sys
from typing import Any

from longstride.launcher.config import RunConfig


def describe_host(content: dict[str, Any] | None) -> dict[str, Any]:
    """Describe this host: versions, code, devices, and the backend and the data of a run's configuration.

    The reason for a missing entry is under its name with "no " before it.
    """
    description: dict[str, Any] = {"python": platform.python_version()}
    for name in ("torch", "triton", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            description[name] = importlib.metadata.version(name)

    def code() -> str:
        from longstride.launcher.ranks import code_digest

        return code_digest()[:12]

    def mpi() -> str:
        import mpi4py

        mpi4py.rc.initialize = False  # MPI aborts a process in which it cannot start, such as one without a home
        from mpi4py import MPI

        return MPI.Get_library_version().splitlines()[0].strip("\0 ")

    def attention() -> dict[str, Any]:
        import torch

        from longstride.launcher.models import DTYPES

        config = RunConfig.model_validate(content)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config.model.check_backend(device, DTYPES[config.precision], training=True)
        backend = config.model.backend
        if backend == "auto":
            backend = "triton" if device.type == "cuda" else "cpu"
        return {"backend": backend, "device": device.type, "precision": config.precision}

    def data() -> str:
        from longstride.launcher.data import TrainingData, check_data
        from longstride.launcher.ranks import Ranks

        config = RunConfig.model_validate(content)
        check_data(config)
        return TrainingData(config, Ranks()).fingerprint

    parts: dict[str, Any] = {"code": code, "devices": describe_devices, "mpi": mpi}
    if content is not None:
        parts |= {"attention": attention, "data": data}
    for name, describe in parts.items():
        try:
            description[name] = describe()
        except Exception as error:  # of any library
            kind = "" if type(error).__name__ in ("ConfigError", "DataError") else f"{type(error).__name__}: "
            description[f"no {name}"] = f"{kind}{(str(error).strip().splitlines() or [''])[0]}"
    return description


def describe_devices() -> dict[str, Any]:
    """Describe the GPUs of this host, NCCL, and the build of torch."""
    import torch

    from longstride.kernels import has_bf16_products

    cards = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(number)
        capability, has_bf16 = [card.major, card.minor], torch.cuda.is_bf16_supported()
        cards.append({"name": card.name, "capability": capability, "bytes": card.total_memory, "bf16": has_bf16})
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if cards and nccl else None
    built = torch.version.cuda or torch.version.hip
    return {"cards": cards, "nccl": version, "built": built, "bf16_products": has_bf16_products()}


if __name__ == "__main__":
    print(json.dumps(describe_host(json.loads(sys.argv[1]) if len(sys.argv) > 1 else None)))
