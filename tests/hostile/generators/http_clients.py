"""Clients that a server must outlive: idle, half-sent, malformed, or that never read what they asked for."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable

JSON = "Content-Type: application/json"


def request(body: bytes = b"", *, path: str = "/sample", method: str = "POST", host: str = "localhost") -> bytes:
    """Build a complete and valid request."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n"
    head += f"{JSON}\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
    return head.encode() + b"\r\n" + body


WHOLE = request(json.dumps({"prompt": "a", "bytes": 4, "seed": 1}).encode())
HEAD_END = WHOLE.index(b"\r\n\r\n") + 4
# What is sent of a request before the client falls silent. "idle": nothing.
HALVES = {
    "idle": b"",
    "a letter": WHOLE[:1],
    "half a line": WHOLE[:10],
    "half a head": WHOLE[: HEAD_END - 10],
    "a head but its last byte": WHOLE[: HEAD_END - 1],
    "no body": WHOLE[:HEAD_END],
    "half a body": WHOLE[: HEAD_END + 5],
    "a body but its last byte": WHOLE[:-1],
    "half a chunk": WHOLE[: WHOLE.index(b"Content-Length")] + b"Transfer-Encoding: chunked\r\n\r\n1000\r\nabc",
}


def _headed(*lines: str, body: bytes = b"") -> bytes:
    """Build a request for a sample with these lines in its head."""
    return "\r\n".join(("POST /sample HTTP/1.1", "Host: localhost", JSON, *lines, "", "")).encode() + body


# Requests that are wrong, each with the statuses that may answer it.
MALFORMED: dict[str, tuple[bytes, set[int]]] = {
    "no method": (b" / HTTP/1.1\r\nHost: localhost\r\n\r\n", {400}),
    "a method nobody knows": (b"BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 405}),
    "no version": (b"GET /health\r\n\r\n", {400, 403}),
    "a greeting of TLS": (b"\x16\x03\x01\x00\xff\r\n\r\n", {400}),
    "words": (b"hello\r\nhow are you\r\n\r\n", {400}),
    "a path with a zero byte": (b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404}),
    "a path of no UTF-8": (b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404}),
    "a path above all": (b"GET /../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404}),
    "a field with a zero byte": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: \0\r\n\r\n", {400}),
    "a long line": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 431}),
    "a long field": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 9000 + b"\r\n\r\n", {400, 431}),
    "a length below 0": (_headed("Content-Length: -1"), {400}),
    "a length of 5,000 digits": (_headed("Content-Length: " + "9" * 5000), {400, 413}),
    "an exabyte announced": (_headed("Content-Length: " + str(10**18), body=b"{}"), {413}),
    "a length and chunks": (_headed("Content-Length: 2", "Transfer-Encoding: chunked", body=b"{}"), {400}),
    "a chunk that is longer": (_headed("Transfer-Encoding: chunked", body=b"1\r\n{}}}}}\r\n0\r\n\r\n"), {400}),
    "a size of 100 digits": (_headed("Transfer-Encoding: chunked", body=b"f" * 100 + b"\r\n{}\r\n"), {400, 413}),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", {400, 403}),
    "a foreign host": (request(method="GET", path="/health", host="evil.example"), {403}),
    "a body too large": (_headed("Content-Length: 2000000"), {413}),
    "a body that is no text": (request(b"\xff\xfe{}"), {400}),
    "an integer of 39 digits": (request(b'{"seed": ' + b"9" * 39 + b"}"), {422}),
    "a surrogate": (request(b'{"prompt": "\\ud800"}'), {422}),
    "3,000 biases": (
        request(
            json.dumps({"model": "model", "logit_bias": {f"{n:05d}": 1 for n in range(3000)}}).encode(),
            path="/v1/completions",
        ),
        {400},
    ),
}


class Client:
    """A connection that sends bytes as they are; closed at the end of a ``with``."""

    def __init__(self, address: tuple[str, int], content: bytes = b"", *, receive_buffer: int | None = None) -> None:
        """Connect, and send ``content``. ``receive_buffer``: bytes that the system accepts before they are read."""
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(30)
        try:
            self.socket.connect(address)
            self.socket.sendall(content)
        except OSError:
            self.socket.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def rest(self) -> bytes:
        """Read until the server closes or resets the connection."""
        answer = b""
        try:
            while piece := self.socket.recv(1 << 16):
                answer += piece
        except ConnectionError:
            pass
        return answer


def status(answer: bytes) -> int | None:
    """Return the status of an answer; None if there is no answer."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else None


def ask(address: tuple[str, int], content: bytes = WHOLE) -> bytes:
    """Send one complete request and return the answer."""
    with Client(address, content.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)) as client:
        return client.rest()


def close_all(clients: Iterable[Client]) -> None:
    """Close all clients at once."""
    for client in clients:
        client.socket.close()
