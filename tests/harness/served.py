"""A server in a thread of this process, for blocking clients."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longstride.launcher.models import Exported, load_model
from longstride.launcher.serving.application import Limits, Service
from longstride.launcher.serving.sampler import Sampler
from longstride.launcher.serving.serve import describe, listening


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
