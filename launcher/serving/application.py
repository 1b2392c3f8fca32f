"""The routes: a page, what is served, and samples that are streamed; and the guards that every request passes.

See docs/serving.md.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import SplitResult, urlsplit

from aiohttp import web

from longstride.kernels import ConfigError
from longstride.launcher.ranks import is_loopback
from longstride.launcher.serving.request import MalformedError, SampleRequest, largest_body, parse_request
from longstride.launcher.serving.sampler import Busy, End, Job, Sampler
from longstride.sparse_model import ModelConfig

Events = asyncio.Queue[bytes | End]
_PAGES = {
    "/": ("serve.html", "text/html"),
    "/serve.css": ("serve.css", "text/css"),
    "/serve.js": ("serve.js", "text/javascript"),
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# The page needs nothing from anywhere else, and no other page may hold it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data: blob:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_ERRORS = {
    404: "nothing is here; take /, /sample, /model or /health",
    405: "not by this method: /sample takes POST, everything else GET",
    413: "the body is larger than any prompt that the model takes",
}
_LAST_WORD_SECONDS = 1.0  # for a client to read the line that says it was too late


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may take."""

    max_bytes: int  # sampled
    waiting: int  # requests, beside the one that is sampled
    seconds: float  # from its arrival to its last byte


class Service:
    """The handlers of all routes."""

    def __init__(self, config: ModelConfig, about: dict[str, Any], sampler: Sampler, limits: Limits) -> None:
        self._config, self._about, self._sampler, self._limits = config, about, sampler, limits

    def application(self, loopback: bool) -> web.Application:
        """All routes; on loopback, for names of this machine alone."""
        guards = [errors_in_json, *([own_names_only] if loopback else []), own_origin_only]
        application = web.Application(client_max_size=largest_body(self._config), middlewares=guards)
        for path in _PAGES:
            application.router.add_get(path, self.page)
        application.router.add_get("/health", self.health)
        application.router.add_get("/model", self.model)
        application.router.add_post("/sample", self.sample)
        application.on_response_prepare.append(add_headers)
        return application

    async def page(self, request: web.Request) -> web.Response:
        """The page, its style and its script."""
        file, kind = _PAGES[request.path]
        text = resources.files("longstride.launcher.serving").joinpath(file).read_text(encoding="utf-8")
        return web.Response(text=text, content_type=kind, charset="utf-8")

    async def health(self, request: web.Request) -> web.Response:
        """Whether the server works, and how many requests there are."""
        return answer({"status": "ok", "sampling": self._sampler.sampling, "waiting": self._sampler.waiting})

    async def model(self, request: web.Request) -> web.Response:
        """What is served."""
        return answer(self._about)

    async def sample(self, request: web.Request) -> web.StreamResponse:
        """Samples, and streams bytes as they come."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.seconds
        sample = await self._read(request)
        if isinstance(sample, web.Response):
            return sample
        events: Events = asyncio.Queue()

        def deliver(event: bytes | End) -> None:
            """From the sampling thread to the loop's. A closed loop needs nothing any more."""
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(sample, deliver)
        try:
            self._sampler.submit(job)
        except Busy as busy:
            return refusal(503, str(busy), retry=busy.seconds)
        try:
            return await self._stream(request, job, events, deadline)
        finally:  # also where the client left, which cancels the handler
            self._sampler.drop(job)

    async def _read(self, request: web.Request) -> SampleRequest | web.Response:
        """What a request asks for, or a refusal."""
        if request.content_type != "application/json" or "Content-Encoding" in request.headers:
            # A page of another origin cannot send this type unasked.
            return refusal(415, "the body must be JSON, not compressed: send Content-Type: application/json")
        try:
            body = await asyncio.wait_for(request.read(), self._limits.seconds)
            return parse_request(body, self._config, self._limits.max_bytes)
        except asyncio.TimeoutError:
            return refusal(408, f"the body did not come within {self._limits.seconds:g} s")
        except MalformedError as error:
            return refusal(400, str(error))
        except ConfigError as error:
            problems = [{"field": problem.path, "rule": problem.rule} for problem in error.problems]
            return refusal(422, "; ".join(map(str, error.problems)), problems=problems)

    async def _stream(self, request: web.Request, job: Job, events: Events, deadline: float) -> web.StreamResponse:
        """The answer from a sample's first byte to its last, or to the deadline."""
        loop = asyncio.get_running_loop()
        late = f"took longer than {self._limits.seconds:g} s"
        try:
            first = await asyncio.wait_for(events.get(), deadline - loop.time())
        except asyncio.TimeoutError:
            return refusal(503, f"{late} to begin", retry=1)
        if isinstance(first, End) and first.problem:
            return refusal(503 if self._sampler.closed else 500, first.problem)
        lines = _Lines(request)
        try:
            await asyncio.wait_for(lines.send(job, first, events), deadline - loop.time())
        except asyncio.TimeoutError:
            job.stopped = True
            await lines.write_at_last({"error": late, "sampled": lines.sampled})
        except ConnectionError:  # the client left, and a byte came before the cancellation
            pass
        return lines.response


class _Lines:
    """A streamed answer, a JSON object a line."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        self.sampled = 0  # bytes written

    async def send(self, job: Job, first: bytes | End, events: Events) -> None:
        """All lines of a sample; each has the bytes since the line before."""
        await self.response.prepare(self.request)
        await self.write({"seed": job.request.seed, "bytes": job.request.count})
        taken = [first]
        while True:
            while not events.empty():
                taken.append(events.get_nowait())
            sampled = b"".join(event for event in taken if isinstance(event, bytes))
            if sampled:
                self.sampled += len(sampled)
                await self.write({"base64": base64.b64encode(sampled).decode()})
            end = next((event for event in taken if isinstance(event, End)), None)
            if end is not None:
                ending = {"error": end.problem} if end.problem else {"done": True}
                return await self.write(ending | {"sampled": self.sampled})
            taken = [await events.get()]

    async def write_at_last(self, content: dict[str, Any]) -> None:
        """A last line. A client that no longer reads has its connection aborted."""
        try:
            await asyncio.wait_for(self.write(content), _LAST_WORD_SECONDS)
        except (asyncio.TimeoutError, ConnectionError):
            if self.request.transport is not None:
                self.request.transport.abort()

    async def write(self, content: dict[str, Any]) -> None:
        """One line."""
        await self.response.write(json.dumps(content).encode() + b"\n")


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
async def errors_in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as JSON: the framework's own, and unexpected ones, whose traceback goes to standard error."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        response = refusal(error.status, _ERRORS.get(error.status, error.reason))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        return refusal(400, "the client left")  # which nobody reads
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return refusal(500, "the server failed at this request; it goes on")


@web.middleware
async def own_names_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse names of other machines: a page can make its own name lead to this address (DNS rebinding)."""
    name = _parts("//" + request.headers.get("Host", "")).hostname or ""
    if not is_loopback(name):
        return refusal(403, f"the Host header names {name[:80]!r}; this server is on localhost alone")
    return await handler(request)


@web.middleware
async def own_origin_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a page of another origin sends."""
    origin = request.headers.get("Origin")
    if origin is not None and _parts(origin).netloc != request.headers.get("Host"):
        return refusal(403, "pages of another origin have no access")
    return await handler(request)


def _parts(url: str) -> SplitResult:
    """The parts of a URL; of what is none, empty ones."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
