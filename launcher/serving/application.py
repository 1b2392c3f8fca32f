"""The routes: a page, the model, streamed samples, likelihoods, and OpenAI's completions. See docs/serving.md."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

from aiohttp import web

from longstride.kernels import ConfigError
from longstride.launcher.serving.answers import (
    OPENAI,
    Bodies,
    Parsed,
    Refused,
    add_headers,
    answer,
    counting,
    errors_in_json,
    openai_error,
    own_names_only,
    own_origin_only,
    watched,
)
from longstride.launcher.serving.completions import (
    MOST_CHOICES,
    Completion,
    TooLongError,
    UnknownModelError,
    parse_completion,
)
from longstride.launcher.serving.metrics import CONTENT_TYPE
from longstride.launcher.serving.request import (
    MalformedError,
    SampleRequest,
    ScoreRequest,
    largest_body,
    most_bytes,
    parse_request,
    parse_score,
)
from longstride.launcher.serving.sampler import Busy, End, Job, Piece, Sampler
from longstride.sparse_model import ModelConfig

Event = tuple[int, Piece | End]  # with the number of the context
_PAGES = {
    "/": ("serve.html", "text/html"),
    "/serve.css": ("serve.css", "text/css"),
    "/serve.js": ("serve.js", "text/javascript"),
}
_NATS_DIGITS = 6  # decimals of a byte's nats
_LAST_WORD_SECONDS = 1.0  # for a client to read the line about the time limit


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests."""

    max_bytes: int  # to sample per context
    waiting: int  # requests in the queue
    seconds: float  # from a request to the end of its answer
    contexts: int  # sampled at once, over all requests


