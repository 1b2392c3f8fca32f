"""What every request passes: names and origins of this machine, and errors as lines of JSON."""

from __future__ import annotations

import ipaddress
import json
import math
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# The page needs nothing from anywhere else, and no other page may hold it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data: blob:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def answer(content: dict[str, Any], status: int = 200) -> web.Response:
    """One line of JSON."""
    return web.Response(text=json.dumps(content) + "\n", status=status, content_type="application/json")


def refusal(status: int, line: str, *, retry: float | None = None, **more: Any) -> web.Response:
    """A refusal that says why, and after how many seconds another attempt may go better."""
    response = answer({"error": line} | more, status)
    if retry is not None:
        response.headers["Retry-After"] = str(math.ceil(retry))
    return response


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every answer."""
    response.headers.update(_HEADERS)


@web.middleware
async def told_in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as JSON: the framework's own, and what nobody foresaw, whose traceback goes to standard error."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        response = refusal(error.status, _LINES.get(error.status, error.reason))
        response.headers.update(allowed)
        return response
    except ConnectionError:
        return refusal(400, "the client left")  # which nobody reads
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return refusal(500, "the server failed at this request; it goes on")


_LINES = {
    404: "nothing is here; take /, /sample, /model or /health",
    405: "not by this method: /sample takes POST, everything else GET",
    413: "the body is larger than any prompt that the model takes",
}


@web.middleware
async def own_names_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse names of other machines: a page may have had its own name lead to this address (DNS rebinding)."""
    name = _host(request.headers.get("Host", ""))
    if not is_loopback(name):
        return refusal(403, f"the Host header names {name[:80]!r}; this server is on localhost alone")
    return await handler(request)


@web.middleware
async def own_origin_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a page of another origin sends."""
    origin = request.headers.get("Origin")
    if origin is not None and _netloc(origin) != request.headers.get("Host"):
        return refusal(403, "pages of another origin have no access")
    return await handler(request)


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is always this machine's own."""
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _host(header: str) -> str:
    """The name in a Host header, without port and brackets; empty where there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _netloc(origin: str) -> str:
    """Host and port of an origin; empty where it has none, such as "null"."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
