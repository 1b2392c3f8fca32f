"""The contexts of one rank's steps: lanes read block after block, here or ahead by worker processes.

Letters: N positions a context, P of them that are read, L lanes of a reader, S contexts of a block.

Each block of a lane is given out in an order of its own. Workers share out the lanes, not the steps: each lane is read
once, in sequence, by one process, and every worker's share of a step is asked for in turn. So the contexts are the same
with any number of workers.

Of a context that cannot be read the run ends, or another context of the epoch stands in for it. Which one follows from
(seed, epoch, context) alone: whoever reads the damaged context, whatever the number of ranks and workers, finds the
same substitute. Processes that share contexts by spans must agree on that too, yet each would meet its own damage
alone: so under ``substitute`` whole contexts are read and verified, and a span only chooses what is handed on.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.contexts import Contexts, Cut, Span
from longstride.data_pipelines.order.lanes import Lanes, block_order, shard_order, substitutes
from longstride.data_pipelines.order.workers import Workers
from longstride.data_pipelines.settings import ON_DAMAGE, REPAIR, SHUFFLE_BYTES
from longstride.data_pipelines.shards import SampleReader


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What is asked of a stream. Raises DataError for a value that is out of range."""

    context: int  # N
    global_batch: int  # contexts a step, over all ranks
    seed: int = 0  # of the order
    rank: int = 0
    world_size: int = 1
    cut: Cut = Cut()  # noqa: RUF009 - frozen
    span: Span | None = None  # of every context, what this process needs; None: all. No part of the order
    shuffle_bytes: int = SHUFFLE_BYTES  # each lane is shuffled in blocks of this size; 0 reads it in sequence
    on_damage: str = "abort"
    workers: int = 0  # processes that read ahead
    prefetch: int = 2  # steps that each worker reads ahead
    worker_timeout_seconds: float = 900.0  # that nothing may come from a worker which is waited for

    def __post_init__(self) -> None:
        for name, least in (("shuffle_bytes", 0), ("workers", 0), ("prefetch", 1)):
            if getattr(self, name) < least:
                raise DataError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not 0 < self.worker_timeout_seconds < float("inf"):
            rule = "must be a positive number, such as 900"
            raise DataError(f"worker_timeout_seconds={self.worker_timeout_seconds!r}: {rule}")
        if self.span is not None:
            self.span.within(self.context)
        shard_order(0, self.seed, 0)  # refuses a seed that cannot be used
        if self.on_damage not in ON_DAMAGE:
            raise DataError(f"on_damage={self.on_damage!r}: must be one of {', '.join(ON_DAMAGE)}")

    @property
    def block_contexts(self) -> int:
        """Contexts of a block, S; 1 where a lane is read in sequence."""
        return max(1, self.shuffle_bytes // self.context)


@dataclass(frozen=True, slots=True)
class Substitution:
    """A context that stands in for a damaged one."""

    context: int  # the number of the one delivered
    damaged: int  # of the one that cannot be read
    damage: str  # what is wrong, naming shard and sample

    def __str__(self) -> str:
        return f"context {self.context} stands in for {self.damaged}: {self.damage}"


@dataclass(frozen=True, slots=True)
class LaneRows:
    """Some lanes' contexts of one step."""

    tokens: np.ndarray  # (lanes, P), of the type that the contexts have
    lengths: np.ndarray  # (lanes,) int64
    sample_ids: np.ndarray  # (lanes,) int64
    substitutions: tuple[Substitution, ...]
    begins: np.ndarray | None = None  # (lanes, N) bool, see ``Contexts.begins``
    separators: np.ndarray | None = None  # (lanes,) int64, see ``Contexts.separators``


class LanesReader:
    """The contexts of some lanes, steps ascending. Their blocks end at the same steps, and are read together."""

    def __init__(self, contexts: Contexts, lanes: Lanes, own: Sequence[int], settings: StreamSettings) -> None:
        self._contexts, self._lanes, self._own = contexts, lanes, own
        self._seed, self._on_damage = settings.seed, settings.on_damage
        # Blocks of one context are in sequence; they are read as many at once.
        self._shuffled = settings.block_contexts > 1
        in_sequence = max(1, SampleReader.READ_BYTES // contexts.context)
        self._size = settings.block_contexts if self._shuffled else in_sequence  # S
        self._readers = [SampleReader(contexts.split) for _ in own]
        self._rows = np.empty((len(own), 0, len(contexts.span)), dtype=contexts.dtype)  # (L, S, P)
        self._begins: list[np.ndarray | None] = [None] * len(own)  # (S, N) each
        self._separators: list[np.ndarray | None] = [None] * len(own)  # (S,) each
        self._loaded: tuple[int, int] | None = None  # epoch and block

    def take(self, epoch: int, step: int) -> LaneRows:
        """The contexts of a step."""
        block, place = divmod(step, self._size)
        if (epoch, block) != self._loaded:
            self._load(epoch, block)
        chosen = self._order[:, place]
        stand_ins = (self._substitutions.get(each) for each in chosen.tolist()) if self._substitutions else ()
        return LaneRows(
            tokens=self._rows.reshape(-1, self._rows.shape[2]).take(chosen, axis=0),
            lengths=self._lengths.take(chosen),
            sample_ids=self._ids.take(chosen),
            substitutions=tuple(each for each in stand_ins if each is not None),
            begins=self._chosen(self._begins, chosen),
            separators=self._chosen(self._separators, chosen),
        )

    def _chosen(self, blocks: Sequence[np.ndarray | None], chosen: np.ndarray) -> np.ndarray | None:
        """Take from each lane's block, (S, ...), the context at its place, (L,): (L, ...); None without blocks."""
        size = self._rows.shape[1]
        rows = [block[place % size] for block, place in zip(blocks, chosen, strict=True) if block is not None]
        return np.stack(rows) if rows else None

    def _load(self, epoch: int, block: int) -> None:
        """Reads a block of every lane. The place of a context is its number over all lanes: lane * S + number."""
        self._loaded = None
        count = min(self._size, self._lanes.steps_in(epoch) - block * self._size)
        if self._rows.shape[1] != count:
            self._rows = np.empty((len(self._own), count, self._rows.shape[2]), dtype=self._rows.dtype)
        self._lengths = np.empty((len(self._own), count), dtype=np.int64)
        self._ids = np.empty_like(self._lengths)
        self._order = np.empty_like(self._lengths)
        self._substitutions: dict[int, Substitution] = {}
        for place, lane in enumerate(self._own):
            first = self._lanes.context_id(epoch, block * self._size, lane)
            self._ids[place] = np.arange(first, first + count)
            order = block_order(count, self._seed, epoch, lane, block) if self._shuffled else np.arange(count)
            self._order[place] = place * count + order
            try:
                self._contexts.read(self._readers[place], first, self._rows[place], self._lengths[place], self._seed)
                self._begins[place] = self._contexts.begins(first, count, self._seed)
                self._separators[place] = self._contexts.separators(first, count, self._seed)
            except DataError:
                if self._on_damage == "abort":
                    raise
                self._load_one_by_one(epoch, place)
        self._loaded = epoch, block

    def _load_one_by_one(self, epoch: int, place: int) -> None:
        """Reads what can be read of a lane's block that holds damage, and substitutes for the rest.

        Raises DataError where so many contexts are damaged that no substitute is found.
        """

        def read(context: int, number: int) -> None:
            row, length = self._rows[place, number : number + 1], self._lengths[place, number : number + 1]
            self._contexts.read(self._readers[place], context, row, length, self._seed)
            begins.append(self._contexts.begins(context, 1, self._seed))
            separators.append(self._contexts.separators(context, 1, self._seed))

        begins: list[np.ndarray | None] = []
        separators: list[np.ndarray | None] = []
        for number, context in enumerate(self._ids[place].tolist()):
            try:
                read(context, number)
                continue
            except DataError as error:
                damage = str(error)
            candidates = substitutes(self._lanes.contexts_of(epoch), self._seed, epoch, context)
            for candidate in candidates:
                with suppress(DataError):
                    read(candidate, number)
                    break
            else:
                rule = f"so are all {len(candidates)} contexts that could stand in for it: too much is lost"
                raise DataError(f"{damage}; {rule}")
            self._ids[place, number] = candidate
            stand_in = Substitution(candidate, context, damage.removesuffix(f"; {REPAIR}"))
            self._substitutions[place * self._rows.shape[1] + number] = stand_in
        self._begins[place], self._separators[place] = _joined(begins), _joined(separators)


def load_rows(
    contexts: Contexts, lanes: Lanes, own: Sequence[int], settings: StreamSettings, first_batch: int
) -> Generator[LaneRows, None, None]:
    """The contexts of a rank's lanes at each step from global batch ``first_batch`` on, without end.

    With workers, as many processes read as there are workers, and lanes for. Raises DataError as ``LanesReader`` does,
    and LostWorkerError.
    """
    num_readers = max(1, min(settings.workers, len(own)))
    bounds = [number * len(own) // num_readers for number in range(num_readers + 1)]
    readers = [LanesReader(contexts, lanes, own[first:end], settings) for first, end in pairwise(bounds)]
    if settings.workers == 0:
        yield from _share(readers[0], lanes, first_batch)
    contexts.split.close()  # a fork in the midst of a fetch could stand still in the child
    shares = [_share(reader, lanes, first_batch) for reader in readers]
    with closing(Workers(shares, settings.prefetch, settings.worker_timeout_seconds)) as workers:
        while True:
            step = workers.take()
            yield (
                step[0]
                if len(step) == 1
                else LaneRows(
                    tokens=np.concatenate([part.tokens for part in step]),
                    lengths=np.concatenate([part.lengths for part in step]),
                    sample_ids=np.concatenate([part.sample_ids for part in step]),
                    substitutions=tuple(each for part in step for each in part.substitutions),
                    begins=_joined([part.begins for part in step]),
                    separators=_joined([part.separators for part in step]),
                )
            )


def _share(reader: LanesReader, lanes: Lanes, first_batch: int) -> Iterator[LaneRows]:
    """What one process reads: its lanes at each step from a global batch on, without end."""
    return (reader.take(*lanes.position(batch)) for batch in count(first_batch))


def _joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """One below the other; None where they are none, which all are or none is."""
    given = [part for part in parts if part is not None]
    return np.concatenate(given) if given else None