class Service:
    """The handlers of all routes."""

    def __init__(self, config: ModelConfig, about: dict[str, Any], sampler: Sampler, limits: Limits) -> None:
        self._config, self._about, self._sampler, self.limits = config, about, sampler, limits
        self._bodies = Bodies(largest_body(config, MOST_CHOICES))

    def application(self, names: Collection[str]) -> web.Application:
        """Build the application with all routes, for requests to these host names and to IP addresses."""
        middlewares = [watched, counting(self._sampler.metrics), errors_in_json, own_names_only(names), own_origin_only]
        application = web.Application(middlewares=middlewares)
        for path in _PAGES:
            application.router.add_get(path, self.page)
        application.router.add_get("/health", self.health)
        application.router.add_get("/metrics", self.metrics)
        application.router.add_get("/model", self.model)
        application.router.add_post("/sample", self.sample)
        application.router.add_post("/likelihood", self.likelihood)
        application.router.add_get(f"{OPENAI}models", self.models)
        application.router.add_get(f"{OPENAI}models/{{id:.+}}", self.models)
        application.router.add_post(f"{OPENAI}completions", self.completions)
        application.on_response_prepare.append(add_headers)
        return application

    async def page(self, request: web.Request) -> web.Response:
        """Serve the page, its style and its script."""
        file, kind = _PAGES[request.path]
        text = resources.files("longstride.launcher.serving").joinpath(file).read_text(encoding="utf-8")
        return web.Response(text=text, content_type=kind, charset="utf-8")

    async def health(self, request: web.Request) -> web.Response:
        """Report that the server works, and how many requests there are."""
        return answer({"status": "ok", "sampling": self._sampler.contexts > 0, "waiting": self._sampler.waiting})

    async def metrics(self, request: web.Request) -> web.Response:
        """Report counts since the start, in Prometheus' format."""
        gauges = {
            "contexts_sampling": ("Contexts that are being sampled.", self._sampler.contexts),
            "requests_waiting": ("Requests in the queue.", self._sampler.waiting),
        }
        text = self._sampler.metrics.text(gauges)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def model(self, request: web.Request) -> web.Response:
        """Describe the model."""
        return answer(self._about)

    async def models(self, request: web.Request) -> web.Response:
        """Describe the model in OpenAI's format: in a list, or by its name."""
        about = self._about
        described = {"id": about["name"], "object": "model", "created": about["created"], "owned_by": "longstride"}
        described["max_model_len"] = most_bytes(self._config)
        name = request.match_info.get("id")
        if name is None:
            return answer({"object": "list", "data": [described]})
        if name != about["name"]:
            raise _unknown(UnknownModelError(f"model={name[:80]!r} is not served here; take {about['name']!r}"))
        return answer(described)

    async def sample(self, request: web.Request) -> web.StreamResponse:
        """Sample, and stream bytes as they come."""
        deadline = _now() + self.limits.seconds
        most = self.limits.max_bytes
        sample = await self._parse(request, lambda body: parse_request(body, self._config, most))
        return await self._stream(request, _Lines(sample), [sample], deadline)

    async def likelihood(self, request: web.Request) -> web.Response:
        """Compute the nats of each byte of a text."""
        deadline = _now() + self.limits.seconds
        score = await self._parse(request, lambda body: parse_score(body, self._config))
        events = await self._collect([score], deadline)

        def encode() -> bytes:
            scores = [item for _, event in events if isinstance(event, Piece) for item in event.scores]
            nats = [-item.logprob for item in scores if item is not None]
            bits = math.fsum(nats) / math.log(2) / len(nats)
            rounded = [round(value, _NATS_DIGITS) for value in nats]
            return _line({"bytes": len(nats), "bits_per_byte": bits, "min_context": score.min_context, "nats": rounded})

        body = await asyncio.get_running_loop().run_in_executor(None, encode)
        return web.Response(body=body, content_type="application/json")

    async def _parse(self, request: web.Request, parse: Callable[[bytes], Parsed]) -> Parsed:
        """Parse a request's body; turn its errors into Refused."""
        try:
            return await self._bodies.parse(request, self.limits.seconds, parse)
        except MalformedError as error:
            raise Refused(400, str(error)) from None
        except ConfigError as error:
            problems = [{"field": problem.path, "rule": problem.rule} for problem in error.problems]
            raise Refused(422, "; ".join(map(str, error.problems)), problems=problems) from None

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Sample for OpenAI's clients, in one answer or streamed."""
        deadline = _now() + self.limits.seconds
        name, most = self._about["name"], self.limits.max_bytes
        try:
            completion_request = await self._bodies.parse(
                request, self.limits.seconds, lambda body: parse_completion(body, self._config, name, most)
            )
        except UnknownModelError as error:
            raise _unknown(error) from None
        except MalformedError as error:
            raise Refused(400, str(error)) from None
        except ConfigError as error:
            code = "context_length_exceeded" if isinstance(error, TooLongError) else None
            line = "; ".join(map(str, error.problems))
            raise Refused(400, line, param=error.problems[0].path, code=code) from None
        completion = Completion(completion_request, self._about)
        samples = completion_request.samples
        if completion_request.stream:
            return await self._stream(request, _Chunks(completion), samples, deadline)
        all_events = await self._collect(samples, deadline, "ask for less, or stream")

        def encode() -> bytes:
            for number, event in all_events:
                completion.add(number, event)
            return _line(completion.answer())

        # In a thread, as scores of many bytes take 40 MB and more.
        body = await asyncio.get_running_loop().run_in_executor(None, encode)
        return web.Response(body=body, content_type="application/json")

    async def _collect(
        self, requests: Sequence[SampleRequest | ScoreRequest], deadline: float, advice: str = "ask for less"
    ) -> list[Event]:
        """Return all events of a request once it is complete. Raises Refused if it fails or takes too long."""
        events: list[Event] = []
        async with self._sampling(requests, events) as (jobs, ends):
            try:
                for _ in jobs:
                    number, end = await asyncio.wait_for(ends.get(), deadline - _now())
                    self._check(end)
                    events.append((number, end))
            except asyncio.TimeoutError:
                raise Refused(503, f"took longer than {self.limits.seconds:g} s; {advice}") from None
        return events

    @asynccontextmanager
    async def _sampling(
        self, samples: Sequence[SampleRequest | ScoreRequest], pieces: list[Event] | None = None
    ) -> AsyncIterator[tuple[list[Job], asyncio.Queue[Event]]]:
        """Submit contexts to the sampler and yield them with a queue of their events; drop them on exit.

        With a list ``pieces``, pieces are appended to it, and only ends go to the queue and wake the loop.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def job(number: int, sample: SampleRequest | ScoreRequest) -> Job:
            def deliver(event: Piece | End) -> None:
                """Pass an event from the sampling thread to the loop's thread."""
                if pieces is not None and isinstance(event, Piece):
                    pieces.append((number, event))
                elif not loop.is_closed():
                    loop.call_soon_threadsafe(events.put_nowait, (number, event))

            return Job(sample, deliver)

        jobs = [job(number, sample) for number, sample in enumerate(samples)]
        try:
            self._sampler.submit(jobs)
        except Busy as busy:
            raise Refused(503, str(busy), retry=busy.seconds) from None
        try:
            yield jobs, events
        finally:  # also if the client leaves, which cancels the handler
            self._sampler.drop(jobs)

    def _check(self, event: Piece | End) -> None:
        if isinstance(event, End) and event.problem:
            raise Refused(503 if self._sampler.closed else 500, event.problem)

    async def _stream(
        self,
        request: web.Request,
        output: _Lines | _Chunks,
        samples: Sequence[SampleRequest],
        deadline: float,
    ) -> web.StreamResponse:
        """Sample, and write bytes as they come, to the last or to the deadline."""
        response = web.StreamResponse(headers={"Content-Type": output.content_type})

        async def send(batch: list[Event], events: asyncio.Queue[Event]) -> None:
            await response.prepare(request)
            if output.head:
                await response.write(output.head)
            while True:
                while not events.empty():  # each write has all events that have come by then
                    batch.append(events.get_nowait())
                content, is_last = output.encode(batch)
                if content:
                    await response.write(content)
                if is_last:
                    return
                batch = [await events.get()]

        async with self._sampling(samples) as (jobs, events):
            try:
                first = await asyncio.wait_for(events.get(), deadline - _now())
            except asyncio.TimeoutError:
                raise Refused(503, f"took longer than {self.limits.seconds:g} s to begin", retry=1) from None
            self._check(first[1])
            try:
                await asyncio.wait_for(send([first], events), deadline - _now())
            except asyncio.TimeoutError:
                for job in jobs:
                    job.stopped = True
                error = output.error(f"took longer than {self.limits.seconds:g} s")
                try:
                    await asyncio.wait_for(response.write(error), _LAST_WORD_SECONDS)
                except (asyncio.TimeoutError, ConnectionError):  # the client does not read it
                    if request.transport is not None:
                        request.transport.abort()
            except ConnectionError:  # the client left, and a byte was written before the cancellation
                pass
        return response


