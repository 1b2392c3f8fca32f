"""The contexts of a split: the bytes of each, and reading them.

Letters: N positions of a context. Documents are either *packed*: concatenated with or without a separator and divided
every N bytes. Or they have their own contexts, which begin every ``hop`` bytes; the last one is shorter. A picture is
one context, of exactly its size. A position is a byte. If the data folder has a palette, it is a pixel, and its token
is the index of its colour.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Modality, Properties
from longstride.data_pipelines.order.lanes import shard_order
from longstride.data_pipelines.palette import CHANNELS, Palette
from longstride.data_pipelines.shards import SampleReader, Split

_CACHED_ORDERS = 4  # shard orders in memory: lanes read an epoch and the remainder of the previous one


@dataclass(frozen=True, slots=True)
class Cut:
    """How documents become contexts."""

    packing: bool | None = None  # whether documents are concatenated; None: the modality's default
    separator: int | None = None  # a byte after each packed document
    hop: int | None = None  # bytes between the beginnings of a document's contexts if not packed; None: N
    apart: bool = False  # whether batches mark where packed documents begin, so that they are kept apart
    labelled: bool = False  # whether batches have the classes of documents, which are then not packed

    def identity(self, context: int) -> str:
        """Name a settled cut: with the data set, it decides the bytes of each context."""
        return f"packed/{context}/{self.separator}" if self.hop is None else f"documents/{context}/{self.hop}"


class Visit(NamedTuple):
    """A run of units within one shard."""

    shard: int
    start: int  # units of the shard before the run
    end: int
    following: int | None  # the next shard


def settle_cut(
    cut: Cut, context: int, modality: Modality, properties: Properties, palette: Palette | None = None
) -> Cut:
    """Resolve the defaults of a cut: packing, and the hop if documents are not packed.

    Raises DataError if the cut does not fit the documents.
    """
    if context < 1:
        raise DataError(f"context={context}: must be at least 1")
    if modality.packing if cut.packing is None else cut.packing:
        if palette is not None:
            rule = "pictures of a palette are not packed, each fills one context; set packing=false"
            raise DataError(f"packing=true: {rule}")
        if cut.labelled:
            raise DataError("packing=true: joins documents, and a context has the class of one; set packing=false")
        if cut.hop is not None:
            raise DataError(f"hop={cut.hop}: packed documents are cut every {context} bytes; set packing=false")
        if cut.separator is not None and not 0 <= cut.separator <= 255:
            raise DataError(f"separator={cut.separator}: must be a byte, 0 to 255, or null")
        return Cut(packing=True, separator=cut.separator, apart=cut.apart)
    if cut.separator is not None:
        raise DataError(f"separator={cut.separator}: only applies to packed documents; set packing=true")
    hop = context if cut.hop is None else cut.hop
    if not 1 <= hop <= context:
        raise DataError(f"hop={hop}: must be from 1 to the context {context}, or some bytes would never be read")
    size, what = modality.document_bytes(properties), "bytes"
    if size is not None and palette is not None:
        size, what = size // CHANNELS, f"{palette.unit}s"
    if size not in (None, context):
        raise DataError(f"context={context}: must be {size}, the {what} of every {modality.name} of this set")
    return Cut(packing=False, hop=hop, labelled=cut.labelled)


def cut_contexts(
    split: Split, context: int, cut: Cut, hop: int | None = None, *, shuffle_shards: bool = True
) -> "Contexts":
    """Divide a split into contexts. A ``hop`` replaces that of the cut, also for packed documents.

    Without ``shuffle_shards`` every epoch reads the shards in the order of the manifest.

    Raises DataError if the cut does not fit the documents.
    """
    settled = settle_cut(cut, context, split.modality, split.manifest.properties, split.palette)
    contexts: Contexts
    if settled.hop is None:
        contexts = PackedContexts(split, context, settled.separator, hop or context, is_apart=settled.apart)
    else:
        contexts = DocumentContexts(split, context, hop or settled.hop, is_labelled=settled.labelled)
    contexts.shuffles_shards = shuffle_shards
    return contexts


def contexts_in(lengths: np.ndarray, context: int, hop: int) -> np.ndarray:
    """Return how many contexts cover a document of each length, (documents,) int64."""
    return 1 + np.maximum(0, -(-(lengths - context) // hop))


class Contexts(ABC):
    """The contexts of a split, numbered as in lanes.py. Each epoch may have its own permutation of the shards.

    ``units`` are the units of each shard, (shards,) int64.
    """

    count: int  # contexts of the canonical order, the last one of a stream maybe shorter
    is_apart = False  # whether documents of a context are kept apart
    has_separators = False
    is_labelled = False  # whether batches have the classes of documents
    shuffles_shards = True

    def __init__(self, split: Split, context: int, units: np.ndarray, context_units: int) -> None:
        self.split, self.context, self._units = split, context, units  # context: N
        self.total_units, self.context_units = int(units.sum()), context_units
        # Of a seed and an epoch: the shards' order, (n,), and the units before each of them and in all, (n + 1,) int64.
        self._orders: dict[tuple[int | None, int], tuple[np.ndarray, np.ndarray]] = {}

    @abstractmethod
    def read(self, reader: SampleReader, first: int, rows: np.ndarray, lengths: np.ndarray, seed: int | None) -> None:
        """Write the contexts ``first``, first + 1 ... into ``rows``, (n, N) ``dtype``, and ``lengths``, (n,) int64.

        Lengths are 1 to N. The order is that of ``seed``; None is the canonical order, of one epoch. Positions beyond a
        context's length are 0. Raises DataError, naming shard and sample, for damage.
        """

    @abstractmethod
    def goes_on(self, number: int, seed: int | None) -> bool:
        """Whether context ``number``, as in ``read``, continues the context before it.

        Packed text goes on until the next shard is not the one that follows in the manifest; otherwise a document does.
        """

    def begins(self, first: int, count: int, seed: int | None) -> np.ndarray:
        """Mark where documents begin in contiguous contexts from ``first`` on, (count, N) bool, if they are kept apart.

        A document that continues in another shard begins again there. Every position beyond a row's length begins a
        document of its own. Raises DataError for a damaged index.
        """
        raise NotImplementedError

    def separators(self, first: int, count: int, seed: int | None) -> np.ndarray:
        """Mark the separators of contiguous contexts from ``first`` on, (count, N) bool, if documents have any.

        The same byte can occur in a document, so the indexes are used and not the bytes. Raises like ``begins``.
        """
        raise NotImplementedError

    def labels(self, numbers: Sequence[int], seed: int | None) -> np.ndarray:
        """Return the class of each context's document, (n, 1) int64, if documents have any; numbers as in ``read``."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype:
        """Type of tokens: uint8, or wider for a large palette."""
        return np.dtype(np.uint8) if self.split.palette is None else self.split.palette.dtype

    def place(self, unit: int, seed: int) -> str:
        """Return the shard of a unit, for messages."""
        visit = next(self.visits(unit, unit + 1, seed))
        return self.split.path(visit.shard)

    def visits(self, start: int, end: int, seed: int | None) -> Iterator[Visit]:
        """Yield the runs that make up units ``[start, end)``."""
        while start < end:
            epoch, offset = divmod(start, self.total_units)
            if (seed, epoch) not in self._orders:
                while len(self._orders) >= _CACHED_ORDERS:
                    del self._orders[next(iter(self._orders))]
                count = len(self._units)
                order = np.arange(count)
                if seed is not None and self.shuffles_shards:
                    order = shard_order(count, seed, epoch)
                self._orders[seed, epoch] = order, np.concatenate([[0], np.cumsum(self._units[order])])
            order, edges = self._orders[seed, epoch]
            place = int(np.searchsorted(edges, offset, side="right")) - 1
            within = offset - int(edges[place])
            size = min(end - start, int(edges[place + 1]) - offset)
            following = int(order[place + 1]) if place + 1 < len(order) else None
            yield Visit(int(order[place]), within, within + size, following)
            start += size


