"""Connections: how many are open at once, until when, and what is said to those that speak no HTTP.

A connection that stands costs a descriptor and some memory, whether or not a request comes. aiohttp bounds the time of
an idle one alone. Here each of them has a state and a time by which it is left, and one watch ends those that are late.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from longstride.kernels import ConfigError
from longstride.launcher.output import say

_MOST = 2048  # connections, however many descriptors there are
_FEWEST = 16
_OWN_DESCRIPTORS = 32  # for files that are opened while the server runs
_AT_ONCE = 16  # connections accepted in a turn of the loop, three turns before the bound is applied to them
_WAITING = 1024  # connections that the system keeps until they are accepted
_HEAD_BYTES = 1 << 16  # that a head may have which is not whole
_HEAD_SECONDS = 2.0  # after that time
_LAST_SECONDS = 2.0  # after the time-out, for an answer's own last line
_LINGERING_SECONDS = 10.0  # that the rest of a refused body is taken, so that its client reads the refusal
_LINES = 10  # of those that are refused, told in a second


class State(IntEnum):
    """What a connection does, in the order in which they are given up for a new one."""

    IDLE = 0
    HEAD = 1  # a request has begun
    BODY = 2  # its head is read, its body is not
    SENDING = 3  # its answer is made, and perhaps not gone yet
    ANSWERING = 4


class Connection(web.RequestHandler):
    """One connection: aiohttp's, watched."""

    def __init__(self, among: Connections, server: web.Server, lingering: float) -> None:
        """Not yet connected; ``lingering`` in seconds."""
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=4 * among.seconds,  # ours comes before
            lingering_time=lingering,
            access_log=None,
            auto_decompress=False,
            read_bufsize=1 << 16,
        )
        self._among = among
        self._wire: asyncio.Transport | None = None  # aiohttp forgets its own at closing, though bytes may wait in it
        self._head_bytes = 0
        self._is_last = False  # no request comes after this one
        self.state, self.since = State.IDLE, self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """One more."""
        assert isinstance(transport, asyncio.Transport)
        self._wire = transport
        super().connection_made(transport)
        self._among.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """One less."""
        self._among.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """More of a head or of a body."""
        if data:
            self.settle()
            if self.state is State.IDLE:
                self._enter(State.HEAD)
                self._head_bytes = 0
            self._head_bytes += len(data)
        super().data_received(data)

    @contextmanager
    def answering(self, request: web.Request) -> Iterator[None]:
        """While a request is answered, until its answer is made."""
        self._enter(State.ANSWERING)
        try:
            yield
        finally:
            self.state = State.SENDING
            self._is_last = not request.content.is_eof()  # aiohttp closes the connection

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While the body of the request that is answered is awaited."""
        self.state = State.BODY
        try:
            yield
        finally:
            self.state = State.ANSWERING

    def settle(self) -> None:
        """An answer that is gone leaves the connection idle."""
        is_sent = self._wire is None or self._wire.get_write_buffer_size() == 0
        if self.state is State.SENDING and not self._is_last and is_sent:
            self._enter(State.IDLE)

    def give_up(self) -> None:
        """Closes it at once, whatever is on its way."""
        if self._wire is not None:
            self._wire.abort()

    def end_if_late(self, now: float, seconds: float) -> None:
        """Closes it where its time is over; a head that is not whole has an answer."""
        assert self._wire is not None
        self.settle()
        is_head = self.state is State.HEAD
        if is_head and self._head_bytes > _HEAD_BYTES and now > self.since + _HEAD_SECONDS:
            self._refuse(431, f"a head has at most {_HEAD_BYTES:,} bytes")
        elif now > self.since + seconds + (_LAST_SECONDS if self.state > State.HEAD else 0):
            if is_head:
                self._refuse(408, f"no whole request came within {seconds:g} s")
            else:
                self._wire.abort()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what is no HTTP, as one line; aiohttp's own has several, and a traceback on standard error."""
        self.state, self._is_last = State.SENDING, True
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        status = 431 if isinstance(exc, LineTooLong) else status
        line = "a line of the head is too long" if status == 431 else "that is no HTTP request"
        self._among.tell(f"{request.remote} has {status}: {ascii(' '.join(exc.message.split()))[:200]}")
        response = web.Response(body=_error(line), status=status, content_type="application/json")
        response.force_close()
        return response

    def _enter(self, state: State) -> None:
        self.state, self.since = state, self._loop.time()

    def _refuse(self, status: int, line: str) -> None:
        """Says so, past aiohttp, which has no request yet, and closes."""
        assert self._wire is not None
        if self._wire.is_closing():  # the refusal itself is not read
            self._wire.abort()
            return
        peer, *_ = self._wire.get_extra_info("peername") or ("somebody",)
        self._among.tell(f"{peer} has {status}: {line}")
        reason = "Request Timeout" if status == 408 else "Request Header Fields Too Large"
        body = _error(line)
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._wire.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self._wire.close()