class _Lines:
    """A sample as lines of JSON. Each has the bytes since the line before."""

    content_type = "application/x-ndjson"

    def __init__(self, sample: SampleRequest) -> None:
        self.head, self._sampled = _line({"seed": sample.seed, "bytes": sample.count}), 0  # bytes written

    def encode(self, events: list[Event]) -> tuple[bytes, bool]:
        """Encode events, and say whether the answer is complete."""
        lines, sampled = b"", b"".join(event.content for _, event in events if isinstance(event, Piece))
        if sampled:
            self._sampled += len(sampled)
            lines = _line({"base64": base64.b64encode(sampled).decode()})
        end = next((event for _, event in events if isinstance(event, End)), None)
        if end is not None:
            lines += self.error(end.problem) if end.problem else _line({"done": True, "sampled": self._sampled})
        return lines, end is not None

    def error(self, line: str) -> bytes:
        """Return the last line of an answer that breaks off."""
        return _line({"error": line, "sampled": self._sampled})


class _Chunks:
    """Completions as server-sent events in OpenAI's format."""

    content_type, head = "text/event-stream", b""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion

    def encode(self, events: list[Event]) -> tuple[bytes, bool]:
        """Encode events as a chunk of each choice with new text; say whether the answer is complete."""
        completion = self._completion
        for number, event in events:
            if isinstance(event, End) and event.problem:
                return self.error(event.problem), True
            completion.add(number, event)
        chunks = [_event(chunk) for chunk in completion.chunks()]
        if completion.done:
            chunks.append(b"data: [DONE]\n\n")
        return b"".join(chunks), completion.done

    def error(self, line: str) -> bytes:
        """Return the last event of an answer that breaks off."""
        return _event(openai_error(500, line))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _unknown(error: UnknownModelError) -> Refused:
    return Refused(404, str(error), param="model", code="model_not_found")
