"""Batches of contexts for training, in an order that does not depend on how many ranks read them.

Letters: N bytes a context, G contexts a global batch, W ranks.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data_pipelines.errors import DataError
from data_pipelines.lanes import Lanes, StreamState, shard_order
from data_pipelines.reading import SplitReader


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's part of one step."""

    tokens: Tensor  # (G / W, N) int64, bytes 0..255
    sample_ids: Tensor  # (G / W,) int64: the contexts' numbers, see lanes.py
    state: StreamState  # after this batch: a stream that is given it begins with the next one


def stream_fingerprint(fingerprint: str, split: str, context: int) -> str:
    """Of a stream's state: the data set's fingerprint bound to what else decides the meaning of a step."""
    return hashlib.sha256(f"{fingerprint}/{split}/{context}".encode()).hexdigest()


class ByteCursor:
    """Fills rows from an iterator over arrays of bytes."""

    def __init__(self, pieces: Iterator[np.ndarray]) -> None:
        self._pieces = pieces
        self._piece = np.empty(0, dtype=np.uint8)
        self._used = 0

    def fill(self, row: np.ndarray) -> None:
        """Write the next ``len(row)`` bytes into ``row``. Raises StopIteration where there are fewer."""
        filled = 0
        while filled < len(row):
            if self._used == len(self._piece):
                self._piece, self._used = next(self._pieces), 0
            size = min(len(row) - filled, len(self._piece) - self._used)
            row[filled : filled + size] = self._piece[self._used : self._used + size]
            filled += size
            self._used += size


class ByteStream:
    """An endless stream of one rank's batches; each ``iter()`` begins again at ``state``.

    ``state`` (None: the beginning) may come from a run with another world size. Raises DataError for a folder, split,
    batch or state that does not fit, and, while it is iterated, for any damage: before the damaged sample is delivered.
    """

    def __init__(
        self,
        folder: Path,
        split: str = "train",
        *,
        context: int,
        global_batch: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        state: StreamState | None = None,
    ) -> None:
        self._reader = SplitReader(folder, split)
        self.lanes = Lanes(self._reader.total_bytes, context, global_batch)
        self._own = self.lanes.of_rank(rank, world_size)
        self.seed = seed
        shard_order(0, seed, 0)  # refuses a seed that cannot be used
        self.fingerprint = stream_fingerprint(self._reader.manifest.fingerprint, split, context)
        self.state = self._state_at(0) if state is None else self._checked(state)

    def __iter__(self) -> Iterator[Batch]:
        batch = self.lanes.batch_number(self.state.epoch, self.state.step)
        while True:
            epoch, step = self.lanes.position(batch)
            yield from self._rest_of_epoch(epoch, step)
            batch = self.lanes.batches_before(epoch + 1)

    def _rest_of_epoch(self, epoch: int, first_step: int) -> Iterator[Batch]:
        context, steps = self.lanes.context, self.lanes.steps_in(epoch)
        cursors = []
        for lane in self._own:
            start = self.lanes.context_id(epoch, first_step, lane) * context
            end = self.lanes.context_id(epoch, steps, lane) * context
            cursors.append(ByteCursor(self._reader.read(start, end, self.seed)))
        first_ids = torch.tensor([self.lanes.context_id(epoch, 0, lane) for lane in self._own], dtype=torch.int64)
        for step in range(first_step, steps):
            tokens = np.empty((len(cursors), context), dtype=np.int64)
            for cursor, row in zip(cursors, tokens, strict=True):
                cursor.fill(row)
            state = self._state_at(self.lanes.batch_number(epoch, step) + 1)
            yield Batch(torch.from_numpy(tokens), first_ids + step, state)

    def _state_at(self, batch: int) -> StreamState:
        epoch, step = self.lanes.position(batch)
        return StreamState(self.fingerprint, self.seed, epoch, step, self.lanes.global_batch)

    def _checked(self, state: StreamState) -> StreamState:
        for name, own, rule in (
            ("fingerprint", self.fingerprint, "the state belongs to another data set, split or context length"),
            ("seed", self.seed, "the state belongs to another order of the data"),
            ("global_batch", self.lanes.global_batch, "the state counts steps of another size"),
        ):
            found = getattr(state, name)
            if found != own:
                raise DataError(f"state.{name}={found!r}: this stream's is {own!r}: {rule}; resume with the run's own")
        steps = self.lanes.steps_in(state.epoch)
        if state.step >= steps:
            raise DataError(f"state.step={state.step}: epoch {state.epoch} has {steps} steps, counted from 0")
        return state
