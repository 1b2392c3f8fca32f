"""Limit the number and time of connections, and answer those that do not speak HTTP.

An open connection costs a descriptor and some memory even without a request, and aiohttp limits only the time of idle
ones. Here each connection has a state with a time limit. A watch ends those that are late.
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

_MOST = 2048  # connections, even with more descriptors
_FEWEST = 16
_RESERVED_DESCRIPTORS = 32  # for files that are opened while the server runs
_AT_ONCE = 16  # connections accepted in a turn of the loop; the limit applies to them three turns later
_BACKLOG = 1024  # connections that wait in the system until they are accepted
_HEAD_BYTES = 1 << 16  # of an incomplete head
_HEAD_SECONDS = 2.0  # after which that limit applies
_LAST_SECONDS = 2.0  # after the time limit, for an answer's own last line
_LINGERING_SECONDS = 10.0  # for reading on after a refused body, so that its client reads the refusal
_LINES = 10  # about refused connections, per second


class State(IntEnum):
    """The states of a connection. The lowest is closed first to make room for a new one."""

    IDLE = 0
    HEAD = 1  # a request has begun
    BODY = 2  # its head has been read, but not its body
    SENDING = 3  # its answer is complete, and perhaps not sent yet
    ANSWERING = 4


class Connection(web.RequestHandler):
    """A connection of aiohttp with a state and a time limit."""

    def __init__(self, among: Connections, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=4 * among.seconds,  # the watch ends it earlier
            lingering_time=min(_LINGERING_SECONDS, among.seconds),
            access_log=None,
            auto_decompress=False,
            read_bufsize=1 << 16,
        )
        self._among = among
        self._wire: asyncio.Transport | None = None  # aiohttp drops its reference at closing, before all bytes are sent
        self._head_bytes = 0
        self._is_last = False  # whether the connection ends after this request
        self.state, self.since = State.IDLE, self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add the connection to its set."""
        assert isinstance(transport, asyncio.Transport)
        self._wire = transport
        super().connection_made(transport)
        self._among.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove the connection from its set."""
        self._among.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a head."""
        if data:
            self.settle()
            if self.state is State.IDLE:
                self._enter(State.HEAD)
                self._head_bytes = 0
            self._head_bytes += len(data)
        super().data_received(data)

    @contextmanager
    def answering(self, request: web.Request) -> Iterator[None]:
        """Mark the connection as answering, until the answer is complete."""
        self._enter(State.ANSWERING)
        try:
            yield
        finally:
            self.state = State.SENDING
            self._is_last = not request.content.is_eof()  # aiohttp closes the connection

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Mark the connection as waiting for a body."""
        self.state = State.BODY
        try:
            yield
        finally:
            self.state = State.ANSWERING

    def settle(self) -> None:
        """Mark the connection as idle if its answer has been sent."""
        is_sent = self._wire is None or self._wire.get_write_buffer_size() == 0
        if self.state is State.SENDING and not self._is_last and is_sent:
            self._enter(State.IDLE)

    def give_up(self) -> None:
        """Close the connection at once, without sending what is buffered."""
        if self._wire is not None:
            self._wire.abort()

    def end_if_late(self, now: float, seconds: float) -> None:
        """Close the connection if its time is over. An incomplete head gets an answer."""
        assert self._wire is not None
        self.settle()
        is_head = self.state is State.HEAD
        if is_head and self._head_bytes > _HEAD_BYTES and now > self.since + _HEAD_SECONDS:
            self._refuse(431, f"a head has at most {_HEAD_BYTES:,} bytes")
        elif now > self.since + seconds + (_LAST_SECONDS if self.state > State.HEAD else 0):
            if is_head:
                self._refuse(408, f"no complete request arrived within {seconds:g} s")
            else:
                self._wire.abort()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Refuse invalid HTTP in one line. aiohttp's own answer has several, and prints a traceback."""
        self.state, self._is_last = State.SENDING, True
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        status = 431 if isinstance(exc, LineTooLong) else status
        line = "a line of the head is too long" if status == 431 else "not an HTTP request"
        self._among.log(f"{request.remote} has {status}: {ascii(' '.join(exc.message.split()))[:200]}")
        response = web.Response(body=_error(line), status=status, content_type="application/json")
        response.force_close()
        return response

    def _enter(self, state: State) -> None:
        self.state, self.since = state, self._loop.time()

    def _refuse(self, status: int, line: str) -> None:
        """Write an error answer and close. This bypasses aiohttp, which has no request yet."""
        assert self._wire is not None
        if self._wire.is_closing():  # the client does not read the refusal
            self._wire.abort()
            return
        peer, *_ = self._wire.get_extra_info("peername") or ("somebody",)
        self._among.log(f"{peer} has {status}: {line}")
        reason = "Request Timeout" if status == 408 else "Request Header Fields Too Large"
        body = _error(line)
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._wire.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self._wire.close()


