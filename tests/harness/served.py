"""A server in a thread of this process, for blocking clients."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from longstride.launcher.models import Exported, load_model
from longstride.launcher.serving.application import Limits, Service
from longstride.launcher.serving.sampler import Sampler
from longstride.launcher.serving.serve import describe, listening
from longstride.sparse_model import SparseTransformer, generate


@contextmanager
def served(folder: Path, shared: bool = False, **changes: Any) -> Iterator[str]:
    """Serve an export and yield its URL; ``changes`` are to its limits, ``shared`` is ``--shared``."""
    exported, model = Exported(folder), load_model(folder)
    limits = Limits(**{"max_bytes": exported.config.context, "waiting": 8, "seconds": 60.0, "contexts": 8} | changes)
    sampler = Sampler(model, "cpu", limits.waiting, limits.contexts, shared)
    service = Service(exported.config, describe(exported, model, "cpu"), sampler, limits)
    loop, server = asyncio.new_event_loop(), listening(service, sampler, "127.0.0.1", 0)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def post_json(url: str, content: dict[str, Any]) -> tuple[int, str]:
    """Return the status and the text of what a server answers to JSON."""
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def alone(model: SparseTransformer, prompt: bytes, count: int, seed: int, **options: Any) -> bytes:
    """Return the bytes of `longstride sample --seed`."""
    tokens = torch.tensor([list(prompt)], dtype=torch.int64)
    return bytes(map(int, generate(model, tokens, count, generator=torch.Generator().manual_seed(seed), **options)))
