"""What a web server may answer that lies: each kind is a function of one exchange, which it ends.

    with FaultyServer(folder, lie=LIES["endless body"]) as url: ...

Answers honour ranges unless their kind says otherwise.
"""

import dataclasses
import gzip
import socket
import struct
from collections.abc import Callable

from tests.hostile.generators.http_servers import Exchange

CUT_BYTES = 20_000
SECRET = "hunter2"  # a user's, which a server repeats
_ZEROS = gzip.compress(bytes(2**24))


def _head(status: str, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode("latin-1")


def answer(
    exchange: Exchange,
    *headers: str,
    body: bytes | None = None,
    length: object = None,
    version: str = '"1"',
    part: bool | None = None,
) -> None:
    """Send an honest answer with other values: a body, a length (none if empty), a version, or a range."""
    versions = {version, *(line.partition(": ")[2] for line in headers if line.startswith("Last-Modified"))}
    start = exchange.request.offset if exchange.request.headers.get("if-range", version) in versions else 0
    part = start > 0 if part is None else part
    tail = exchange.content[start:]
    if part and not tail:
        exchange.send(b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n\r\n")
        return
    lines = [f"ETag: {version}", *headers]
    if length != "":
        lines.append(f"Content-Length: {len(tail) if length is None else length}")
    if part and not any(line.startswith("Content-Range") for line in headers):
        lines.append(f"Content-Range: bytes {start}-{len(exchange.content) - 1}/{len(exchange.content)}")
    exchange.send(_head("206 Partial Content" if part else "200 OK", *lines), tail if body is None else body)


def status(line: str, *headers: str, body: bytes = b"") -> Callable[[Exchange], None]:
    """Send the same answer to every request."""
    return lambda exchange: exchange.send(_head(line, *headers, f"Content-Length: {len(body)}"), body)


def cut(size: int, **changes: object) -> Callable[[Exchange], None]:
    """End the connection after so many bytes of each answer."""
    return lambda exchange: answer(exchange, body=_tail(exchange)[:size], **changes)  # type: ignore[arg-type]


def _tail(exchange: Exchange) -> bytes:
    return exchange.content[exchange.request.offset :]


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def _chunked(exchange: Exchange, *pieces: bytes) -> None:
    answer(exchange, "Transfer-Encoding: chunked", length="", body=b"")
    exchange.send(*pieces)


def _reset(exchange: Exchange) -> None:
    answer(exchange, body=_tail(exchange)[:CUT_BYTES])
    exchange.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    exchange.connection.close()


def _two_in_one(exchange: Exchange) -> None:
    """Serve requests for a part from another file."""
    flipped = bytes(byte ^ 1 for byte in exchange.content)
    content = flipped if exchange.request.offset else exchange.content
    cut(CUT_BYTES, version=f'"{exchange.number}"')(dataclasses.replace(exchange, content=content))


def _part_of_another_version(exchange: Exchange) -> None:
    """Ignore If-Range."""
    start, total = exchange.request.offset, len(exchange.content)
    lines = [f'ETag: "{exchange.number}"', f"Content-Length: {total - start}"]
    if start:
        lines.append(f"Content-Range: bytes {start}-{total - 1}/{total}")
    head = _head("206 Partial Content" if start else "200 OK", *lines)
    exchange.send(head, exchange.content[start:][:CUT_BYTES])


def _trickle(exchange: Exchange) -> None:
    answer(exchange, body=b"")
    for place in range(exchange.request.offset, len(exchange.content)):
        if exchange.ended.wait(0.02):
            return
        exchange.send(exchange.content[place : place + 1])


LIES: dict[str, Callable[[Exchange], object]] = {
    "cut at 20,000 bytes": cut(CUT_BYTES),
    "cut at 20,000 bytes, with Last-Modified alone": lambda exchange: answer(
        exchange, "Last-Modified: Tue, 01 Sep 2026 10:00:00 GMT", version="W/weak", body=_tail(exchange)[:CUT_BYTES]
    ),
    "cut in a chunk": lambda exchange: _chunked(exchange, (_chunk(_tail(exchange)) + b"0\r\n\r\n")[:CUT_BYTES]),
    "cut without ranges": lambda exchange: exchange.send(
        _head("200 OK", 'ETag: "1"', f"Content-Length: {len(exchange.content)}"),
        exchange.content[: exchange.number * CUT_BYTES],
    ),
    "cut at one byte": cut(1),
    "cut before the head": lambda exchange: None,
    "cut in the head": lambda exchange: exchange.send(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "reset": _reset,
    "length too long": lambda exchange: answer(exchange, length=len(_tail(exchange)) + 1000),
    "length too short": lambda exchange: answer(exchange, length=max(1, len(_tail(exchange)) // 2)),
    "length negative": lambda exchange: answer(exchange, length=-1),
    "length and chunks": lambda exchange: answer(exchange, "Transfer-Encoding: chunked"),
    "another range": lambda exchange: answer(exchange, "Content-Range: bytes 1-2/3", part=True),
    "range of 5,000 digits": lambda exchange: answer(exchange, f"Content-Range: bytes {'0' * 5000}-1/2", part=True),
    "range of a longer file": lambda exchange: answer(
        exchange, f"Content-Range: bytes {exchange.request.offset}-99/99999999", part=True
    ),
    "range where none was asked for": lambda exchange: answer(exchange, part=True),
    "range never satisfiable": status("416 Range Not Satisfiable"),
    "two files in one": _two_in_one,
    "part of another version": _part_of_another_version,
    "bytes flipped": lambda exchange: answer(exchange, body=bytes(byte ^ 1 for byte in _tail(exchange))),
    "empty": lambda exchange: answer(exchange, body=b"", length=0, part=False),
    "not modified": status("304 Not Modified"),
    "a page in its place": status("200 OK", "Content-Type: text/html", body=b"<html>Please log in</html>" * 5000),
    "endless body": lambda exchange: (
        answer(exchange, length="", part=False, body=exchange.content),
        exchange.forever(bytes(2**18)),
    ),
    "endless chunks": lambda exchange: (
        answer(exchange, "Transfer-Encoding: chunked", length="", part=False, body=b""),
        exchange.forever(_chunk(bytes(2**18))),
    ),
    "trickle": _trickle,
    "stall before the head": Exchange.wait,
    "stall in the body": lambda exchange: (answer(exchange, body=_tail(exchange)[:100]), exchange.wait()),
    "head that trickles": lambda exchange: (
        exchange.send(b"HTTP/1.1 200 OK\r\nX-Slow: "),
        exchange.forever(b"x", seconds=0.02),
    ),
    "head without end": lambda exchange: (
        exchange.send(b"HTTP/1.1 200 OK\r\n"),
        exchange.forever(b"X-More: more\r\n" * 1000),
    ),
    "early hints without end": lambda exchange: exchange.forever(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 100
    ),
    "header of 1 MB": lambda exchange: answer(exchange, "X-Long: " + "x" * 10**6),
    "chunk extension without end": lambda exchange: (
        _chunked(exchange, b"10;"),
        exchange.forever(b"x" * 1000, seconds=0.01),
    ),
    "trailers without end": lambda exchange: (
        _chunked(exchange, _chunk(_tail(exchange)), b"0\r\n"),
        exchange.forever(b"X-More: more\r\n", seconds=0.01),
    ),
    "chunk larger than it says": lambda exchange: _chunked(exchange, b"5\r\n", _tail(exchange), b"\r\n0\r\n\r\n"),
    "compressed bomb": lambda exchange: (
        answer(exchange, "Content-Encoding: gzip", length="", part=False, body=b""),
        exchange.forever(_ZEROS),
    ),
    "compressed, it says": lambda exchange: answer(exchange, "Content-Encoding: gzip"),
    "no HTTP": lambda exchange: exchange.send(exchange.content),
    "status line of 95 kB": lambda exchange: exchange.send(exchange.content * 3, b"\r\n\r\n"),
    "reason of 8,000 letters": status(f"500 {SECRET} \x1b[31m" + "no " * 2600, body=bytes(95_000)),
    "refusal of 8,000 letters": status(f"400 {SECRET} \x1b[31m" + "no " * 2600, body=bytes(95_000)),
    "unavailable until a date": status("503 Service Unavailable", "Retry-After: Fri, 31 Dec 9999 23:59:59 GMT"),
    "unavailable twice": lambda exchange: (
        exchange.number <= 2 and status("503 Slow Down", "Retry-After: 86400")(exchange)
    ),
    "found the second time": lambda exchange: exchange.number <= 1 and status("404 Not Found")(exchange),
    "gone": status("410 Gone"),
    "redirect to itself": status("302 Found", "Location: ?"),
    "redirect on and on": lambda exchange: status("302 Found", f"Location: ?{exchange.number}")(exchange),
    "redirect with a cookie": lambda exchange: (
        not exchange.request.query
        and status("302 Found", "Location: ?again", f"Set-Cookie: id={'x' * 4000}; Path=/")(exchange)
    ),
    "redirect to a file": status("302 Found", "Location: file:///etc/passwd"),
    "redirect without a place": status("302 Found"),
    "redirect to port 1": status("302 Found", f"Location: http://somebody:{SECRET}@127.0.0.1:1/"),
    "bytes behind the answer": lambda exchange: (
        answer(exchange, "Connection: keep-alive"),
        exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"),
    ),
}
