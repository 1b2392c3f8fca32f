"""Batches of contexts for training, in an order that does not depend on the number of ranks or workers.

Letters: N positions of a context, G contexts of a global batch, W data ranks (groups of ranks that
share contexts), L lanes of a reader, S contexts of a loaded block.

Each block of a lane has its own order. Workers divide the lanes, not the steps: one process reads each lane in
sequence, and every step takes a share from each worker. So the contexts are the same for any number of workers.

A context that cannot be read ends the run, or is substituted by another context of the epoch. The substitute only
depends on (seed, epoch, context), so it is the same for any number of ranks and workers. Ranks that share a context
each read and verify all of it, so all of them notice damage.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, fields, replace
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.order.contexts import Contexts, Cut, cut_contexts, settle_cut
from longstride.data_pipelines.order.lanes import Lanes, StreamState, block_order, shard_order, substitutes
from longstride.data_pipelines.order.workers import Workers
from longstride.data_pipelines.settings import ON_DAMAGE, REPAIR, SHUFFLE_BYTES, RemoteSettings
from longstride.data_pipelines.shards import DataFolder, SampleReader


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Settings of a stream. Raises DataError for a value out of range."""

    context: int  # N
    global_batch: int  # G, contexts per step over all ranks
    seed: int = 0  # of the order
    rank: int = 0  # data rank
    world_size: int = 1  # W
    cut: Cut = Cut()  # noqa: RUF009 - frozen
    shuffle_bytes: int = SHUFFLE_BYTES  # size of the blocks in which lanes are shuffled; 0: read in sequence
    shuffle_shards: bool = True  # whether each epoch has an order of the shards of its own; otherwise the manifest's
    on_damage: str = "abort"
    workers: int = 0  # processes that prefetch
    prefetch: int = 2  # steps that each worker reads ahead
    worker_timeout_seconds: float = 900.0  # longest wait for a worker that sends nothing

    def __post_init__(self) -> None:
        for name, least in (("shuffle_bytes", 0), ("workers", 0), ("prefetch", 1)):
            if getattr(self, name) < least:
                raise DataError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not 0 < self.worker_timeout_seconds < float("inf"):
            rule = "must be a positive number, such as 900"
            raise DataError(f"worker_timeout_seconds={self.worker_timeout_seconds!r}: {rule}")
        shard_order(0, self.seed, 0)  # raises for an invalid seed
        if self.on_damage not in ON_DAMAGE:
            raise DataError(f"on_damage={self.on_damage!r}: must be one of {', '.join(ON_DAMAGE)}")

    @property
    def block_contexts(self) -> int:
        """Contexts of a shuffle block; 1 disables shuffling."""
        return max(1, self.shuffle_bytes // self.context)


@dataclass(frozen=True, slots=True)
class Substitution:
    """A context that replaces a damaged one."""

    context: int  # number of the substitute
    damaged: int  # number of the damaged context
    damage: str  # description that names shard and sample

    def __str__(self) -> str:
        return f"context {self.context} stands in for {self.damaged}: {self.damage}"


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's part of one step. Positions of a row beyond its length are padding."""

    tokens: Tensor  # (G / W, N) uint8; int16 or int32 for a palette of more than 256 colours
    lengths: Tensor  # (G / W,) int64, positions of each context, 1 to N
    sample_ids: Tensor  # (G / W,) int64: the contexts' numbers, see lanes.py
    state: StreamState  # after this batch: a stream with this state begins with the next batch
    substitutions: tuple[Substitution, ...] = ()  # of contexts of this rank
    begins: Tensor | None = None  # (G / W, N) bool, True where a document begins; None: documents are not kept apart
    separators: Tensor | None = None  # (G / W,) int64, separators of each context; None: there are none
    inputs: Tensor | None = None  # (G / W, N) int32, what a model reads in place of the tokens; None: the tokens
    # (G / W, N) bool, True where a token is predicted, or int32, its number in their order, from 1; None: all are
    predicted: Tensor | None = None
    labels: Tensor | None = None  # (G / W, 1) int64, the class of each context's document; None: nothing asks for it
    # (G / W,) bool, whether a row continues the text of the context numbered 1 less; None: lanes are shuffled
    goes_on: Tensor | None = None

    @property
    def content(self) -> Tensor:
        """Positions of each context that are data, not separators or padding, (G / W,) int64."""
        return self.lengths if self.separators is None else self.lengths - self.separators

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as arrays: torch would send each tensor by a file descriptor.
        values = (getattr(self, field.name) for field in fields(self))
        return _batch_of_arrays, tuple(value.numpy() if isinstance(value, Tensor) else value for value in values)


def _batch_of_arrays(*values: Any) -> Batch:
    arguments: list[Any] = [torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in values]
    return Batch(*arguments)


def join_batches(parts: Sequence[Batch]) -> Batch:
    """Join the workers' parts of a step, or several batches in their order."""
    # Not torch.cat: its threads would compete for the cores with the workers.
    first = parts[0]
    tensors: dict[str, Any] = {
        field.name: torch.from_numpy(np.concatenate([getattr(part, field.name).numpy() for part in parts]))
        for field in fields(first)
        if isinstance(getattr(first, field.name), Tensor)
    }
    substitutions = tuple(chain.from_iterable(part.substitutions for part in parts))
    return replace(first, **tensors, state=parts[-1].state, substitutions=substitutions)


class LanesReader:
    """Reads blocks of several lanes in lockstep. Steps are taken in ascending order."""

    def __init__(
        self, contexts: Contexts, lanes: Lanes, numbers: Sequence[int], settings: StreamSettings, fingerprint: str
    ) -> None:
        self._contexts, self._lanes, self._numbers = contexts, lanes, numbers  # of the lanes that are read
        self._seed, self._on_damage, self._fingerprint = settings.seed, settings.on_damage, fingerprint
        # Without a shuffle, many contexts are read at once, in sequence.
        self._shuffled = settings.block_contexts > 1
        in_sequence = max(1, SampleReader.READ_BYTES // contexts.context)
        self._size = settings.block_contexts if self._shuffled else in_sequence  # S
        self._readers = [SampleReader(contexts.split) for _ in numbers]
        self._tokens = np.empty((len(numbers), 0, contexts.context), dtype=contexts.dtype)  # (L, S, N)
        self._loaded: tuple[int, int] | None = None  # epoch and block

    def take(self, number: int) -> Batch:
        """Return the lanes' part of global batch ``number``. Raises DataError for damage."""
        epoch, step = self._lanes.position(number)
        block, place = divmod(step, self._size)
        if (epoch, block) != self._loaded:
            self._load(epoch, block)
        rows = self._order[:, place]
        ids, contexts = _rows(self._ids, rows), self._contexts
        begins = None if self._begins is None else _rows(self._begins, rows)
        goes_on = None
        if not self._shuffled:
            goes_on = torch.tensor([contexts.goes_on(number, self._seed) for number in ids.tolist()])
            goes_on &= True if begins is None else ~begins[:, 0]
        labels = torch.from_numpy(contexts.labels(ids.tolist(), self._seed)) if contexts.is_labelled else None
        return Batch(
            tokens=_rows(self._tokens, rows),
            lengths=_rows(self._lengths, rows),
            sample_ids=ids,
            state=StreamState(
                self._fingerprint, self._seed, *self._lanes.position(number + 1), self._lanes.global_batch
            ),
            substitutions=tuple(self._substitutions[row] for row in rows.tolist() if row in self._substitutions),
            begins=begins,
            separators=None if self._separators is None else _rows(self._separators, rows),
            labels=labels,
            goes_on=goes_on,
        )

    def _load(self, epoch: int, block: int) -> None:
        """Read a block of every lane. The row of a context over all lanes is lane * S + number."""
        self._loaded = None
        size = min(self._size, self._lanes.steps_in(epoch) - block * self._size)
        if self._tokens.shape[1] != size:
            self._tokens = np.empty((len(self._numbers), size, self._tokens.shape[2]), dtype=self._tokens.dtype)
        self._lengths, self._ids, self._order = np.empty((3, len(self._numbers), size), dtype=np.int64)
        marks = np.empty((*self._ids.shape, self._contexts.context), dtype=bool) if self._contexts.is_apart else None
        self._begins = marks  # (L, S, N)
        self._separators = np.empty_like(self._ids) if self._contexts.has_separators else None  # (L, S)
        self._substitutions: dict[int, Substitution] = {}
        for place, lane in enumerate(self._numbers):
            first = self._lanes.context_id(epoch, block * self._size, lane)
            self._ids[place] = np.arange(first, first + size)
            order = block_order(size, self._seed, epoch, lane, block) if self._shuffled else np.arange(size)
            self._order[place] = place * size + order
            try:
                self._read(first, place, slice(0, size))
            except DataError:
                if self._on_damage == "abort":
                    raise
                self._load_with_substitutes(epoch, place)
        self._loaded = epoch, block

    def _read(self, first: int, place: int, within: slice) -> None:
        """Read contexts from ``first`` on into a part of a lane's block."""
        tokens, lengths = self._tokens[place, within], self._lengths[place, within]
        self._contexts.read(self._readers[place], first, tokens, lengths, self._seed)
        if self._begins is not None:
            self._begins[place, within] = self._contexts.begins(first, len(tokens), self._seed)
        if self._separators is not None:
            self._separators[place, within] = self._contexts.separators(first, len(tokens), self._seed).sum(1)

    def _load_with_substitutes(self, epoch: int, place: int) -> None:
        """Read a lane's damaged block context by context, and substitute those that cannot be read.

        Raises DataError if no substitute can be read.
        """
        for number, context in enumerate(self._ids[place].tolist()):
            try:
                self._read(context, place, slice(number, number + 1))
                continue
            except DataError as error:
                damage = str(error)
            candidates = substitutes(self._lanes.contexts_of(epoch), self._seed, epoch, context)
            for candidate in candidates:
                with suppress(DataError):
                    self._read(candidate, place, slice(number, number + 1))
                    break
            else:
                rule = (
                    f"all {len(candidates)} contexts that could replace it are damaged too; repair or rebuild the data"
                )
                raise DataError(f"{damage}; {rule}")
            self._ids[place, number] = candidate
            substitution = Substitution(candidate, context, damage.removesuffix(f"; {REPAIR}"))
            self._substitutions[place * self._ids.shape[1] + number] = substitution


def _rows(blocks: np.ndarray, rows: np.ndarray) -> Tensor:
    """Select rows over all lanes, (L,), from blocks, (L, S, ...): (L, ...)."""
    return torch.from_numpy(blocks.reshape(-1, *blocks.shape[2:]).take(rows, axis=0))


class ByteStream(IterableDataset[Batch]):
    """An endless stream of one rank's batches; each ``iter()`` begins again at ``state``.

    ``location`` is a folder, a URL or an open DataFolder. ``state`` (None: the beginning) may come from a run with
    another world size, workers or prefetch. A block of each lane is held in memory.

    A torch ``DataLoader`` takes the stream with ``batch_size=None`` and at most one worker; use ``settings.workers``
    for more. torchdata's ``StatefulDataLoader`` resumes by ``state_dict``.

    Raises DataError for a folder, split, batch or state that does not fit. Iteration raises DataError for damage
    that ``settings.on_damage`` does not allow, before a damaged sample is returned.
    """

    def __init__(
        self,
        location: str | Path | DataFolder,
        settings: StreamSettings,
        split: str = "train",
        *,
        remote: RemoteSettings | None = None,
        state: StreamState | None = None,
    ) -> None:
        for name, value, kind in (("settings", settings, StreamSettings), ("split", split, str)):
            if not isinstance(value, kind):
                rule = f"{type(value).__name__} is not a {kind.__name__}; give ByteStream(location, settings, split)"
                raise DataError(f"{name}: {rule}")
        self.settings = settings
        folder = DataFolder.at(location, remote)
        self.contexts = cut_contexts(
            folder.split(split), settings.context, settings.cut, shuffle_shards=settings.shuffle_shards
        )
        self.lanes = Lanes(self.contexts.total_units, self.contexts.context_units, settings.global_batch)
        self._rank_lanes = self.lanes.of_rank(settings.rank, settings.world_size)
        self.contexts.split.reserve(len(self._rank_lanes))
        self.fingerprint = stream_fingerprint(
            folder, split, settings.context, settings.cut, settings.shuffle_bytes, settings.shuffle_shards
        )
        self.state = self._taken = StreamState(
            self.fingerprint, settings.seed, *self.lanes.position(0), settings.global_batch
        )
        if state is not None:
            self._begin_at(state)

    def _begin_at(self, state: StreamState) -> None:
        """Set the state. Raises DataError if it does not fit."""
        state.check_belongs(self.state)
        steps = self.lanes.steps_in(state.epoch)
        if state.step >= steps:
            raise DataError(f"state.step={state.step}: epoch {state.epoch} has {steps} steps, counted from 0")
        self.state = self._taken = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch, for ``torchdata.stateful_dataloader``."""
        return self._taken.to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin at a state that ``state_dict`` returned. Raises DataError if it does not fit."""
        self._begin_at(StreamState.from_json(state))

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            rule = "each worker of the loader would read the same batches; at most 1, or settings.workers in its place"
            raise DataError(f"num_workers={worker.num_workers}: {rule}")
        self._taken = self.state
        num_readers = max(1, min(self.settings.workers, len(self._rank_lanes)))
        bounds = [number * len(self._rank_lanes) // num_readers for number in range(num_readers + 1)]
        readers = [
            LanesReader(self.contexts, self.lanes, self._rank_lanes[first:end], self.settings, self.fingerprint)
            for first, end in pairwise(bounds)
        ]
        first_batch = self.lanes.batch_number(self.state.epoch, self.state.step)
        shares = [map(reader.take, count(first_batch)) for reader in readers]
        with ExitStack() as stack:
            batches: Iterator[Batch] = shares[0]
            if self.settings.workers:
                self.contexts.split.close()  # a fork during a fetch could deadlock in the child
                workers = Workers(shares, self.settings.prefetch, self.settings.worker_timeout_seconds)
                stack.enter_context(closing(workers))
                batches = (join_batches(workers.take()) for _ in count())
            for batch in batches:
                self._taken = batch.state
                yield batch

    @property
    def properties(self) -> Mapping[str, int]:
        """Properties of all documents, such as a picture's height."""
        return self.contexts.split.manifest.properties

    def carried(self, epoch: int) -> str | None:
        """Describe the units of earlier epochs that an epoch reads first; None if there are none."""
        start = self.lanes.contexts_of(epoch).start * self.lanes.context_units
        carried_units = epoch * self.lanes.total_units - start
        if not carried_units:
            return None
        unit = "contexts" if self.lanes.context_units == 1 else "bytes"
        place = self.contexts.place(start, self.settings.seed)
        return f"{carried_units:,} {unit} are carried over into epoch {epoch}, from {place} on"


def stream_fingerprint(
    folder: DataFolder, split: str, context: int, cut: Cut, shuffle_bytes: int, shuffle_shards: bool = True
) -> str:
    """Compute the fingerprint of a training stream from the data set's and all settings that decide what a step reads.

    No index is read. Raises DataError if the cut does not fit the documents.
    """
    manifest = folder.manifest
    settled = settle_cut(cut, context, modality_named(manifest.modality), manifest.properties, folder.palette)
    text = f"{manifest.fingerprint}/{split}/{settled.identity(context)}/{shuffle_bytes}"
    text += "" if shuffle_shards else "/shards in order"
    return hashlib.sha256(text.encode()).hexdigest()
