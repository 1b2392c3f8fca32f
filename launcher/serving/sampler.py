"""Sample many contexts in one thread, and queue the requests that wait for it.

Letters: B contexts of a batch, N bytes of a prompt, V vocabulary.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from longstride.launcher.generation import nats_by_piece
from longstride.launcher.serving.metrics import Metrics
from longstride.launcher.serving.request import SampleRequest, ScoreRequest
from longstride.sparse_model import Session, SparseTransformer, generate

_GATHERING_SECONDS = 0.005  # for further requests to arrive and share a batch, if nothing is being sampled
_ROWS_AT_ONCE = 1 << 12  # of a prompt, for log-probabilities in fp64
_NO_NUMBERS = "logits are not finite"


class Busy(Exception):  # noqa: N818 - a state, not a mistake
    """The queue is full; another attempt may succeed after ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"asked for too much at once; try again in {seconds:.0f} s")
        self.seconds = seconds


class Score(NamedTuple):
    """The log-probability of a byte by the model alone, before temperature and other settings."""

    logprob: float  # nats
    top: dict[int, float]  # of the most likely bytes and this one


class Piece(NamedTuple):
    """Bytes of a context, and their scores if requested. Sampled bytes come one at a time."""

    content: bytes
    scores: Sequence[Score | None]
    is_prompt: bool = False  # echoed


@dataclass(frozen=True)
class End:
    """The end of a context."""

    problem: str | None = None  # why the sample is incomplete
    stopped: int = 0  # the length of the stop at its end; 0 without one


@dataclass(eq=False)
class Job:
    """A context to sample, or a text to score.

    ``deliver`` is called from the sampling thread with each piece, then with an End.
    """

    request: SampleRequest | ScoreRequest
    deliver: Callable[[Piece | End], None]
    stopped: bool = False  # nobody needs more: sampling ends before its next byte
    sampled: bytearray = field(default_factory=bytearray)
    start_time: float = field(default_factory=time.monotonic)

    @property
    def sample(self) -> SampleRequest:
        """The request of a context to sample."""
        assert isinstance(self.request, SampleRequest)
        return self.request

    @property
    def shape(self) -> tuple[object, ...]:
        """A key that is equal for contexts that can share a batch."""
        request = self.request
        if isinstance(request, ScoreRequest):
            return (id(self),)  # computed alone
        return len(request.prompt), request.count, request.temperature, request.top_k, request.top_p

    def end(self, end: End) -> None:
        """Deliver an end, unless one has been delivered."""
        if not self.stopped:
            self.stopped = True
            self.deliver(end)


