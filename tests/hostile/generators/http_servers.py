"""A web server that fails in every way a real one does, at a given rate, and reproducibly; or lies (lies.py).

    with FaultyServer(folder, share=0.2, seed=1) as url:
        ...                                    # url + "/train-00000.tar" is folder / "train-00000.tar"

It answers GET and HEAD with ranges. A folder inside ``folder`` is a bucket of path-style S3 as well: with
``AWS_ENDPOINT_URL`` set to ``url``, ``s3://bucket/key`` is ``folder / "bucket" / "key"``.
"""

import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from longstride.data_pipelines.stores import transport

FAULTS = ("drop", "cut", "stall", "error", "short")  # before the answer; in mid-body; no more bytes; 5xx; too few bytes
_PIECE_BYTES = 2**16
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class Request:
    """A request and its answer."""

    method: str
    name: str  # path within the folder
    query: str
    authorization: str | None
    offset: int  # of the first byte asked for
    fault: str | None
    sent: int = 0  # bytes of the body
    headers: Mapping[str, str] = field(default_factory=dict)  # by names in small letters


class FaultyServer:
    """Serves ``folder`` on a free port of this machine while its context is open.

    ``share`` of the requests get a fault, drawn from ``faults`` by (seed, name, how often the name was asked for): what
    a file's requests meet does not depend on the order in which several clients come. ``corrupt`` names files of which
    a byte is flipped, ``statuses`` gives names an answer of their own. ``pause_seconds`` lie between pieces of 64 KiB.
    ``lie`` answers every request for a file that there is, unless it returns False.
    """

    def __init__(
        self,
        folder: Path,
        share: float = 0.0,
        seed: int = 0,
        *,
        faults: Collection[str] = FAULTS,
        stall_seconds: float = 5.0,
        pause_seconds: float = 0.0,
        corrupt: Collection[str] = (),
        statuses: Mapping[str, int] | None = None,
        lie: "Callable[[Exchange], object] | None" = None,
    ) -> None:
        self.folder, self.share, self.seed = Path(folder), share, seed
        self.faults, self.stall_seconds, self.pause_seconds = tuple(faults), stall_seconds, pause_seconds
        self.corrupt, self.statuses = corrupt, statuses or {}
        self.lie = lie
        self.requests: list[Request] = []
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.ended = threading.Event()

    def __enter__(self) -> str:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.faulty = self
        # What stands unsent counts as sent; else the system lets it grow to megabytes a connection.
        self._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.end_connections()
        self._server.server_close()
        self._thread.join()

    @property
    def sent(self) -> int:
        """Bytes of all bodies so far."""
        return sum(request.sent for request in self.requests)

    def of(self, name: str) -> list[Request]:
        """Return the requests for one file."""
        return [request for request in self.requests if request.name == name]

    def begin(self, request: Request) -> random.Random:
        """Count a request and draw its fault."""
        with self._lock:
            self._asked[request.name] += 1
            generator = random.Random(f"{self.seed}/{request.name}/{self._asked[request.name]}")
            if generator.random() < self.share:
                request.fault = generator.choice(self.faults)
            self.requests.append(request)
        return generator


@dataclass
class Exchange:
    """A request and the way to answer it, byte by byte."""

    request: Request
    content: bytes  # of the file
    number: int  # of the requests for this file, from 1
    connection: socket.socket
    ended: threading.Event  # of the server

    def send(self, *pieces: bytes) -> None:
        """Raises OSError where the client has gone."""
        for piece in pieces:
            self.connection.sendall(piece)
            self.request.sent += len(piece)

    def forever(self, *pieces: bytes, seconds: float = 0.0) -> None:
        """Sends the pieces again and again, so many seconds apart, until the client or the server ends."""
        while not self.ended.wait(seconds):
            self.send(*pieces)

    def wait(self) -> None:
        """Wait until the client has closed the connection or the server ends."""
        self.connection.settimeout(0.1)
        while not self.ended.is_set():
            with suppress(TimeoutError):
                if not self.connection.recv(2**16):
                    return


class _Server(ThreadingHTTPServer):
    request_queue_size = 64
    faulty: FaultyServer

    def __init__(self, *arguments) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request, client_address) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        for connection in list(self._connections):
            with suppress(OSError):  # the client has gone
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address) -> None:
        """Ignore errors: clients of these tests disconnect within a body."""


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that answers with a content, and prints nothing."""

    def answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        faulty = self.server.faulty
        parts = urlsplit(self.path)
        name = unquote(parts.path).strip("/")
        interval = _RANGE.fullmatch(self.headers.get("Range", ""))
        start = int(interval[1]) if interval else 0
        headers = {key.lower(): value for key, value in self.headers.items()}
        request = Request(self.command, name, parts.query, headers.get("authorization"), start, None, headers=headers)
        generator = faulty.begin(request)
        if request.fault == "drop":
            self.close_connection = True
            return
        if request.fault == "error":
            self._refuse(generator.choice((500, 503)))
            return
        path = faulty.folder / name
        if name in faulty.statuses or not path.is_file():
            self._refuse(faulty.statuses.get(name, 404))
            return
        if faulty.lie is not None:
            exchange = Exchange(request, path.read_bytes(), len(faulty.of(name)), self.connection, faulty.ended)
            with suppress(OSError):  # the client has gone
                if faulty.lie(exchange) is not False:
                    self.close_connection = True
                    return
        content = bytearray(path.read_bytes())
        if name in faulty.corrupt:
            content[len(content) // 2] ^= 1
        if interval and start >= len(content):
            self._refuse(416)
            return
        stop = min(int(interval[2]) + 1, len(content)) if interval and interval[2] else len(content)
        is_complete = request.fault is None
        if request.fault == "short" and interval:  # as a server may: fewer bytes than the range has, and says so
            is_complete = True
            stop = start + max(1, (stop - start) // 2)
        self._head(path, bool(interval), start, stop, len(content))
        if with_body:
            end = stop if is_complete else start + generator.randrange(stop - start + 1) * 9 // 10
            self._body(request, content[start:end])
            self.close_connection |= not is_complete

    def _head(self, path: Path, part: bool, start: int, stop: int, total: int) -> None:
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(stop - start))
        if part:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{total}")
        self.send_header("ETag", f'"{total}"')
        self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        self.end_headers()

    def _body(self, request: Request, content: bytes) -> None:
        faulty = self.server.faulty
        while request.sent < len(content) and not faulty.ended.is_set():
            piece = content[request.sent : request.sent + _PIECE_BYTES]
            self.wfile.write(piece)
            request.sent += len(piece)
            if faulty.pause_seconds:
                faulty.ended.wait(faulty.pause_seconds)
        if request.fault == "stall":
            faulty.ended.wait(faulty.stall_seconds)

    def _refuse(self, status: int) -> None:
        code = {404: "NoSuchKey", 403: "AccessDenied", 416: "InvalidRange", 503: "SlowDown"}.get(
            status, "InternalError"
        )
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as told</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def quick_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set short waits between attempts, and no proxy."""
    monkeypatch.setattr(transport, "FIRST_WAIT_SECONDS", 0.005)
    monkeypatch.setattr(transport, "LONGEST_WAIT_SECONDS", 0.02)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@contextmanager
def serving_folder(folder: Path) -> Iterator[str]:
    """Serve a folder with pages that list it."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    with serving(partial(Handler, directory=str(folder))) as url:
        yield url


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a server on this machine with any handler of the standard library, and yield its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
