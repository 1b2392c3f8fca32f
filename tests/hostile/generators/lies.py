"""What a web server may answer that lies: each kind is a function of one exchange, which it ends.

    with FaultyServer(folder, lie=LIES["endless body"]) as url: ...

Answers honour ranges unless their kind says otherwise.
"""

from __future__ import annotations

import gzip
import socket
import struct
from collections.abc import Callable

from tests.hostile.generators.http_servers import Exchange

CUT_BYTES = 20_000
SECRET = "hunter2"  # a user's, which a server repeats
_ZEROS = gzip.compress(bytes(2**24))


def answer(
    exchange: Exchange,
    *headers: str,
    body: bytes | None = None,
    length: object = None,
    version: str = '"1"',
    part: bool | None = None,
) -> None:
    """Build an honest answer with other values: a body, a length (none if empty), a version, or a range."""
    versions = {version, *(line.partition(": ")[2] for line in headers if line.startswith("Last-Modified"))}
    start = exchange.request.offset if exchange.request.headers.get("if-range", version) in versions else 0
    part = start > 0 if part is None else part
    rest = exchange.content[start:]
    if part and not rest:
        exchange.send(b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n\r\n")
        return
    lines = [f"HTTP/1.1 {'206 Partial Content' if part else '200 OK'}", f"ETag: {version}", *headers]
    if length != "":
        lines.append(f"Content-Length: {len(rest) if length is None else length}")
    if part and not any(line.startswith("Content-Range") for line in headers):
        lines.append(f"Content-Range: bytes {start}-{len(exchange.content) - 1}/{len(exchange.content)}")
    exchange.send("\r\n".join([*lines, "", ""]).encode("latin-1"), rest if body is None else body)


def status(line: str, *headers: str, body: bytes = b"") -> Callable[[Exchange], None]:
    """Return always the same status."""
    head = "\r\n".join([f"HTTP/1.1 {line}", *headers, f"Content-Length: {len(body)}", "", ""]).encode("latin-1")
    return lambda exchange: exchange.send(head, body)


def cut(size: int, **changes: object) -> Callable[[Exchange], None]:
    """End the connection after so many bytes of each answer."""
    return lambda exchange: answer(exchange, body=_rest(exchange)[:size], **changes)  # type: ignore[arg-type]


def _rest(exchange: Exchange) -> bytes:
    return exchange.content[exchange.request.offset :]


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def _chunked(exchange: Exchange, *pieces: bytes) -> None:
    answer(exchange, "Transfer-Encoding: chunked", length="", body=b"")
    exchange.send(*pieces)


def _cut_without_ranges(exchange: Exchange) -> None:
    size = len(exchange.content)
    head = f'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: {size}\r\n\r\n'.encode()
    exchange.send(head, exchange.content[: exchange.number * CUT_BYTES])


def _reset(exchange: Exchange) -> None:
    answer(exchange, body=_rest(exchange)[:CUT_BYTES])
    exchange.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    exchange.connection.close()


def _two_in_one(exchange: Exchange) -> None:
    """Serve requests for a part from another file."""
    other = bytes(byte ^ 1 for byte in exchange.content) if exchange.request.offset else exchange.content
    cut(CUT_BYTES, version=f'"{exchange.number}"')(
        Exchange(exchange.request, other, exchange.number, exchange.connection, exchange.ended)
    )


def _part_of_another_version(exchange: Exchange) -> None:
    """Ignore If-Range."""
    start, total = exchange.request.offset, len(exchange.content)
    head = "HTTP/1.1 206 Partial Content" if start else "HTTP/1.1 200 OK"
    lines = [head, f'ETag: "{exchange.number}"', f"Content-Length: {total - start}"]
    if start:
        lines.append(f"Content-Range: bytes {start}-{total - 1}/{total}")
    exchange.send("\r\n".join([*lines, "", ""]).encode(), exchange.content[start:][:CUT_BYTES])


def _trickle(exchange: Exchange) -> None:
    answer(exchange, body=b"")
    for place in range(exchange.request.offset, len(exchange.content)):
        if exchange.ended.wait(0.02):
            return
        exchange.send(exchange.content[place : place + 1])


def _stall(exchange: Exchange) -> None:
    exchange.wait()


def _stall_in_the_body(exchange: Exchange) -> None:
    answer(exchange, body=_rest(exchange)[:100])
    exchange.wait()


def _head_that_trickles(exchange: Exchange) -> None:
    exchange.send(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    exchange.forever(b"x", seconds=0.02)


def _head_without_end(exchange: Exchange) -> None:
    exchange.send(b"HTTP/1.1 200 OK\r\n")
    exchange.forever(b"X-More: more\r\n" * 1000)


def _early_hints_without_end(exchange: Exchange) -> None:
    exchange.forever(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 100)


def _endless(exchange: Exchange) -> None:
    answer(exchange, length="", part=False, body=exchange.content)
    exchange.forever(bytes(2**18))


def _endless_chunks(exchange: Exchange) -> None:
    answer(exchange, "Transfer-Encoding: chunked", length="", part=False, body=b"")
    exchange.forever(_chunk(bytes(2**18)))


def _chunk_extension_without_end(exchange: Exchange) -> None:
    _chunked(exchange, b"10;")
    exchange.forever(b"x" * 1000, seconds=0.01)


def _trailers_without_end(exchange: Exchange) -> None:
    _chunked(exchange, _chunk(_rest(exchange)), b"0\r\n")
    exchange.forever(b"X-More: more\r\n", seconds=0.01)


def _bomb(exchange: Exchange) -> None:
    answer(exchange, "Content-Encoding: gzip", length="", part=False, body=b"")
    exchange.forever(_ZEROS)


def _found_the_second_time(exchange: Exchange) -> bool | None:
    if exchange.number > 1:
        return False
    exchange.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    return None


def _busy_at_first(exchange: Exchange) -> bool | None:
    if exchange.number > 2:
        return False
    exchange.send(b"HTTP/1.1 503 Slow Down\r\nRetry-After: 86400\r\nContent-Length: 0\r\n\r\n")
    return None


def _redirect_on_and_on(exchange: Exchange) -> None:
    number = exchange.number
    exchange.send(f"HTTP/1.1 302 Found\r\nLocation: ?{number}\r\nContent-Length: 0\r\n\r\n".encode())


def _redirect_to_itself_with_a_cookie(exchange: Exchange) -> bool | None:
    if exchange.request.query:
        return False
    location = b"HTTP/1.1 302 Found\r\nLocation: ?again\r\nSet-Cookie: id=%s; Path=/\r\nContent-Length: 0\r\n\r\n"
    exchange.send(location % (b"x" * 4000))
    return None


def _redirect(location: str) -> Callable[[Exchange], None]:
    return status("302 Found", f"Location: {location}")


LIES: dict[str, Callable[[Exchange], bool | None]] = {
    "cut at 20,000 bytes": cut(CUT_BYTES),
    "cut at 20,000 bytes, with Last-Modified alone": lambda exchange: answer(
        exchange, "Last-Modified: Tue, 01 Sep 2026 10:00:00 GMT", version="W/weak", body=_rest(exchange)[:CUT_BYTES]
    ),
    "cut in a chunk": lambda exchange: _chunked(exchange, (_chunk(_rest(exchange)) + b"0\r\n\r\n")[:CUT_BYTES]),
    "cut without ranges": _cut_without_ranges,
    "cut at one byte": cut(1),
    "cut before the head": lambda exchange: None,
    "cut in the head": lambda exchange: exchange.send(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "cut behind the head": cut(0),
    "reset": _reset,
    "length too long": lambda exchange: answer(exchange, length=len(_rest(exchange)) + 1000),
    "length too short": lambda exchange: answer(exchange, length=max(1, len(_rest(exchange)) // 2)),
    "length negative": lambda exchange: answer(exchange, length=-1),
    "length of 5,000 digits": lambda exchange: answer(exchange, length="9" * 5000),
    "two lengths": lambda exchange: answer(exchange, "Content-Length: 3"),
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
    "bytes flipped": lambda exchange: answer(exchange, body=bytes(byte ^ 1 for byte in _rest(exchange))),
    "empty": lambda exchange: answer(exchange, body=b"", length=0, part=False),
    "no content": status("204 No Content"),
    "not modified": status("304 Not Modified"),
    "a page in its place": status("200 OK", "Content-Type: text/html", body=b"<html>Please log in</html>" * 5000),
    "endless body": _endless,
    "endless chunks": _endless_chunks,
    "trickle": _trickle,
    "stall before the head": _stall,
    "stall in the body": _stall_in_the_body,
    "head that trickles": _head_that_trickles,
    "head without end": _head_without_end,
    "early hints without end": _early_hints_without_end,
    "header of 1 MB": lambda exchange: answer(exchange, "X-Long: " + "x" * 10**6),
    "NUL in a header": lambda exchange: answer(exchange, "X-Odd: a\0b"),
    "chunk extension without end": _chunk_extension_without_end,
    "trailers without end": _trailers_without_end,
    "chunks of no size": lambda exchange: _chunked(exchange, b"zz\r\n", _rest(exchange)),
    "chunk larger than it says": lambda exchange: _chunked(exchange, b"5\r\n", _rest(exchange), b"\r\n0\r\n\r\n"),
    "compressed bomb": _bomb,
    "compressed, it says": lambda exchange: answer(exchange, "Content-Encoding: gzip"),
    "no HTTP": lambda exchange: exchange.send(exchange.content),
    "status line of 95 kB": lambda exchange: exchange.send(exchange.content * 3, b"\r\n\r\n"),
    "status 99999": status("99999 What"),
    "version 9.9": lambda exchange: exchange.send(b"HTTP/9.9 200 OK\r\nContent-Length: 0\r\n\r\n"),
    "reason of 8,000 letters": status(f"500 {SECRET} \x1b[31m" + "no " * 2600, body=bytes(95_000)),
    "refusal of 8,000 letters": status(f"400 {SECRET} \x1b[31m" + "no " * 2600, body=bytes(95_000)),
    "too many requests": status("429 Too Many Requests", "Retry-After: 999999999999"),
    "unavailable": status("503 Service Unavailable", "Retry-After: -1"),
    "unavailable until a date": status("503 Service Unavailable", "Retry-After: Fri, 31 Dec 9999 23:59:59 GMT"),
    "unavailable twice": _busy_at_first,
    "found the second time": _found_the_second_time,
    "gone": status("410 Gone"),
    "redirect to itself": _redirect("?"),
    "redirect on and on": _redirect_on_and_on,
    "redirect with a cookie": _redirect_to_itself_with_a_cookie,
    "redirect to a file": _redirect("file:///etc/passwd"),
    "redirect to another protocol": _redirect("gopher://127.0.0.1/" + "x" * 3000),
    "redirect to nowhere": _redirect("http://"),
    "redirect without a place": status("302 Found"),
    "redirect to port 1": _redirect(f"http://somebody:{SECRET}@127.0.0.1:1/"),
    "bytes behind the answer": lambda exchange: (
        exchange.send(b"")
        or answer(exchange, "Connection: keep-alive")
        or exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad")
    ),
}
