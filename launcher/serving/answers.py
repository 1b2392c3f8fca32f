"""Shared by all routes: answers in JSON, errors in the format of a route's clients, bodies, and access checks."""

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
OPENAI = "/v1/"  # prefix of the paths of OpenAI's clients
# The page loads nothing from elsewhere, and no other page may embed it.
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
_SMALL_BYTES = 1 << 16  # bodies up to this size do not count as memory, and are parsed at once


class Refused(Exception):  # noqa: N818 - an answer
    """A request is refused, for a reason in one line.

    Args:
        status: of the answer.
        line: the reason.
        retry: the seconds after which another attempt may succeed.
        details: further fields of the answer.
    """

    def __init__(self, status: int, line: str, *, retry: float | None = None, **details: Any) -> None:
        super().__init__(line)
        self.status, self.retry, self.details = status, retry, details


def answer(content: dict[str, Any], status: int = 200) -> web.Response:
    """Build an answer of one line of JSON."""
    return web.Response(text=json.dumps(content) + "\n", status=status, content_type="application/json")


def openai_error(status: int, line: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Build OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}


class Bodies:
    """The request bodies in memory. Large ones share a budget of 64 MiB, or of four of the largest.

    ``largest`` is the most bytes of one body.
    """

    def __init__(self, largest: int) -> None:
        self._largest, self._room = largest, max(4 * largest, 1 << 26)

    async def parse(self, request: web.Request, seconds: float, parse: Callable[[bytes], Parsed]) -> Parsed:
        """Read a request's JSON and parse it, in a thread if it is large.

        Raises:
            Refused: the body is not JSON, too large, late or incomplete; also whatever ``parse`` raises.
        """
        if request.content_type != "application/json" or "Content-Encoding" in request.headers:
            # A page of another origin cannot send this type without a preflight request.
            raise Refused(415, "the body must be JSON, not compressed: send Content-Type: application/json")
        if (request.content_length or 0) > self._largest:
            raise Refused(413, _ERRORS[413])
        body = bytearray()

        async def read() -> None:
            while chunk := await request.content.readany():
                self._room += _large_bytes(body)
                body.extend(chunk)
                self._room -= _large_bytes(body)
                if len(body) > self._largest:
                    raise Refused(413, _ERRORS[413])
                if self._room < 0 < _large_bytes(body):
                    raise Refused(503, "too many long bodies at once; try again", retry=1)

        try:
            with connection_of(request).receiving():
                await asyncio.wait_for(read(), seconds)
            if len(body) <= _SMALL_BYTES:
                return parse(bytes(body))
            return await asyncio.get_running_loop().run_in_executor(None, parse, bytes(body))
        except web.RequestPayloadError:
            raise Refused(400, "the body is not sent as the head says: its length, or its chunks, are wrong") from None
        except asyncio.TimeoutError:
            raise Refused(408, f"the body did not come within {seconds:g} s") from None
        finally:
            self._room += _large_bytes(body)


def _large_bytes(body: bytearray) -> int:
    return len(body) if len(body) > _SMALL_BYTES else 0


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the security headers to an answer."""
    response.headers.update(_HEADERS)


def counting(metrics: Metrics) -> Middleware:
    """Build a middleware that counts answers by route and measures their times."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        start, status = time.monotonic(), 499  # the client left
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            route = "other" if resource is None else resource.canonical
            metrics.requests[route, status] += 1
            metrics.request_seconds.add(time.monotonic() - start)

    return count


@web.middleware
async def errors_in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors in JSON: refusals, aiohttp's own, and unexpected ones, which also print a traceback."""
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
        refused = Refused(400, "the client left")  # nobody reads this
    except Exception:
        traceback.print_exc(file=sys.stderr)
        refused = Refused(500, "this request failed in the server, which keeps running")
    return _refusal(request, refused)


def _refusal(request: web.Request, refused: Refused) -> web.Response:
    if request.path.startswith(OPENAI):
        details = {name: value for name, value in refused.details.items() if name in ("param", "code")}
        response = answer(openai_error(refused.status, str(refused), **details), refused.status)
        if refused.status >= 500 and refused.retry is None:
            response.headers["x-should-retry"] = "false"  # otherwise OpenAI's clients repeat the request
    else:
        response = answer({"error": str(refused)} | refused.details, refused.status)
    if refused.retry is not None:
        response.headers["Retry-After"] = str(math.ceil(refused.retry))
    return response


def own_names_only(names: Collection[str]) -> Middleware:
    """Build a middleware that refuses other host names, against DNS rebinding: a page may point its name here.

    Any IP address is accepted. A page cannot have one as its name, and it may differ from this machine's: a container's
    host forwards requests to its own address.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        name = _split_url("//" + request.headers.get("Host", "")).hostname or ""
        try:
            is_allowed = name == "localhost" or name in names or bool(ipaddress.ip_address(name))
        except ValueError:
            is_allowed = False
        if not is_allowed:
            line = (
                f"the Host header names {name[:80]!r}, which is not this server's; if it is, start it with --allow-host"
            )
            raise Refused(403, f"{line} {name[:80]}" if name else line)
        return await handler(request)

    return check


@web.middleware
async def watched(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Mark the connection as answering. A request whose body is not read to its end is its last."""
    with connection_of(request).answering(request):
        response = await handler(request)
        if not request.content.is_eof():
            response.force_close()
        return response


@web.middleware
async def own_origin_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests from a page of another origin."""
    origin = request.headers.get("Origin")
    if origin is not None and _split_url(origin).netloc != request.headers.get("Host"):
        raise Refused(403, "pages of another origin have no access")
    return await handler(request)


def _split_url(url: str) -> SplitResult:
    """Split a URL into its parts; an invalid URL gives empty parts."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
