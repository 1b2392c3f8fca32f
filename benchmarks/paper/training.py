"""One model of `benchmarks/paper/paper.py`: trained in turns with the others on the same bytes, then scored.

A plain loop in one process, without DeepSpeed: patterns are compared, eighteen starts of the engine would take longer
than some of the trainings, and turns by the step need all models in one process.
Letters: B contexts, N positions.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.peers import dense_attention
from benchmarks.learner import Learner
from benchmarks.machine import synchronize
from benchmarks.paper.cases import Case
from benchmarks.training.training_step import attention_replaced
from longstride.data_pipelines.order.evaluation import EvaluationBatch
from longstride.data_pipelines.order.stream import Batch

CURVE_POINTS = 20
BITS = 1 / math.log(2)  # a nat


class Contestant(Learner):
    """One model with one pattern: its weights, optimiser, losses and times."""

    def __init__(self, case: Case, pattern: str, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(case.model_config(pattern), case.train_config(seed), device, dtype)
        self.case, self.pattern, self.seed, self._device = case, pattern, seed, device
        self.parameters = sum(master.numel() for master in self.masters.values())
        self.initial_weights_crc32 = crc32_of(master.detach().cpu() for master in self.masters.values())
        self._nats: list[Tensor] = []  # of each step, where it was computed: reading one would wait for the device
        self._seconds: list[float] = []
        self.data_order_crc32 = 0
        self.bytes_trained = 0

    def take_step(self, batch: Batch) -> None:
        """Train on one batch, and record loss, seconds and a checksum of the data."""
        tokens = batch.tokens.to(self._device)
        synchronize(self._device)
        start = time.perf_counter()
        with self._attention():
            nats = self.step(tokens, self.steps)
        synchronize(self._device)
        self._seconds.append(time.perf_counter() - start)
        self._nats.append(nats.mean())  # training contexts are full
        self.bytes_trained += int(batch.lengths.sum())
        for tensor in (batch.sample_ids, batch.tokens):
            self.data_order_crc32 = zlib.crc32(tensor.numpy().tobytes(), self.data_order_crc32)

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return len(self._nats)

    def seconds_per_step(self) -> float:
        """Return the median."""
        return statistics.median(self._seconds)

    def training_bits(self) -> list[float]:
        """Return bits per byte of every step's batch, before the step."""
        return [nats * BITS for nats in torch.stack(self._nats).double().tolist()] if self._nats else []

    def score(self, batches: Iterable[EvaluationBatch]) -> tuple[float, int]:
        """Return bits per byte of held-out contexts, and their number of bytes."""
        nats, num_bytes = 0.0, 0
        for batch in batches:
            nats_of_rows = self._nats_of(batch.tokens)
            nats += nats_of_rows[torch.arange(nats_of_rows.shape[1]) < batch.lengths[:, None]].sum().item()
            num_bytes += int(batch.lengths.sum())
        return nats / num_bytes * BITS, num_bytes

    def score_at(self, text: Tensor, regions: Sequence[range], minimum: int) -> tuple[float, int]:
        """Return bits per byte of regions of a text (bytes,) uint8, where each byte sees at least ``minimum`` earlier
        ones.
        """
        places = [place for region in regions for place in windows(region, self.case.context, minimum)]
        nats, num_bytes = 0.0, 0
        for first in range(0, len(places), self.case.evaluation_batch):
            some = places[first : first + self.case.evaluation_batch]
            nats_of_rows = self._nats_of(torch.stack([text[start : start + self.case.context] for start, _ in some]))
            for row, (_, scored) in zip(nats_of_rows, some, strict=True):
                nats += row[scored.start : scored.stop].sum().item()
                num_bytes += len(scored)
        return nats / num_bytes * BITS, num_bytes

    def _nats_of(self, tokens: Tensor) -> Tensor:
        """Compute (B, N) fp64 on the CPU from (B, N) uint8."""
        with torch.no_grad(), self._attention():
            return self.network(tokens.to(self._device), return_nats=True).double().cpu()

    def _attention(self) -> contextlib.AbstractContextManager[Any]:
        """Use torch's dense attention for the dense pattern: it is faster than ours and computes the same."""
        dense = dense_attention() if self.pattern == "dense" else None
        return attention_replaced(dense and (lambda q, k, v, patterns, backend: dense(q, k, v)))


def train_in_turns(learners: Sequence[Contestant], batches: Iterator[Batch], say: Callable[[str], None]) -> None:
    """Make every learner take every step on the same batch before the next one; the first learner changes by step."""
    case = learners[0].case
    for step, batch in zip(range(case.steps), batches, strict=False):
        assert bool((batch.lengths == case.context).all())  # the mean over a batch is the mean over its bytes
        turn = step % len(learners)
        for learner in (*learners[turn:], *learners[:turn]):
            learner.take_step(batch)
        if (step + 1) % max(1, case.steps // 4) == 0:
            now = ", ".join(f"{learner.pattern} {learner.training_bits()[-1]:.3f}" for learner in learners)
            say(f"step {step + 1} of {case.steps}, training bits per byte: {now}")


def windows(region: range, context: int, minimum: int) -> Iterator[tuple[int, range]]:
    """Yield contexts that score each byte of a region once, after at least ``minimum`` others: (begin, rows scored)."""
    for first in range(region.start, region.stop, context - minimum):
        count = min(context - minimum, region.stop - first)
        yield first - minimum, range(minimum, minimum + count)


def spread_regions(num_bytes: int, count: int, context: int) -> list[range]:
    """Return evenly spread regions of 2N bytes, with N bytes before and after each."""
    room = num_bytes - 4 * context
    assert room >= 0 and count > 1
    starts = (context + place * room // (count - 1) for place in range(count))
    return [range(start, start + 2 * context) for start in starts]


def curve(bits: Sequence[float]) -> list[tuple[int, float]]:
    """Return a few points of a run's steps: (step, mean since the previous point)."""
    size = -(-len(bits) // CURVE_POINTS)
    parts = [bits[first : first + size] for first in range(0, len(bits), size)]
    return [(min(size * (number + 1), len(bits)), statistics.fmean(part)) for number, part in enumerate(parts)]


def crc32_of(tensors: Iterable[Tensor]) -> int:
    """Compute the CRC-32 of fp32 tensors on the CPU."""
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.contiguous().numpy().tobytes(), checksum)
    return checksum
