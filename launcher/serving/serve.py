"""`longstride serve DIR`: an exported model behind HTTP, with a page to try it. Needs aiohttp, and no deepspeed."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from typing import Any

import torch

from longstride.kernels import ConfigError, Problem
from longstride.launcher.models import Exported, load_model, usable_device
from longstride.sparse_model import SparseTransformer

_BYTE_VALUES = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("model", type=Path, metavar="DIR", help="folder written by `longstride export`")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, loopback)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any that is free (default: 8000)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--max-bytes", type=int, default=None, metavar="N", help="that one request may sample (default: the context)"
    )
    parser.add_argument(
        "--queue", type=int, default=8, metavar="N", help="requests that may wait while one is sampled (default: 8)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds from a request to its last byte (default: 300)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb until a signal ends it; returns its exit code."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError('serve: needs aiohttp; pip install "longstride[serve]"')
    from longstride.launcher.serving.application import Limits, Service
    from longstride.launcher.serving.running import serve
    from longstride.launcher.serving.sampler import Sampler

    _check(arguments)
    usable_device(arguments.device)
    exported = Exported(arguments.model)
    config = exported.config
    if config.vocabulary > _BYTE_VALUES:
        rule = f"has a vocabulary of {config.vocabulary}; serve is for models of bytes, at most {_BYTE_VALUES}"
        raise ConfigError(f"{arguments.model}: {rule}")
    limits = Limits(min(arguments.max_bytes or config.context, config.context), arguments.queue, arguments.timeout)
    model = load_model(arguments.model, arguments.device)
    about = _about(exported, model, arguments.device)
    about["limits"] = {"bytes": limits.max_bytes, "waiting": limits.waiting, "seconds": limits.seconds}
    sampler = Sampler(model, arguments.device, limits.waiting)
    serve(Service(config, about, sampler, limits), sampler, arguments.host, arguments.port, str(arguments.model))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for numbers that are out of range."""
    problems = []
    if not 0 <= arguments.port < 2**16:
        problems.append(Problem("--port", "must be from 0, any that is free, to 65535", arguments.port))
    if arguments.max_bytes is not None and arguments.max_bytes < 1:
        problems.append(Problem("--max-bytes", "must be at least 1", arguments.max_bytes))
    if arguments.queue < 0:
        problems.append(Problem("--queue", "must be 0, nobody waits, or more", arguments.queue))
    if not 0 < arguments.timeout < math.inf:
        problems.append(Problem("--timeout", "must be above 0 and finite", arguments.timeout))
    if problems:
        raise ConfigError(*problems)


def _about(exported: Exported, model: SparseTransformer, device: str) -> dict[str, Any]:
    """What `GET /model` tells: nothing of the machine but the device."""
    origin = exported.content.get("origin")
    return {
        "name": exported.folder.resolve().name,
        "context": exported.config.context,
        "vocabulary": exported.config.vocabulary,
        "embedding": exported.config.embedding.model_dump(mode="json"),
        "data": exported.content.get("data"),  # modality, and a sound's rate; exports of older versions have none
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(exported.dtype).removeprefix("torch."),
        "device": device,
        "fingerprint": exported.content.get("fingerprint"),
        "step": origin.get("step") if isinstance(origin, dict) else None,
    }