class Connections:
    """The open connections of a server.

    ``seconds`` is the time limit of an idle connection, of a head, and from there of an answer.

    Raises:
        ConfigError: the process may open too few files.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._open: set[Connection] = set()
        self._logged = self._suppressed = 0  # lines in this second
        # Descriptors that are open now, and some for files, are not available for connections.
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MOST
        if limit != resource.RLIM_INFINITY:
            reserved = len(os.listdir("/dev/fd")) + _RESERVED_DESCRIPTORS + 4 * _AT_ONCE  # noqa: PTH208 - names alone
            if limit - reserved < _FEWEST:
                rule = f"allows too few open files for a server; set at least {reserved + _FEWEST}"
                raise ConfigError(f"ulimit -n={limit}: {rule}")
            self._most = min(_MOST, limit - reserved)

    async def listen(self, server: web.Server, host: str, port: int) -> asyncio.Server:
        """Accept connections for the handlers of ``server``. Raises OSError."""
        loop = asyncio.get_running_loop()
        accepting = await loop.create_server(lambda: Connection(self, server), host, port, backlog=_AT_ONCE)
        for listener in accepting.sockets:  # create_server uses its backlog for both limits
            with socket.fromfd(listener.fileno(), listener.family, listener.type) as duplicate:
                duplicate.listen(_BACKLOG)
        return accepting

    async def watch(self) -> None:
        """End late connections, forever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self.seconds / 4))
            self._logged = 0
            if self._suppressed:
                suppressed, self._suppressed = self._suppressed, 0
                self.log(f"and {suppressed} more")
            now = loop.time()
            for connection in list(self._open):
                connection.end_if_late(now, self.seconds)

    def add(self, new: Connection) -> None:
        """Add a connection. If there is no room, close the least active one, which may be the new one."""
        if len(self._open) >= self._most:
            for connection in self._open:
                connection.settle()
            least = min(self._open, key=lambda connection: (connection.state, connection.since))
            if least.state is State.ANSWERING:
                new.give_up()
                return
            self._open.discard(least)
            least.give_up()
            self.log(f"more than {self._most} connections: the idlest are closed")
        self._open.add(new)

    def remove(self, old: Connection) -> None:
        """Remove a connection."""
        self._open.discard(old)

    def close(self) -> None:
        """Close all connections without a complete request."""
        for connection in list(self._open):
            connection.settle()
            if connection.state <= State.BODY:
                connection.give_up()

    def log(self, line: str) -> None:
        """Print a line on standard error. Of many in a second only some are printed, then the number of others."""
        self._logged += 1
        if self._logged <= _LINES:
            say(line)
        else:
            self._suppressed += 1


def connection_of(request: web.Request) -> Connection:
    """Return the connection of a request."""
    connection = request.protocol
    assert isinstance(connection, Connection)
    return connection


def _error(line: str) -> bytes:
    return json.dumps({"error": line}).encode() + b"\n"
