"""Batches of contexts for training, in an order that does not depend on how many ranks or workers read them.

Letters: N positions a context, G contexts a global batch, W ranks.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.contexts import Cut, cut_contexts
from longstride.data_pipelines.order.damage import Substitution
from longstride.data_pipelines.order.lanes import Lanes, StreamState, shard_order
from longstride.data_pipelines.order.loading import Rows, load_rows, shared_out
from longstride.data_pipelines.order.shuffling import LanesReader
from longstride.data_pipelines.settings import ON_DAMAGE, SHUFFLE_BYTES, RemoteSettings
from longstride.data_pipelines.shards import DataFolder, open_folder


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's part of one step. What a row has beyond its length is padding, and not to be learned."""

    tokens: Tensor  # (G / W, N) uint8
    lengths: Tensor  # (G / W,) int64, bytes of each context, 1 to N
    sample_ids: Tensor  # (G / W,) int64: the contexts' numbers, see lanes.py
    state: StreamState  # after this batch: a stream that is given it begins with the next one
    substitutions: tuple[Substitution, ...] = ()  # contexts of this rank that stand in for damaged ones


def as_batch(rows: Rows, state: StreamState) -> Batch:
    """The rows as a batch; ``state`` is that after it."""
    return Batch(
        tokens=torch.from_numpy(rows.tokens),
        lengths=torch.from_numpy(rows.lengths),
        sample_ids=torch.from_numpy(rows.sample_ids),
        state=state,
        substitutions=rows.substitutions,
    )


def check_arguments(seed: int, shuffle_bytes: int, workers: int, prefetch: int) -> None:
    """Raises DataError for arguments of a stream that are out of range."""
    counts = (("shuffle_bytes", shuffle_bytes, 0), ("workers", workers, 0), ("prefetch", prefetch, 1))
    for name, value, least in counts:
        if value < least:
            raise DataError(f"{name}={value}: must be at least {least}")
    shard_order(0, seed, 0)  # refuses a seed that cannot be used


def stream_fingerprint(fingerprint: str, split: str, cutting: str, shuffle_bytes: int) -> str:
    """Of a stream's state: the data set's fingerprint bound to what else decides the meaning of a step."""
    return hashlib.sha256(f"{fingerprint}/{split}/{cutting}/{shuffle_bytes}".encode()).hexdigest()


class ByteStream:
    """An endless stream of one rank's batches; each ``iter()`` begins again at ``state``.

    ``location`` is a folder, a URL or an opened DataFolder. ``state`` (None: the beginning) may come from a run with
    other world size, workers or prefetch. Each lane is shuffled in blocks of ``shuffle_bytes`` at most, held in memory;
    0 reads it in sequence. With ``workers``, so many processes read ahead, each ``prefetch`` steps. Raises DataError
    for a folder, split, batch or state that does not fit, and, while it is iterated, for any damage that ``on_damage``
    does not allow: before the damaged sample is delivered.
    """

    def __init__(
        self,
        location: str | Path | DataFolder,
        split: str = "train",
        *,
        context: int,
        global_batch: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        cut: Cut | None = None,
        shuffle_bytes: int = SHUFFLE_BYTES,
        on_damage: str = "abort",
        workers: int = 0,
        prefetch: int = 2,
        remote: RemoteSettings | None = None,
        state: StreamState | None = None,
    ) -> None:
        check_arguments(seed, shuffle_bytes, workers, prefetch)
        if on_damage not in ON_DAMAGE:
            raise DataError(f"on_damage={on_damage!r}: must be one of {', '.join(ON_DAMAGE)}")
        self.contexts = cut_contexts(open_folder(location, remote).split(split), context, cut or Cut())
        self.lanes = Lanes(self.contexts.total_units, self.contexts.context_units, global_batch)
        self._own = self.lanes.of_rank(rank, world_size)
        self.contexts.split.reserve(len(self._own))
        self.seed = seed
        self.fingerprint = stream_fingerprint(
            self.contexts.split.manifest.fingerprint, split, self.contexts.identity, shuffle_bytes
        )
        self._block_contexts = max(1, shuffle_bytes // context)
        self._on_damage, self._workers, self._prefetch = on_damage, workers, prefetch
        self.state = self._state_at(0) if state is None else self._checked(state)

    def __iter__(self) -> Iterator[Batch]:
        first = self.lanes.batch_number(self.state.epoch, self.state.step)
        readers = [self._reader(own) for own in shared_out(self._own, self._workers)]
        if self._workers:
            self.contexts.split.store.close()  # a fork in the midst of a fetch could stand still in the child
        with closing(load_rows(readers, self.lanes, first, self._workers, self._prefetch)) as steps:
            for number, rows in enumerate(steps, start=first):
                yield as_batch(rows, self._state_at(number + 1))

    @property
    def properties(self) -> Mapping[str, int]:
        """What all documents have in common, such as a picture's height."""
        return self.contexts.split.manifest.properties

    def carried(self, epoch: int) -> str | None:
        """What an epoch reads first that earlier ones left, in words; None where they left nothing."""
        start = self.lanes.contexts_of(epoch).start * self.lanes.context_units
        left = epoch * self.lanes.total_units - start
        if not left:
            return None
        unit = "contexts" if self.lanes.context_units == 1 else "bytes"
        place = self.contexts.place(start, self.seed)
        return f"{left:,} {unit} are carried over into epoch {epoch}, from {place} on"

    def _reader(self, own: Sequence[int]) -> LanesReader:
        return LanesReader(self.contexts, self.lanes, self.seed, own, self._block_contexts, self._on_damage)

    def _state_at(self, batch: int) -> StreamState:
        epoch, step = self.lanes.position(batch)
        return StreamState(self.fingerprint, self.seed, epoch, step, self.lanes.global_batch)

    def _checked(self, state: StreamState) -> StreamState:
        state.check_belongs(self._state_at(0))
        steps = self.lanes.steps_in(state.epoch)
        if state.step >= steps:
            raise DataError(f"state.step={state.step}: epoch {state.epoch} has {steps} steps, counted from 0")
        return state
