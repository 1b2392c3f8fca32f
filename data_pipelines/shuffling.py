"""One lane: its contexts are read block after block, and each block is given out in an order of its own."""

from functools import partial

import numpy as np

from data_pipelines.contexts import Contexts
from data_pipelines.damage import Substitution, substitute
from data_pipelines.errors import DataError
from data_pipelines.lanes import Lanes, block_order, substitutes
from data_pipelines.reading import READ_BYTES, SampleReader


class LaneReader:
    """The contexts of one lane, steps ascending."""

    def __init__(
        self, contexts: Contexts, lanes: Lanes, seed: int, lane: int, block_contexts: int, on_damage: str
    ) -> None:
        self._contexts, self._lanes, self._seed, self._lane = contexts, lanes, seed, lane
        self.context = contexts.context
        # Blocks of one context are in sequence; they are read as many at once.
        self._shuffled = block_contexts > 1
        self._size = block_contexts if self._shuffled else max(1, READ_BYTES // contexts.context)
        self._rows = np.empty((0, contexts.context), dtype=np.uint8)
        self._on_damage = on_damage
        self._reader = SampleReader(contexts.split)
        self._loaded: tuple[int, int] | None = None  # epoch and block

    def take(self, epoch: int, step: int, row: np.ndarray) -> tuple[int, int, Substitution | None]:
        """Write the context of a step into ``row``, (N,) uint8; return its number, length, and whom it replaces."""
        block, place = divmod(step, self._size)
        if (epoch, block) != self._loaded:
            self._load(epoch, block)
        chosen = int(self._order[place])
        row[:] = self._rows[chosen]
        return int(self._ids[chosen]), int(self._lengths[chosen]), self._substitutions.get(chosen)

    def _load(self, epoch: int, block: int) -> None:
        first = self._lanes.context_id(epoch, block * self._size, self._lane)
        count = min(self._size, self._lanes.steps_in(epoch) - block * self._size)
        self._loaded = None
        if len(self._rows) < count:
            self._rows = np.empty((count, self._contexts.context), dtype=np.uint8)
        self._lengths = np.empty(count, dtype=np.int64)
        self._ids = np.arange(first, first + count)
        self._order = block_order(count, self._seed, epoch, self._lane, block) if self._shuffled else np.arange(count)
        self._substitutions: dict[int, Substitution] = {}
        try:
            self._contexts.read(self._reader, first, self._rows[:count], self._lengths, self._seed)
        except DataError:
            if self._on_damage == "abort":
                raise
            self._load_one_by_one(epoch)
        self._loaded = epoch, block

    def _load_one_by_one(self, epoch: int) -> None:
        """Reads what can be read of a block that holds damage, and substitutes for the rest."""
        for place, context in enumerate(self._ids.tolist()):
            row, length = self._rows[place : place + 1], self._lengths[place : place + 1]
            read = partial(self._read_one, row=row, length=length)
            try:
                read(context)
            except DataError as damage:
                candidates = substitutes(self._lanes.contexts_of(epoch), self._seed, epoch, context)
                found = substitute(read, context, damage, candidates)
                self._ids[place] = found.context
                self._substitutions[place] = found

    def _read_one(self, context: int, *, row: np.ndarray, length: np.ndarray) -> None:
        self._contexts.read(self._reader, context, row, length, self._seed)
