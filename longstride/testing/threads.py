"""Simulate sequence-parallel processes by threads that exchange tensors in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from longstride.sparse_model import Division

Result = TypeVar("Result")
WAIT_SECONDS = 60.0  # for other threads, before one gives up


class ThreadDivision(Division):
    """The division of a thread. It counts its exchanges and the bytes that it sends."""

    def __init__(self, rank: int, hands: list[Any], barrier: threading.Barrier, exchange: Any) -> None:
        super().__init__(rank, len(hands), exchange=exchange)
        self._hands, self._barrier = hands, barrier
        self.calls = self.sent_bytes = 0

    def swap(self, values: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Exchange parts with the other threads, as over a network."""
        parts = values.detach().clone().split(sent or 1)
        self.calls += 1
        self.sent_bytes += sum(part.nbytes for place, part in enumerate(parts) if place != self.rank)
        self._hands[self.rank] = parts
        self._barrier.wait(WAIT_SECONDS)
        got = [parts[self.rank] for parts in self._hands]
        self._barrier.wait(WAIT_SECONDS)
        assert [len(part) for part in got] == (received or [1] * self.size)
        return torch.cat(got)


def in_sections(size: int, work: Callable[[ThreadDivision], Result], exchange: str = "auto") -> list[Result]:
    """Run ``work`` in so many threads, and return the results in the order of ranks."""
    hands, barrier = [None] * size, threading.Barrier(size)

    def at(rank: int) -> Result:
        try:
            return work(ThreadDivision(rank, hands, barrier, exchange))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(at, rank) for rank in range(size)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