class PackedContexts(Contexts):
    """Contexts of concatenated documents, one every ``hop`` bytes; a unit is a byte."""

    def __init__(self, split: Split, context: int, separator: int | None, hop: int, *, is_apart: bool = False) -> None:
        self._separator, self._hop = separator, hop
        self.is_apart, self.has_separators = is_apart, separator is not None
        units = [shard.content_bytes + self.has_separators * shard.documents for shard in split.shards]
        super().__init__(split, context, np.array(units, dtype=np.int64), context)
        self.count = int(contexts_in(np.array(self.total_units), context, hop))

    def read(self, reader: SampleReader, first: int, rows: np.ndarray, lengths: np.ndarray, seed: int | None) -> None:
        starts = (first + np.arange(len(rows))) * self._hop
        end = int(starts[-1]) + self.context
        if seed is None:
            end = min(end, self.total_units)
        lengths[:] = np.clip(end - starts, 0, self.context)
        if self._hop == self.context:  # contexts are contiguous, and are read at once
            starts, rows = starts[:1], rows.reshape(1, -1)
        for start, row in zip(starts.tolist(), rows, strict=True):
            done = 0
            for visit in self.visits(start, min(start + len(row), end), seed):
                reader.expect(visit.following)
                size = visit.end - visit.start
                reader.fill(visit.shard, visit.start, row[done : done + size], self._separator)
                done += size
            row[done:] = 0

    def goes_on(self, number: int, seed: int | None) -> bool:
        start = number * self._hop
        visits = list(self.visits(start - 1, start + 1, seed)) if number else []
        return len(visits) == 1 or (len(visits) == 2 and visits[1].shard == visits[0].shard + 1)

    def begins(self, first: int, count: int, seed: int | None) -> np.ndarray:
        begins = self._marks(first, count, seed, slice(None, -1))
        if seed is None:
            begins.reshape(-1)[max(0, self.total_units - first * self._hop) :] = True
        return begins

    def separators(self, first: int, count: int, seed: int | None) -> np.ndarray:
        return self._marks(first, count, seed, slice(1, None))

    def _marks(self, first: int, count: int, seed: int | None, selection: slice) -> np.ndarray:
        """Mark the selected document edges in contiguous contexts from ``first`` on, (count, N) bool."""
        assert count == 1 or self._hop == self.context
        start, done = first * self._hop, 0
        marks = np.zeros(count * self.context, dtype=bool)
        end = start + len(marks)
        for visit in self.visits(start, end if seed is not None else min(end, self.total_units), seed):
            edges = self.split.open(visit.shard).document_edges[selection]
            if self.has_separators:
                edges = edges + np.arange(len(edges))
            within = edges[slice(*np.searchsorted(edges, (visit.start, visit.end)))]
            marks[within - visit.start + done] = True
            done += visit.end - visit.start
        return marks.reshape(count, self.context)


