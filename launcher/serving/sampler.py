"""One thread that samples, request after request, and the bounded queue of those that wait for it."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from longstride.launcher.serving.request import SampleRequest
from longstride.sparse_model import SparseTransformer, generate


class Busy(Exception):  # noqa: N818 - a state, not a mistake
    """No more requests may wait; ``seconds`` is when to ask again."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"asked for too much at once; try again in {seconds:.0f} s")
        self.seconds = seconds


@dataclass(eq=False)
class Job:
    """One request on its way: ``deliver`` is called from the sampling thread with each byte, then with an End."""

    request: SampleRequest
    deliver: Callable[[bytes | End], None]
    stopped: bool = False  # nobody wants the rest: sampling ends before its next byte


@dataclass(frozen=True)
class End:
    """After the last byte; ``problem`` says why there are no more, where the sample is incomplete."""

    problem: str | None = None


class Sampler:
    """Samples in a thread of its own: torch lets other threads run while it computes."""

    def __init__(self, model: SparseTransformer, device: str, waiting: int) -> None:
        """Not yet started.

        Args:
            model: in evaluation mode, on the device.
            device: where random numbers are drawn too.
            waiting: requests that may wait while one is sampled.
        """
        self._model, self._device, self._most = model, device, waiting
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._current: Job | None = None
        self.closed = False  # whether it ends
        self._last_seconds = 1.0  # that a sample took
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)

    def start(self) -> None:
        """From now on requests are answered."""
        self._thread.start()

    def close(self, seconds: float) -> bool:
        """Ends what is under way, and whatever waits; whether the thread ended within that time."""
        with self._changed:
            self.closed = True
            jobs = [*self._queue, *([self._current] if self._current else [])]
            self._queue.clear()
            self._changed.notify_all()
        for job in jobs:
            job.stopped = True
            job.deliver(End("the server is stopping"))
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def sampling(self) -> bool:
        """Whether a request is being sampled."""
        return self._current is not None

    def submit(self, job: Job) -> None:
        """Puts a request in the queue. Raises Busy where it is full."""
        with self._changed:
            ahead = len(self._queue) + (self._current is not None)
            if self.closed or ahead > self._most:
                raise Busy(min(60.0, max(1.0, self._last_seconds * ahead)))
            self._queue.append(job)
            self._changed.notify_all()

    def drop(self, job: Job) -> None:
        """Forgets a request that nobody waits for: in the queue, or while it is sampled."""
        job.stopped = True
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._current = None
                self._changed.wait_for(lambda: self._queue or self.closed)
                if self.closed:
                    return
                job = self._current = self._queue.popleft()
            begun = time.monotonic()
            try:
                self._sample(job)
            except FloatingPointError as error:
                job.deliver(End(f"the model computes {error}"))
            except Exception as error:  # out of memory, a lost GPU: the next request may go well
                traceback.print_exc(file=sys.stderr)
                job.deliver(End(f"sampling failed: {type(error).__name__}"))
            self._last_seconds = time.monotonic() - begun

    def _sample(self, job: Job) -> None:
        request = job.request
        sampled = generate(
            self._model,
            torch.tensor([list(request.prompt)], dtype=torch.int64, device=self._device),
            request.count,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            generator=torch.Generator(self._device).manual_seed(request.seed),
        )
        for token in sampled:
            if job.stopped:
                return
            job.deliver(bytes([int(token)]))
        job.deliver(End())
