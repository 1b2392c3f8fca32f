"""A server from its socket to its last request: signals, addresses, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from longstride.kernels import ConfigError
from longstride.launcher.output import say
from longstride.launcher.serving.application import Service
from longstride.launcher.serving.guards import is_loopback
from longstride.launcher.serving.sampler import Sampler

_SHUTDOWN_SECONDS = 5.0  # for answers under way to end
_LAST_STEP_SECONDS = 30.0  # for the byte, or the prompt, that is being computed


def serve(service: Service, sampler: Sampler, host: str, port: int, what: str) -> None:
    """Serves until SIGTERM, which ends it in order, or SIGINT, which also raises KeyboardInterrupt.

    Raises:
        ConfigError: the address cannot be had.
    """
    number = asyncio.run(_serve(service, sampler, host, port, what))
    if number == signal.SIGINT:
        raise KeyboardInterrupt


async def _serve(service: Service, sampler: Sampler, host: str, port: int, what: str) -> signal.Signals:
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, loop, stop, number)
    async with listening(service, sampler, host, port) as url:
        if not is_loopback(host):
            warning = f"--host={host}: whoever reaches this machine can sample; there is no login and no encryption"
            say(f"warning: {warning}")
        print(f"{url} serves {what}; Ctrl-C ends it", file=sys.stderr, flush=True)
        return await stop


@asynccontextmanager
async def listening(service: Service, sampler: Sampler, host: str, port: int) -> AsyncIterator[str]:
    """A server that answers, as its URL; at the end, what is under way is told so and ended.

    Raises:
        ConfigError: the address cannot be had.
    """
    loop = asyncio.get_running_loop()
    # A client that leaves cancels its handler, which ends its sampling.
    runner = web.AppRunner(
        service.application(is_loopback(host)),
        handle_signals=False,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )

    async def close(_: web.Application) -> None:
        await loop.run_in_executor(None, sampler.close, _LAST_STEP_SECONDS)

    runner.app.on_shutdown.append(close)
    await runner.setup()
    sampler.start()
    try:
        await _bind(runner, host, port)
        name, bound = runner.addresses[0][:2]
        yield f"http://[{name}]:{bound}/" if ":" in name else f"http://{name}:{bound}/"
    finally:
        await runner.cleanup()


def _stop(loop: asyncio.AbstractEventLoop, stop: asyncio.Future[signal.Signals], number: signal.Signals) -> None:
    """The first signal ends the server; a second one does what it does to any program."""
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(each)
    if not stop.done():
        stop.set_result(number)


async def _bind(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except socket.gaierror:
        raise ConfigError(f"--host={host}: is no address of this machine; take 127.0.0.1") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--port={port}: is in use; take another, or 0 for any that is free") from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"--port={port}: is for root alone; take one from 1024 on") from None
        raise ConfigError(f"--host={host}: is no address of this machine; take 127.0.0.1") from None
