"""What all routes share: answers in JSON, refusals in the form that a route's clients know, and the guards."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from longstride.launcher.serving.connections import connection_of
from longstride.launcher.serving.metrics import Metrics

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Parsed = TypeVar("Parsed")
OPENAI = "/v1/"  # before paths that OpenAI's clients ask for
# The page needs nothing from anywhere else, and no other page may hold it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data: blob:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_ERRORS = {
    404: "nothing is here; take /, /sample, /likelihood, /model, /v1/completions, /v1/models, /metrics or /health",
    405: "not by this method: /sample, /likelihood and /v1/completions take POST, everything else GET",
    413: "the body is larger than the prompts that a request may have: give shorter ones, or fewer",
}
_SMALL_BYTES = 1 << 16  # of a body that always has room, and is parsed at once


class Refused(Exception):  # noqa: N818 - an answer
    """Why a request is not answered, in one line; ``more`` is told beside it."""

    def __init__(self, status: int, line: str, *, retry: float | None = None, **more: Any) -> None:
        """``retry``: after how many seconds another attempt may go better."""
        super().__init__(line)
        self.status, self.retry, self.more = status, retry, more


def answer(content: dict[str, Any], status: int = 200) -> web.Response:
    """One line of JSON."""
    return web.Response(text=json.dumps(content) + "\n", status=status, content_type="application/json")


def openai_error(status: int, line: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's object for an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}


class Bodies:
    """The bodies that are held at this moment: those that are not small have a room together."""

    def __init__(self, largest: int) -> None:
        """None yet. ``largest``: bytes of one body; there is room for four, and for 64 MiB."""
        self._largest, self._room = largest, max(4 * largest, 1 << 26)

    async def parsed(self, request: web.Request, seconds: float, parse: Callable[[bytes], Parsed]) -> Parsed:
        """What ``parse`` makes of a request's JSON, in a thread where it is long. Raises Refused and what it raises."""
        if request.content_type != "application/json" or "Content-Encoding" in request.headers:
            # A page of another origin cannot send this type unasked.
            raise Refused(415, "the body must be JSON, not compressed: send Content-Type: application/json")
        if (request.content_length or 0) > self._largest:
            raise Refused(413, _ERRORS[413])
        body = bytearray()
        try:
            with connection_of(request).receiving():
                await asyncio.wait_for(self._read(request, body), seconds)
            if len(body) <= _SMALL_BYTES:
                return parse(bytes(body))
            return await asyncio.get_running_loop().run_in_executor(None, parse, bytes(body))
        except web.RequestPayloadError:
            raise Refused(400, "the body is not sent as the head says: its length, or its chunks, are wrong") from None
        except asyncio.TimeoutError:
            raise Refused(408, f"the body did not come within {seconds:g} s") from None
        finally:
            self._room += _counted(body)

    async def _read(self, request: web.Request, body: bytearray) -> None:
        while chunk := await request.content.readany():
            self._room += _counted(body)
            body += chunk
            self._room -= _counted(body)
            if len(body) > self._largest:
                raise Refused(413, _ERRORS[413])
            if self._room < 0 < _counted(body):
                raise Refused(503, "too many long bodies at once; try again", retry=1)


def _counted(body: bytearray) -> int:
    return len(body) if len(body) > _SMALL_BYTES else 0


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every answer."""
    response.headers.update(_HEADERS)


def counting(metrics: Metrics) -> Middleware:
    """Counts answers by their route, and times them."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        begun, status = time.monotonic(), 499  # the client left
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            route = "other" if resource is None else resource.canonical
            metrics.requests[route, status] += 1
            metrics.request_seconds.add(time.monotonic() - begun)

    return count


@web.middleware
async def errors_in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as JSON: refusals, the framework's own, and unexpected ones, whose traceback goes to standard error."""
    try:
        return await handler(request)
    except Refused as error:
        refused = error
    except web.HTTPException as error:
        refused = Refused(error.status, _ERRORS.get(error.status, error.reason))
        if "Allow" in error.headers:
            response = _refusal(request, refused)
            response.headers["Allow"] = error.headers["Allow"]
            return response
    except ConnectionError:
        refused = Refused(400, "the client left")  # which nobody reads
    except Exception:
        traceback.print_exc(file=sys.stderr)
        refused = Refused(500, "the server failed at this request; it goes on")
    return _refusal(request, refused)


def _refusal(request: web.Request, refused: Refused) -> web.Response:
    if request.path.startswith(OPENAI):
        more = {name: value for name, value in refused.more.items() if name in ("param", "code")}
        response = answer(openai_error(refused.status, str(refused), **more), refused.status)
        if refused.status >= 500 and refused.retry is None:
            response.headers["x-should-retry"] = "false"  # OpenAI's clients would ask for the same again
    else:
        response = answer({"error": str(refused)} | refused.more, refused.status)
    if refused.retry is not None:
        response.headers["Retry-After"] = str(math.ceil(refused.retry))
    return response


def own_names_only(names: Collection[str]) -> Middleware:
    """Refuses other names than these: a page can make its own name lead to this address (DNS rebinding).

    An address is no name that a page could have, and it may be another than this machine's own: a container's host
    hands on what comes to one of its.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        name = _parts("//" + request.headers.get("Host", "")).hostname or ""
        if not (name == "localhost" or name in names or _is_address(name)):
            line = (
                f"the Host header names {name[:80]!r}, which is not this server's; if it is, start it with --allow-host"
            )
            raise Refused(403, f"{line} {name[:80]}" if name else line)
        return await handler(request)

    return check


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@web.middleware
async def watched(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells the connection that a request is answered. One whose body is not read to its end is its last."""
    with connection_of(request).answering(request):
        response = await handler(request)
        if not request.content.is_eof():
            response.force_close()
        return response


@web.middleware
async def own_origin_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a page of another origin sends."""
    origin = request.headers.get("Origin")
    if origin is not None and _parts(origin).netloc != request.headers.get("Host"):
        raise Refused(403, "pages of another origin have no access")
    return await handler(request)


def _parts(url: str) -> SplitResult:
    """The parts of a URL; of what is none, empty ones."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
