"""Batches from plain WebDataset shards, which have no index: an even stream, resumed near the place and not at it.

Letters: N positions a context, G contexts a global batch, W ranks, n workers a rank, S shards.

The shards of all epochs, each epoch permuted by (seed, epoch), are one endless sequence of *turns*. Rank r's worker w
is reader ``r * n + w`` of ``W * n`` and takes every (W * n)-th turn, so that no reader runs out, however uneven the
shards are and however few. Each mixes what it reads in two buffers: documents before they are cut, so that neighbours
of a shard part, and contexts after it, so that those of a long document do.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

import numpy as np
import webdataset as wds
from webdataset.filters import pick

from longstride.data_pipelines.order import (
    Batch,
    Cut,
    Lanes,
    Rows,
    StreamState,
    as_batch,
    load_rows,
    shard_order,
    shared_out,
)
from longstride.data_pipelines.order.stream import check_arguments
from longstride.data_pipelines.plain.cutting import CutContext, Cutter, make_cutter
from longstride.data_pipelines.plain.plain_shards import Document, PlainShard, PlainSplit, Turn
from longstride.data_pipelines.settings import SHUFFLE_BYTES


class PlainStream:
    """An endless stream of one rank's batches from plain shards; each ``iter()`` begins again at ``state``.

    ``state`` (None: the beginning) counts steps, and a stream that is given one goes on near its place: what is read
    depends on world size and workers. A worker mixes what it reads in memory of ``shuffle_bytes`` for each row that it
    has in a step, as much as the lanes of ByteStream take, its part of an epoch at most; 0 reads in sequence.
    ``modality`` and ``extension`` say what a sample's content is, see plain_shards.PlainSplit. Raises DataError for a
    folder, split, batch or state that does not fit, and, while it is iterated, for a shard or sample that cannot be
    read.
    """

    def __init__(
        self,
        location: str | Path,
        split: str = "train",
        *,
        context: int,
        global_batch: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        cut: Cut | None = None,
        shuffle_bytes: int = SHUFFLE_BYTES,
        modality: str = "text",
        extension: str | None = None,
        workers: int = 0,
        prefetch: int = 2,
        state: StreamState | None = None,
    ) -> None:
        check_arguments(seed, shuffle_bytes, workers, prefetch)
        self.split = PlainSplit(location, split, modality, extension)
        self.cutter = make_cutter(self.split, context, cut or Cut())
        self._contexts_per_byte = _contexts_per_byte(self.split, self.cutter, context)
        in_all = round(self._contexts_per_byte * sum(shard.size for shard in self.split.shards))
        self.lanes = Lanes(max(1, in_all), 1, global_batch)  # by estimate
        self._rows = len(self.lanes.of_rank(rank, world_size))
        self.seed = seed
        self.fingerprint = hashlib.sha256(f"{self.split.fingerprint}/{self.cutter.identity}".encode()).hexdigest()
        self._context, self._rank, self._world_size, self._shuffle_bytes = context, rank, world_size, shuffle_bytes
        self._workers, self._prefetch = min(workers, self._rows), prefetch
        self.state = self._state_at(0) if state is None else state
        self.state.check_belongs(self._state_at(0))

    def __iter__(self) -> Iterator[Batch]:
        first = self.state.step
        readers = list(self._readers(first))
        with closing(load_rows(readers, self.lanes, first, self._workers, self._prefetch)) as steps:
            for number, rows in enumerate(steps, start=first):
                yield as_batch(rows, self._state_at(number + 1))

    @property
    def properties(self) -> Mapping[str, int]:
        """What all documents have in common, by the first of them."""
        return self.split.properties

    def carried(self, epoch: int) -> str | None:
        """None: an epoch has no sharp end here, and nothing is left over."""
        return None

    def _readers(self, step: int) -> Iterator["_Mixer"]:
        """One for each worker."""
        shares = shared_out(range(self._rows), self._workers)
        for place, own in enumerate(shares):
            # A buffer of more than the reader's part of an epoch would but blur the epochs.
            part_bytes = self.lanes.total_units * self._context // (self._world_size * len(shares))
            buffer_bytes = min(len(own) * self._shuffle_bytes, part_bytes) // 2
            yield _Mixer(
                self.split,
                self.cutter,
                rows=len(own),
                seed=self.seed,
                place=self._rank * len(shares) + place,
                stride=self._world_size * len(shares),
                passed_bytes=int(step * len(own) / self._contexts_per_byte),
                document_buffer_bytes=buffer_bytes,
                context_buffer=buffer_bytes // self._context,
            )

    def _state_at(self, step: int) -> StreamState:
        """Steps are counted over the whole run; the epoch is how often the shards were passed, by estimate."""
        global_batch = self.lanes.global_batch
        return StreamState(
            self.fingerprint, self.seed, step * global_batch // self.lanes.total_units, step, global_batch
        )


def turns(shards: list[PlainShard], seed: int, place: int, stride: int, passed_bytes: int = 0) -> Iterator[Turn]:
    """Every ``stride``-th turn from ``place`` on, without end, after ``passed_bytes`` of those shards' tar files."""
    known, order = -1, np.empty(0, dtype=np.int64)
    for number in count(place, stride):
        epoch, index = divmod(number, len(shards))
        if epoch != known:
            known, order = epoch, shard_order(len(shards), seed, epoch)
        shard = shards[order[index]]
        if passed_bytes >= shard.size:
            passed_bytes -= shard.size
            continue
        yield Turn(number, shard, passed_bytes)
        passed_bytes = 0


