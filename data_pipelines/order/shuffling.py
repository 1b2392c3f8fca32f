"""Lanes: their contexts are read block after block, and each block is given out in an order of its own.

Letters: L lanes of a reader, S contexts of a block, N positions of a context.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.contexts import Contexts
from longstride.data_pipelines.order.damage import Substitution, substitute
from longstride.data_pipelines.order.lanes import Lanes, block_order, substitutes
from longstride.data_pipelines.order.loading import Rows
from longstride.data_pipelines.shards import READ_BYTES, SampleReader


class LanesReader:
    """The contexts of some lanes, steps ascending. Their blocks end at the same steps, and are read together."""

    def __init__(
        self, contexts: Contexts, lanes: Lanes, seed: int, own: Sequence[int], block_contexts: int, on_damage: str
    ) -> None:
        self._contexts, self._lanes, self._seed, self._own = contexts, lanes, seed, own
        # Blocks of one context are in sequence; they are read as many at once.
        self._shuffled = block_contexts > 1
        self._size = block_contexts if self._shuffled else max(1, READ_BYTES // contexts.context)  # S
        self._on_damage = on_damage
        self._readers = [SampleReader(contexts.split) for _ in own]
        self._rows = np.empty((len(own), 0, contexts.context), dtype=np.uint8)  # (L, S, N)
        self._loaded: tuple[int, int] | None = None  # epoch and block

    def take(self, epoch: int, step: int) -> Rows:
        """The contexts of a step."""
        block, place = divmod(step, self._size)
        if (epoch, block) != self._loaded:
            self._load(epoch, block)
        chosen = self._order[:, place]
        found = (self._substitutions.get(each) for each in chosen.tolist()) if self._substitutions else ()
        return Rows(
            tokens=self._rows.reshape(-1, self._contexts.context).take(chosen, axis=0),
            lengths=self._lengths.take(chosen),
            sample_ids=self._ids.take(chosen),
            substitutions=tuple(each for each in found if each is not None),
        )

    def _load(self, epoch: int, block: int) -> None:
        """Reads a block of every lane. The place of a context is its number over all lanes: lane * S + number."""
        self._loaded = None
        count = min(self._size, self._lanes.steps_in(epoch) - block * self._size)
        if self._rows.shape[1] != count:
            self._rows = np.empty((len(self._own), count, self._contexts.context), dtype=np.uint8)
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
            except DataError:
                if self._on_damage == "abort":
                    raise
                self._load_one_by_one(epoch, place)
        self._loaded = epoch, block

    def _load_one_by_one(self, epoch: int, place: int) -> None:
        """Reads what can be read of a lane's block that holds damage, and substitutes for the rest."""
        for number, context in enumerate(self._ids[place].tolist()):
            read = partial(self._read_one, place=place, number=number)
            try:
                read(context)
            except DataError as damage:
                candidates = substitutes(self._lanes.contexts_of(epoch), self._seed, epoch, context)
                found = substitute(read, context, damage, candidates)
                self._ids[place, number] = found.context
                self._substitutions[place * self._rows.shape[1] + number] = found

    def _read_one(self, context: int, *, place: int, number: int) -> None:
        row, length = self._rows[place, number : number + 1], self._lengths[place, number : number + 1]
        self._contexts.read(self._readers[place], context, row, length, self._seed)
