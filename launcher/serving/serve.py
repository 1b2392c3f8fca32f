"""`longstride serve DIR`: serve an exported model over HTTP, with a page to try it. Needs aiohttp, but not deepspeed.

This module has the server's socket, signals and orderly end. It imports aiohttp only after checking that it is
installed.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import importlib.util
import math
import re
import signal
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from longstride.kernels import ConfigError, Problem
from longstride.launcher.models import Exported, load_model, usable_device
from longstride.launcher.output import file_names
from longstride.launcher.ranks import is_loopback
from longstride.launcher.serving.sampler import Sampler
from longstride.sparse_model import SparseTransformer

if TYPE_CHECKING:
    from aiohttp import web

    from longstride.launcher.serving.application import Service

_SHUTDOWN_SECONDS = 5.0  # for running answers to end
_LAST_STEP_SECONDS = 30.0  # for the computation of a byte or prompt to end
_HOST_NAME = re.compile(r"[\w.-]+|[\da-fA-F:.]+:[\da-fA-F:.]*")  # or an address


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Returns 0 at SIGTERM and raises KeyboardInterrupt at SIGINT, after an orderly end."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError('serve: needs aiohttp; pip install "longstride[serve]"')
    from longstride.launcher.serving.application import Limits, Service
    from longstride.launcher.serving.request import most_bytes

    port, most, queue, timeout = arguments.port, arguments.max_bytes, arguments.queue, arguments.timeout
    contexts, name = arguments.contexts, arguments.name
    ranges = (
        ("--host", arguments.host, arguments.host.strip(), "must be an address of this machine; such as 127.0.0.1"),
        ("--port", port, 0 <= port < 2**16, "must be from 0, any that is free, to 65535"),
        ("--max-bytes", most, most is None or most >= 1, "must be at least 1"),
        ("--contexts", contexts, 1 <= contexts <= 1024, "must be from 1 to 1,024"),
        ("--name", name, name is None or (name.isprintable() and name.strip()), "must be a name, in characters"),
        ("--queue", queue, queue >= 0, "must be 0, nobody waits, or more"),
        ("--timeout", timeout, 0 < timeout < math.inf, "must be above 0 and finite"),
    )
    problems = [Problem(option, rule, value) for option, value, is_within, rule in ranges if not is_within]
    rule = "must be a name or an address alone, such as gpu7.example, without http:// and port"
    problems += [Problem("--allow-host", rule, host) for host in arguments.allow_host if not _HOST_NAME.fullmatch(host)]
    if problems:
        raise ConfigError(*problems)
    device = str(usable_device(arguments.device))
    exported = Exported(arguments.model, trust_code=arguments.trust_code)
    config = exported.config
    if config.vocabulary > 256:
        rule = f"has a vocabulary of {config.vocabulary}; serve is for models of bytes, at most 256"
        raise ConfigError(f"{arguments.model}: {rule}")
    if exported.has_palette:
        rule = "writes pixels of a palette, and serve is for models of bytes; `longstride sample` draws them"
        raise ConfigError(f"{arguments.model}: {rule}")
    room = most_bytes(config)
    limits = Limits(min(most or room, room), queue, timeout, contexts)
    model = load_model(arguments.model, device, trust_code=arguments.trust_code)
    model.config.require_next_token()
    about = describe(exported, model, device)
    about["name"] = name or about["name"]
    about["limits"] = {"bytes": limits.max_bytes, "waiting": queue, "seconds": timeout, "contexts": contexts}
    sampler = Sampler(model, device, limits.waiting, limits.contexts, arguments.shared)
    service = Service(config, about, sampler, limits)
    names = [arguments.host, *arguments.allow_host]
    if asyncio.run(_serve(service, sampler, arguments.host, port, names, str(arguments.model))) == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


def describe(exported: Exported, model: SparseTransformer, device: str) -> dict[str, Any]:
    """Return the answer to `GET /model`. Its only information about the machine is the device."""
    origin, data = exported.content.get("origin"), exported.content.get("data")
    modality = data.get("modality") if isinstance(data, dict) else None  # older exports lack the data
    return {
        "name": exported.folder.resolve().name,
        "context": exported.config.context,
        "vocabulary": exported.config.vocabulary,
        "embedding": exported.config.embedding.model_dump(mode="json"),
        "data": data,  # for example the rate of sounds
        "modality": modality or exported.config.embedding.modality,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(exported.dtype).removeprefix("torch."),
        "device": device,
        "fingerprint": exported.content.get("fingerprint"),
        "created": int((exported.folder / file_names.CONFIG).stat().st_mtime),
        "step": origin.get("step") if isinstance(origin, dict) else None,
    }


async def _serve(
    service: Service, sampler: Sampler, host: str, port: int, names: Collection[str], what: str
) -> signal.Signals:
    """Serve until the first signal and return it. A second signal has its default effect."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()

    def end(number: signal.Signals) -> None:
        for handled in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(handled)
        if not stop.done():
            stop.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    async with listening(service, sampler, host, port, names) as url:
        if not is_loopback(host):
            warning = f"--host={host}: whoever reaches this machine can sample; there is no login and no encryption"
            print(f"longstride: warning: {warning}", file=sys.stderr)
        print(f"{url} serves {what}; Ctrl-C ends it", file=sys.stderr, flush=True)
        return await stop


@asynccontextmanager
async def listening(
    service: Service, sampler: Sampler, host: str, port: int, names: Collection[str] = ()
) -> AsyncIterator[str]:
    """Run a server and yield its URL. On exit, running requests are answered with an error.

    ``names`` are the host names that requests may have, in addition to IP addresses.

    Raises:
        ConfigError: the address is not available, or the process may open too few files.
    """
    from aiohttp import web

    from longstride.launcher.serving.connections import Connections

    loop = asyncio.get_running_loop()
    connections = Connections(service.limits.seconds)
    # If a client leaves, its handler is cancelled, which ends its sampling.
    application = service.application({name.lower() for name in names})
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS)

    async def close(_: web.Application) -> None:
        await loop.run_in_executor(None, sampler.close, _LAST_STEP_SECONDS)

    runner.app.on_shutdown.append(close)
    await runner.setup()
    assert runner.server is not None
    sampler.start()
    try:
        try:
            accepting = await connections.listen(runner.server, host, port)
        except OSError as error:
            problems = {
                errno.EADDRINUSE: f"--port={port}: is in use; take another, or 0 for any that is free",
                errno.EACCES: f"--port={port}: needs root; use a port of at least 1024",
            }
            otherwise = f"--host={host}: is not an address of this machine; use 127.0.0.1"
            raise ConfigError(problems.get(error.errno or 0, otherwise)) from None
        watch = loop.create_task(connections.watch())
        try:
            name, bound = accepting.sockets[0].getsockname()[:2]
            yield f"http://[{name}]:{bound}/" if ":" in name else f"http://{name}:{bound}/"
        finally:
            accepting.close()
            watch.cancel()
            connections.close()
    finally:
        await runner.cleanup()