class Connections:
    """All of a server."""

    def __init__(self, seconds: float) -> None:
        """None yet. ``seconds``: that an idle one, a head, and from there an answer may take.

        Raises:
            ConfigError: the process may open too few files.
        """
        self.seconds = seconds
        self._open: set[Connection] = set()
        self._most = _most_connections()
        self._told = self._untold = 0

    async def listen(self, server: web.Server, host: str, port: int) -> asyncio.Server:
        """Accepts connections, for the handlers of ``server``. Raises OSError."""
        lingering = min(_LINGERING_SECONDS, self.seconds)
        loop = asyncio.get_running_loop()
        accepting = await loop.create_server(lambda: Connection(self, server, lingering), host, port, backlog=_AT_ONCE)
        for each in accepting.sockets:  # create_server takes one number for both
            with socket.fromfd(each.fileno(), each.family, each.type) as same:
                same.listen(_WAITING)
        return accepting

    async def watch(self) -> None:
        """Ends whatever is late; for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self.seconds / 4))
            self._told = 0
            if self._untold:
                untold, self._untold = self._untold, 0
                self.tell(f"and {untold} more")
            now = loop.time()
            for each in list(self._open):
                each.end_if_late(now, self.seconds)

    def add(self, new: Connection) -> None:
        """One more; where there is no room, the one that does least is given up, which may be itself."""
        if len(self._open) >= self._most:
            for each in self._open:
                each.settle()
            least = min(self._open, key=lambda each: (each.state, each.since))
            if least.state is State.ANSWERING:
                new.give_up()
                return
            self._open.discard(least)
            least.give_up()
            self.tell(f"more than {self._most} connections: the idlest are closed")
        self._open.add(new)

    def remove(self, old: Connection) -> None:
        """One less."""
        self._open.discard(old)

    def close(self) -> None:
        """Gives up all from which no whole request came."""
        for each in list(self._open):
            each.settle()
            if each.state <= State.BODY:
                each.give_up()

    def tell(self, line: str) -> None:
        """A line on standard error; of many in a second, some, and how many more."""
        self._told += 1
        if self._told <= _LINES:
            say(line)
        else:
            self._untold += 1


def connection_of(request: web.Request) -> Connection:
    """By which a request came."""
    connection = request.protocol
    assert isinstance(connection, Connection)
    return connection


def _most_connections() -> int:
    """As descriptors allow: those that are open, and some for files, are not for connections."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST
    others = len(os.listdir("/dev/fd")) + _OWN_DESCRIPTORS + 4 * _AT_ONCE  # noqa: PTH208 - names alone
    if limit - others < _FEWEST:
        raise ConfigError(f"ulimit -n={limit}: is too few open files for a server; give at least {others + _FEWEST}")
    return min(_MOST, limit - others)


def _error(line: str) -> bytes:
    return json.dumps({"error": line}).encode() + b"\n"
