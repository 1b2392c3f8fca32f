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
from data_pipelines.lanes import Lanes, StreamState, block_order, shard_order
from data_pipelines.reading import SplitReader

SHUFFLE_BYTES = 2**20  # of a lane's block: some dozens of source files


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's part of one step."""

    tokens: Tensor  # (G / W, N) int64, bytes 0..255
    sample_ids: Tensor  # (G / W,) int64: the contexts' numbers, see lanes.py
    state: StreamState  # after this batch: a stream that is given it begins with the next one


def stream_fingerprint(fingerprint: str, split: str, context: int, shuffle_bytes: int) -> str:
    """Of a stream's state: the data set's fingerprint bound to what else decides the meaning of a step."""
    return hashlib.sha256(f"{fingerprint}/{split}/{context}/{shuffle_bytes}".encode()).hexdigest()


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


class ShuffledLane:
    """The contexts of one lane in one epoch: block after block is read in sequence and given out in its own order."""

    def __init__(
        self, reader: SplitReader, lanes: Lanes, seed: int, epoch: int, lane: int, first_step: int, block_contexts: int
    ) -> None:
        self._seed, self._epoch, self._lane = seed, epoch, lane
        self._size = block_contexts
        self._steps = lanes.steps_in(epoch)
        self._first_id = lanes.context_id(epoch, 0, lane)
        start = self._first_id + first_step // block_contexts * block_contexts
        end = self._first_id + self._steps
        self._cursor = ByteCursor(reader.read(start * lanes.context, end * lanes.context, seed))
        self._rows = np.empty((min(block_contexts, self._steps), lanes.context), dtype=np.uint8)
        self._order = np.empty(0, dtype=np.int64)
        self._block = -1

    def take(self, step: int, row: np.ndarray) -> int:
        """Write the context of a step into ``row``, steps ascending; return its number."""
        block, place = divmod(step, self._size)
        if block != self._block:
            self._load(block)
        chosen = int(self._order[place])
        row[:] = self._rows[chosen]
        return self._first_id + block * self._size + chosen

    def _load(self, block: int) -> None:
        count = min(self._size, self._steps - block * self._size)
        for row in self._rows[:count]:
            self._cursor.fill(row)
        self._order = block_order(count, self._seed, self._epoch, self._lane, block)
        self._block = block


class ByteStream:
    """An endless stream of one rank's batches; each ``iter()`` begins again at ``state``.

    ``state`` (None: the beginning) may come from a run with another world size. Each lane is shuffled in blocks of
    ``shuffle_bytes`` at most, held in memory; 0 reads it in sequence. Raises DataError for a folder, split, batch or
    state that does not fit, and, while it is iterated, for any damage: before the damaged sample is delivered.
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
        shuffle_bytes: int = SHUFFLE_BYTES,
        state: StreamState | None = None,
    ) -> None:
        if shuffle_bytes < 0:
            raise DataError(f"shuffle_bytes={shuffle_bytes}: must be at least 0, which reads in sequence")
        self._reader = SplitReader(folder, split)
        self.lanes = Lanes(self._reader.total_bytes, context, global_batch)
        self._own = self.lanes.of_rank(rank, world_size)
        self.seed = seed
        shard_order(0, seed, 0)  # refuses a seed that cannot be used
        self.fingerprint = stream_fingerprint(self._reader.manifest.fingerprint, split, context, shuffle_bytes)
        self._block_contexts = max(1, shuffle_bytes // context)
        self.state = self._state_at(0) if state is None else self._checked(state)

    def __iter__(self) -> Iterator[Batch]:
        batch = self.lanes.batch_number(self.state.epoch, self.state.step)
        while True:
            epoch, step = self.lanes.position(batch)
            yield from self._rest_of_epoch(epoch, step)
            batch = self.lanes.batches_before(epoch + 1)

    def _rest_of_epoch(self, epoch: int, first_step: int) -> Iterator[Batch]:
        lanes = [
            ShuffledLane(self._reader, self.lanes, self.seed, epoch, lane, first_step, self._block_contexts)
            for lane in self._own
        ]
        for step in range(first_step, self.lanes.steps_in(epoch)):
            tokens = np.empty((len(lanes), self.lanes.context), dtype=np.int64)
            ids = [lane.take(step, row) for lane, row in zip(lanes, tokens, strict=True)]
            state = self._state_at(self.lanes.batch_number(epoch, step) + 1)
            yield Batch(torch.from_numpy(tokens), torch.tensor(ids, dtype=torch.int64), state)

    def _state_at(self, batch: int) -> StreamState:
        epoch, step = self.lanes.position(batch)
        return StreamState(self.fingerprint, self.seed, epoch, step, self.lanes.global_batch)

    def _checked(self, state: StreamState) -> StreamState:
        for name, own, rule in (
            (
                "fingerprint",
                self.fingerprint,
                "the state belongs to another data set, split, context length or shuffle",
            ),
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