class Sampler:
    """Samples in a separate thread; torch lets other threads run while it computes.

    Contexts of one request that begin together are a group; with ``shared``, those of equal shape from all waiting
    requests. Groups take turns, byte by byte.

    Args:
        model: in evaluation mode, on the device.
        device: random numbers are drawn there too.
        waiting: the most requests in the queue while the most contexts are sampled.
        contexts: the most contexts to sample at once.
        shared: whether contexts of a group share products. It is faster, but a context's last bits depend on the
            others.
    """

    def __init__(
        self, model: SparseTransformer, device: str, waiting: int, contexts: int, shared: bool = False
    ) -> None:
        self._model, self._device, self._most, self._contexts = model, device, waiting, contexts
        self._shared = shared
        self.metrics = Metrics()
        self._changed = threading.Condition()
        self._queue: deque[list[Job]] = deque()  # the waiting contexts of each request
        self._running: list[Job] = []
        self.closed = False
        self._last_seconds = 1.0  # duration of the last group
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, seconds: float) -> bool:
        """End all running and waiting contexts; return whether the thread ended within so many seconds."""
        with self._changed:
            self.closed = True
            jobs = [*self._running, *(job for waiting in self._queue for job in waiting)]
            self._queue.clear()
            self._changed.notify_all()
        for job in jobs:
            job.end(End("the server is stopping"))
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def contexts(self) -> int:
        """Contexts that are being sampled."""
        return len(self._running)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Put the contexts of a request in the queue. Raises Busy if it is full."""
        with self._changed:
            room = max(0, self._contexts - len(self._running))
            if self.closed or len(self._queue) >= self._most + room:
                ahead = len(self._queue) + bool(self._running)
                raise Busy(min(60.0, max(1.0, self._last_seconds * ahead)))
            self._queue.append(list(jobs))
            self._changed.notify_all()

    def drop(self, jobs: Sequence[Job]) -> None:
        """Stop contexts that nobody waits for, in the queue or while they are sampled."""
        for job in jobs:
            job.stopped = True
        with self._changed:
            remaining = ([job for job in queued if not job.stopped] for queued in self._queue)
            self._queue = deque(filter(None, remaining))

    def _work(self) -> None:
        """Sample until the sampler is closed."""
        groups: list[_Group] = []
        while True:
            with self._changed:
                self._running = [job for group in groups for job in group.jobs]
                if not groups:
                    self._changed.wait_for(lambda: self._queue or self.closed)
                    if self._shared:
                        self._changed.wait_for(lambda: self.closed, _GATHERING_SECONDS)
                if self.closed:
                    return
                # The contexts for which there is room: of the first request, or of that one's shape.
                taken: list[Job] = []
                if self._queue and (room := self._contexts - len(self._running)) > 0:
                    first = self._queue[0]
                    if self._shared:
                        first = [job for jobs in self._queue for job in jobs if job.shape == first[0].shape]
                    taken = first[:room]
                    remaining = ([job for job in jobs if job not in taken] for jobs in self._queue)
                    self._queue = deque(filter(None, remaining))
                self._running += taken
            start = time.monotonic()
            if taken and isinstance(taken[0].request, ScoreRequest):
                groups.append(_Group(taken, score_text(self._model, taken[0], self.metrics)))
            elif taken:
                steps = sample(self._model, self._device, taken, self.metrics, self._shared)
                groups.append(_Group(taken, steps))
            groups = [group for group in groups if self._advance(group)]
            self.metrics.sampling_seconds += time.monotonic() - start

    def _advance(self, group: _Group) -> bool:
        """Compute one more byte of each context of a group, or one more piece of a text; return whether it goes on."""
        try:
            next(group.steps)
            group.jobs = [job for job in group.jobs if not job.stopped]
            return True
        except StopIteration:
            end = End()
        except FloatingPointError as error:
            end = End(f"the model's {error}")
        except Exception as error:  # out of memory, a lost GPU: the next request may succeed
            traceback.print_exc(file=sys.stderr)
            end = End(f"sampling failed: {type(error).__name__}")
        for job in group.jobs:
            job.end(end)
        self._last_seconds = time.monotonic() - group.start_time
        return False


@dataclass(eq=False)
class _Group:
    """Contexts that begin together and advance together; ``steps`` computes a byte of each at a time."""

    jobs: list[Job]
    steps: Iterator[object]
    start_time: float = field(default_factory=time.monotonic)


def score_text(model: SparseTransformer, job: Job, metrics: Metrics) -> Iterator[None]:
    """Score a text in the pieces of ``nats_by_piece``, and yield after each."""
    assert isinstance(job.request, ScoreRequest)
    text = job.request.content
    metrics.prompt_bytes += len(text)
    for nats in nats_by_piece(model, text, job.request.min_context):
        if not all(map(math.isfinite, nats)):
            raise FloatingPointError(_NO_NUMBERS)
        piece, text = text[: len(nats)], text[len(nats) :]
        job.deliver(Piece(piece, [Score(-nat, {}) for nat in nats], is_prompt=True))
        yield
        if job.stopped:
            return


def sample(
    model: SparseTransformer, device: str, jobs: Sequence[Job], metrics: Metrics, shared: bool
) -> Iterator[None]:
    """Sample contexts, and yield after each byte of all. Prompts are computed once, and first delivered if requested.

    Each context is a separate batch, so its bytes do not depend on others. With ``shared``, all are one batch.
    """
    scores: dict[tuple[bytes, int | None], list[Score | None]] = {}
    for job in jobs:
        request = job.sample
        metrics.prompt_bytes += len(request.prompt)
        if request.echo:
            key = request.prompt, request.logprobs
            if key not in scores:
                scores[key] = _prompt_scores(model, device, *key)
            job.deliver(Piece(request.prompt, scores[key], is_prompt=True))
    if not (count := jobs[0].sample.count):
        return
    batches: list[Iterator[bool]] = []
    if shared:
        prompts = list(dict.fromkeys(job.sample.prompt for job in jobs))
        session, order = _prefill(model, device, prompts, count), [prompts.index(job.sample.prompt) for job in jobs]
        if order != list(range(len(prompts))):
            session = session.selected(torch.tensor(order, device=device))
        batches.append(_sample_batch(jobs, session, device, metrics))
    sessions: dict[bytes, Session] = {}
    for job in () if shared else jobs:
        prompt = job.sample.prompt
        if prompt in sessions:  # begins as a copy
            session = sessions[prompt].selected(torch.tensor([0], device=device))
        else:
            session = sessions[prompt] = _prefill(model, device, [prompt], count)
        batches.append(_sample_batch([job], session, device, metrics))
    while batches := [batch for batch in batches if next(batch, False)]:
        yield


def _prefill(model: SparseTransformer, device: str, prompts: list[bytes], count: int) -> Session:
    """Create a session with these prompts, which have one length, and room for ``count`` bytes after them."""
    tokens = torch.tensor([list(prompt) for prompt in prompts], dtype=torch.int64, device=device)
    length = tokens.shape[1] + count
    slides = length > model.config.context
    session = Session(model, len(prompts), None if slides else length, back=0)
    session.read(tokens) if slides else session.prefill(tokens)
    return session


def _prompt_scores(model: SparseTransformer, device: str, prompt: bytes, most: int | None) -> list[Score | None]:
    """Score every byte of a prompt, including the first, which the start token predicts."""
    if most is None or not prompt:
        return [None] * len(prompt)
    scores: list[Score | None] = []
    start = model.embedding.start
    carried = model.new_carried(1, start.device, start.dtype) if model.config.carries else ()
    for tokens in torch.tensor([list(prompt)], device=device).split(model.config.context, 1):
        with torch.inference_mode():
            output = model(tokens, return_extras=True, carried=carried)
        carried = output.carried
        for rows, targets in zip(output.rows[0].split(_ROWS_AT_ONCE), tokens[0].split(_ROWS_AT_ONCE), strict=True):
            if not bool(rows.isfinite().all()):
                raise FloatingPointError(_NO_NUMBERS)
            logprobs = rows.double().log_softmax(-1).cpu()
            scores += [score_byte(row, token, most) for row, token in zip(logprobs, targets.tolist(), strict=True)]
    return scores


def _sample_batch(jobs: Sequence[Job], session: Session, device: str, metrics: Metrics) -> Iterator[bool]:
    """Sample contexts of equal shape whose next bytes are computed together, and yield True after each byte.

    ``session`` has their prompts.
    """
    request = jobs[0].sample
    logprobs: dict[int, Tensor] = {}  # of contexts that need scores, by row: (V,)
    tokens = generate(
        session.model,
        torch.tensor([list(job.sample.prompt) for job in jobs], dtype=torch.int64, device=device),
        request.count,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        generator=[torch.Generator(device).manual_seed(job.sample.seed) for job in jobs],
        adjust=lambda logits: _adjust(logits, jobs, logprobs),
        session=session,
        slide=True,
    )
    rows = None  # all
    while jobs:
        try:
            sampled = tokens.send(rows).tolist()
        except StopIteration:
            return
        for row, (job, token) in enumerate(zip(jobs, sampled, strict=True)):
            if job.stopped:
                continue
            request = job.sample
            if not job.sampled:
                metrics.first_byte_seconds.add(time.monotonic() - job.start_time)
            metrics.sampled_bytes += 1
            job.sampled.append(token)
            score = None if request.logprobs is None else score_byte(logprobs[row], token, request.logprobs)
            job.deliver(Piece(bytes([token]), [score]))
            if reached := [len(stop) for stop in request.stop if job.sampled.endswith(stop)]:
                job.end(End(stopped=max(reached)))
        yield True
        rows = None
        if any(job.stopped for job in jobs):
            rows = [row for row, job in enumerate(jobs) if not job.stopped]
            jobs = [jobs[row] for row in rows]


def _adjust(logits: Tensor, jobs: Sequence[Job], logprobs: dict[int, Tensor]) -> Tensor:
    """Apply each request's biases and penalties to logits (B, V), and store requested log-probabilities by row."""
    adjusted = None
    for row, (job, total) in enumerate(zip(jobs, logits.sum(-1).tolist(), strict=True)):
        request = job.sample
        if not math.isfinite(total):
            job.end(End(f"the model's {_NO_NUMBERS}"))
            adjusted = logits.clone() if adjusted is None else adjusted
            adjusted[row] = 0.0  # so that the other rows go on
        if job.stopped:
            continue
        if request.logprobs is not None:
            logprobs[row] = logits[row].double().log_softmax(-1).cpu()
        if request.bias or request.presence_penalty or request.frequency_penalty:
            adjusted = logits.clone() if adjusted is None else adjusted
            counts = torch.bincount(torch.tensor(list(job.sampled), dtype=torch.int64), minlength=logits.shape[1])
            change = -request.frequency_penalty * counts - request.presence_penalty * (counts > 0)
            for token, bias in request.bias:
                change[token] += bias
            adjusted[row] += change.to(adjusted)
    return logits if adjusted is None else adjusted


def score_byte(logprobs: Tensor, token: int, most: int) -> Score:
    """Score a byte from the log-probabilities (V,) of its position, with the ``most`` likely bytes."""
    values, tokens = logprobs.topk(min(most, len(logprobs)))
    logprob = float(logprobs[token])
    return Score(logprob, dict(zip(tokens.tolist(), values.tolist(), strict=True)) | {token: logprob})