def mixed(documents: Iterable[Document], buffer_bytes: int, generator: random.Random) -> Iterator[Document]:
    """The documents out of a buffer of so many bytes, drawn by ``generator``; WebDataset's own counts samples alone."""
    held: list[Document] = []
    held_bytes = 0
    for document in documents:
        held.append(document)
        held_bytes += len(document.content)
        while held_bytes > buffer_bytes:
            drawn = pick(held, generator)
            held_bytes -= len(drawn.content)
            yield drawn
    while held:
        yield pick(held, generator)


@dataclass(slots=True)
class _Mixer:
    """The contexts of one reader, mixed. Nothing is opened before the first is asked for, in the worker it is for."""

    split: PlainSplit
    cutter: Cutter
    rows: int  # of each step
    seed: int
    place: int
    stride: int
    passed_bytes: int  # of this reader's shards
    document_buffer_bytes: int
    context_buffer: int  # contexts
    _contexts: Iterator[CutContext] | None = field(default=None, init=False)

    def take(self, epoch: int, step: int) -> Rows:
        """The next contexts; no place is asked for."""
        if self._contexts is None:
            self._contexts = iter(self._pipeline())
        taken = list(islice(self._contexts, self.rows))
        return Rows(
            tokens=np.stack([each.tokens for each in taken]),
            lengths=np.array([each.length for each in taken], dtype=np.int64),
            sample_ids=np.array([each.sample_id for each in taken], dtype=np.int64),
            substitutions=(),
        )

    def _pipeline(self) -> wds.DataPipeline:
        own = turns(self.split.shards, self.seed, self.place, self.stride, self.passed_bytes)
        # A text is hashed the same everywhere, and a resumed reader draws anew.
        generator = random.Random(f"{self.seed}/{self.place}/{self.stride}/{self.passed_bytes}")
        size = self.context_buffer
        return wds.DataPipeline(
            lambda: own,
            self.split.documents,
            lambda documents: mixed(documents, self.document_buffer_bytes, generator),
            self.cutter.cut,
            wds.shuffle(size, initial=size, rng=generator) if size > 1 else None,
        )


def _contexts_per_byte(split: PlainSplit, cutter: Cutter, context: int) -> float:
    """Contexts that a byte of the split's tar files becomes, by a few samples."""
    sizes, tar_bytes = split.probe()
    found = sum(cutter.count(size) for size in sizes if size)
    return found / tar_bytes if found else 1 / context