class DocumentContexts(Contexts):
    """Contexts with bytes of a single document; a unit is a context."""

    def __init__(self, split: Split, context: int, hop: int, *, is_labelled: bool = False) -> None:
        self._palette, self.is_labelled = split.palette, is_labelled
        self._ended = np.cumsum([0, *(shard.documents for shard in split.shards)])  # documents, before each shard
        width = 1 if self._palette is None else CHANNELS  # bytes of a position
        self._width, self._bytes, self._hop = width, width * context, width * hop
        if split.modality.document_bytes(split.manifest.properties) is not None:  # the manifest counts them
            units = np.array([shard.documents for shard in split.shards], dtype=np.int64)
        else:  # every index is read, once
            key = self._bytes, self._hop
            if key not in split.tables:
                counts = [int(contexts_in(sizes, *key).sum()) for sizes in split.document_sizes()]
                split.tables[key] = np.array(counts, dtype=np.int64)
            units = split.tables[key]
        super().__init__(split, context, units, 1)
        self.count = self.total_units

    def read(self, reader: SampleReader, first: int, rows: np.ndarray, lengths: np.ndarray, seed: int | None) -> None:
        rows[:] = 0
        done = 0
        for visit in self.visits(first, first + len(rows), seed):
            reader.expect(visit.following)
            edges, before = self.split.open(visit.shard).document_edges, self._before(visit.shard)
            numbers = np.arange(visit.start, visit.end)
            documents = np.searchsorted(before, numbers, side="right") - 1
            starts = edges[documents] + (numbers - before[documents]) * self._hop  # (n,), in the shard's content
            sizes = np.minimum(self._bytes, edges[documents + 1] - starts)
            lengths[done : done + len(numbers)] = sizes // self._width
            stops = starts + sizes
            # The ranges in a shard are ascending and may overlap. Contiguous runs are read at once.
            gaps = np.flatnonzero(starts[1:] > stops[:-1]) + 1
            for run in np.split(np.arange(len(numbers)), gaps):
                base = int(starts[run[0]])
                content = np.empty(int(stops[run[-1]]) - base, dtype=np.uint8)
                reader.fill(visit.shard, base, content)
                places = ((starts[run] - base).tolist(), (stops[run] - base).tolist())
                for number, start, stop in zip((run + done).tolist(), *places, strict=True):
                    tokens = content[start:stop]
                    tokens = tokens if self._palette is None else self._palette.tokens(tokens)
                    rows[number, : len(tokens)] = tokens
            done += len(numbers)

    def goes_on(self, number: int, seed: int | None) -> bool:
        visit = next(self.visits(number, number + 1, seed))
        before = self._before(visit.shard)
        return int(before[np.searchsorted(before, visit.start)]) != visit.start

    def labels(self, numbers: Sequence[int], seed: int | None) -> np.ndarray:
        documents = []
        for number in numbers:
            visit = next(self.visits(number, number + 1, seed))
            place = np.searchsorted(self._before(visit.shard), visit.start, side="right") - 1
            documents.append(self._ended[visit.shard] + place)
        return self.split.labels[documents].astype(np.int64)[:, None]

    def _before(self, number: int) -> np.ndarray:
        """Return the contexts before each document of a shard and in all, (documents + 1,) int64."""
        shard, key = self.split.open(number), (self._bytes, self._hop)
        if key not in shard.tables:
            sizes = np.diff(shard.document_edges)
            shard.tables[key] = np.concatenate([[0], np.cumsum(contexts_in(sizes, *key))])
        return shard.tables[key]
